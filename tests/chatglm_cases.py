"""Small checkpoints of ChatGLM, as their directories hold them."""

import json

import torch
from safetensors.torch import save_file

CONFIG = {
    "model_type": "chatglm",
    "padded_vocab_size": 64,
    "hidden_size": 40,
    "num_layers": 3,
    "num_attention_heads": 6,
    "kv_channels": 8,
    "multi_query_attention": True,
    "multi_query_group_num": 2,
    "ffn_hidden_size": 56,
    "seq_length": 64,
    "layernorm_epsilon": 1e-3,
    "add_qkv_bias": True,
    "add_bias_linear": False,
    "rmsnorm": True,
    "post_layer_norm": True,
    "apply_residual_connection_post_layernorm": False,
    "eos_token_id": 2,
}


def random_tensors(config=CONFIG, dtype=torch.bfloat16):
    """Every tensor of a ChatGLM checkpoint."""
    hidden, inner, width = config["hidden_size"], config["ffn_hidden_size"], config["kv_channels"]
    queries = config["num_attention_heads"] * width
    rows = queries + 2 * config["multi_query_group_num"] * width
    shapes = {
        "transformer.embedding.word_embeddings.weight": (config["padded_vocab_size"], hidden),
        "transformer.encoder.final_layernorm.weight": (hidden,),
        "transformer.output_layer.weight": (config["padded_vocab_size"], hidden),
        "transformer.rotary_pos_emb.inv_freq": (width // 4,),
    }
    for index in range(config["num_layers"]):
        layer = f"transformer.encoder.layers.{index}"
        shapes |= {
            f"{layer}.input_layernorm.weight": (hidden,),
            f"{layer}.self_attention.query_key_value.weight": (rows, hidden),
            f"{layer}.self_attention.query_key_value.bias": (rows,),
            f"{layer}.self_attention.dense.weight": (hidden, queries),
            f"{layer}.post_attention_layernorm.weight": (hidden,),
            f"{layer}.mlp.dense_h_to_4h.weight": (2 * inner, hidden),
            f"{layer}.mlp.dense_4h_to_h.weight": (hidden, inner),
        }
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()
    }


def write(directory, tensors, config=CONFIG):
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config))
    save_file(tensors, directory / "model.safetensors")
    return directory
