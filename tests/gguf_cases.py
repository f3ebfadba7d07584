"""Small models in GGUF format, written as llama.cpp's converter does it."""

from pathlib import Path

import numpy as np
import torch

from longarc.models.decoder_base import Decoder
from longarc.tokens.gguf_tokenizer import TokenType

CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MERGES = ("Ġ t", "h e", "Ġt he", "Ġ Ġ", "ĠĠ ĠĠ", "i n", "' s", "Ċ Ċ")
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
)
PARTS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}


def byte_alphabet() -> list[str]:
    """GPT-2's 256 characters, by byte."""
    own = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(256, 512))
    return [chr(b) if b in own else chr(next(others)) for b in range(256)]


def vocabulary() -> list[str]:
    return [*CONTROL, *byte_alphabet(), *(merge.replace(" ", "") for merge in MERGES)]


def pairs_apart(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """What the converter of llama.cpp calls ``permute``."""
    rows = weight.reshape(num_heads, 2, weight.shape[0] // num_heads // 2, *weight.shape[1:])
    return rows.swapaxes(1, 2).reshape(weight.shape)


def gguf_tensors(model: Decoder) -> dict[str, np.ndarray]:
    """Every tensor under llama.cpp's name."""
    config, tensors = model.config, {}
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    for name, tensor in model.state_dict().items():
        parts = name.split(".")
        is_layer = parts[1] == "layers"
        part = PARTS[".".join(parts[3:-1] if is_layer else parts[:-1])]
        array = tensor.to(torch.float32).numpy()
        if part in heads:
            array = pairs_apart(array, heads[part])
        tensors[f"blk.{parts[2]}.{part}.weight" if is_layer else f"{part}.weight"] = array
    return tensors


def settings_of(model: Decoder) -> dict[str, object]:
    config, tokens = model.config, vocabulary()
    return {
        "llama.block_count": config.num_hidden_layers,
        "llama.context_length": config.max_position_embeddings,
        "llama.embedding_length": config.hidden_size,
        "llama.feed_forward_length": config.intermediate_size,
        "llama.attention.head_count": config.num_attention_heads,
        "llama.attention.head_count_kv": config.num_key_value_heads,
        "llama.rope.freq_base": config.rope_theta,
        "llama.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "llama.rope.dimension_count": config.hidden_size // config.num_attention_heads,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [
            int(TokenType.CONTROL if token in CONTROL else TokenType.NORMAL) for token in tokens
        ],
        "tokenizer.ggml.merges": list(MERGES),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.padding_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.chat_template": TEMPLATE,
    }


def write_gguf(
    path: Path,
    settings: dict[str, object],
    tensors: dict[str, np.ndarray],
    *,
    architecture: str = "llama",
    kind: str = "F32",
) -> None:
    """Write a file; matrices are quantised to ``kind``."""
    from gguf import GGMLQuantizationType, GGUFWriter
    from gguf.quants import quantize

    writer = GGUFWriter(path, architecture)
    for name, value in settings.items():
        match value:
            case str():
                writer.add_string(name, value)
            case int():
                writer.add_uint32(name, value)
            case float():
                writer.add_float32(name, value)
            case _:
                writer.add_array(name, value)
    for name, array in tensors.items():
        if kind == "F32" or array.ndim < 2:
            writer.add_tensor(name, array)
        else:
            dtype = GGMLQuantizationType[kind]
            writer.add_tensor(name, quantize(array, dtype), raw_dtype=dtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
