import pytest
import torch
from chatglm_reference import ChatGlm

from longarc.errors import CheckpointError, ConfigError
from longarc.models.census import take_census
from longarc.models.elders.chatglm_config import glm_config, read_chatglm_config
from longarc.models.elders.chatglm_weights import glm_state_dict

CHATGLM3_6B = {
    "model_type": "chatglm",
    "padded_vocab_size": 65024,
    "hidden_size": 4096,
    "num_layers": 28,
    "num_attention_heads": 32,
    "kv_channels": 128,
    "multi_query_attention": True,
    "multi_query_group_num": 2,
    "ffn_hidden_size": 13696,
    "seq_length": 8192,
    "layernorm_epsilon": 1e-05,
    "add_qkv_bias": True,
    "add_bias_linear": False,
    "rmsnorm": True,
    "post_layer_norm": True,
    "apply_residual_connection_post_layernorm": False,
    "pre_seq_len": None,
    "quantization_bit": 0,
}
SMALL = CHATGLM3_6B | {
    "padded_vocab_size": 64,
    "hidden_size": 40,
    "num_layers": 3,
    "num_attention_heads": 6,
    "kv_channels": 8,
    "ffn_hidden_size": 56,
    "seq_length": 64,
    "layernorm_epsilon": 1e-3,
}


def reference(config, **rope):
    """Build the reference with weights that are far from uniform."""
    model = ChatGlm(config, **rope)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.25, generator=generator)
            else:
                parameter.uniform_(0.5, 1.5, generator=generator)
    return model


def test_a_number_of_layers_that_no_model_has_is_refused_at_once():
    with pytest.raises(ConfigError, match=r"num_layers: .*less than or equal to 10000"):
        read_chatglm_config(CHATGLM3_6B | {"num_layers": 10**30})


def converted(raw, model, **options):
    transformers = pytest.importorskip("transformers")
    config = read_chatglm_config(raw)
    glm = transformers.GlmForCausalLM(
        transformers.GlmConfig(**glm_config(config, **options), pad_token_id=None)
    ).eval()
    glm.load_state_dict(glm_state_dict(config, model.state_dict()), strict=True)
    return glm


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("change", "options", "rope"),
    [
        ({}, {}, {}),
        ({"add_qkv_bias": False, "multi_query_group_num": 3}, {}, {}),
        ({"multi_query_group_num": 6}, {}, {}),
        ({"rope_ratio": 50}, {}, {"base": 500_000.0}),
        ({"rope_ratio": 4}, {"ratio_scales": "positions"}, {"stretch": 4.0}),
    ],
    ids=["as published", "no bias", "a key per head", "wider base", "stretched positions"],
)
def test_transformers_computes_the_logits_of_the_checkpoint(change, options, rope):
    raw = SMALL | change
    model = reference(raw, **rope)
    ids = torch.randint(0, 64, (40,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        logits = converted(raw, model, **options)(ids[None]).logits[0]
    assert logits.std() > 0.3
    torch.testing.assert_close(logits, model(ids), rtol=0, atol=1e-4)


def test_the_two_meanings_of_the_ratio_differ():
    config = read_chatglm_config(SMALL | {"rope_ratio": 4})
    ropes = [glm_config(config, ratio_scales=s)["rope_parameters"] for s in ("base", "positions")]
    assert ropes[0] == {"rope_type": "default", "rope_theta": 4e4, "partial_rotary_factor": 0.5}
    assert ropes[1] == {
        "rope_type": "linear",
        "rope_theta": 1e4,
        "factor": 4.0,
        "partial_rotary_factor": 0.5,
    }


def test_chatglm3_6b_has_the_parameters_its_name_says():
    assert take_census(CHATGLM3_6B).num_parameters == 6_243_584_000


def test_tensors_keep_dtype_and_memory():
    model = reference(SMALL).bfloat16()
    given = model.state_dict()
    tensors = glm_state_dict(read_chatglm_config(SMALL), given)
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    fused = given["transformer.encoder.layers.1.self_attention.query_key_value.weight"]
    queries = tensors["model.layers.1.self_attn.q_proj.weight"]
    assert queries.data_ptr() == fused.data_ptr()
    assert sum(t.numel() for t in tensors.values()) == sum(t.numel() for t in given.values())


def test_the_table_of_frequencies_is_left_out():
    config, given = read_chatglm_config(SMALL), reference(SMALL).state_dict()
    with_table = {**given, "transformer.rotary_pos_emb.inv_freq": torch.ones(2)}
    assert glm_state_dict(config, with_table).keys() == glm_state_dict(config, given).keys()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "glm"}, "model_type: Input should be 'chatglm'"),
        ({"add_bias_linear": True}, "add_bias_linear"),
        ({"rmsnorm": False}, "rmsnorm"),
        ({"multi_query_attention": False}, "multi_query_attention"),
        ({"pre_seq_len": 128}, "pre_seq_len"),
        ({"quantization_bit": 4}, "quantization_bit"),
        ({"kv_channels": 6}, "kv_channels: .*multiple of 4"),
    ],
)
def test_a_config_that_glm_does_not_compute_is_refused_by_field(change, message):
    with pytest.raises(ConfigError, match=message):
        read_chatglm_config(SMALL | change)


def test_the_first_chatglm_is_refused():
    first = {"model_type": "chatglm", "hidden_size": 4096, "num_layers": 28, "vocab_size": 130528}
    with pytest.raises(ConfigError, match="padded_vocab_size: Field required"):
        read_chatglm_config(first)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda t: t.pop("transformer.output_layer.weight"), "lacks 1 .*output_layer"),
        (
            lambda t: t.update({"transformer.prefix_encoder.embedding.weight": torch.ones(2, 2)}),
            "would be lost, .*prefix_encoder",
        ),
        (
            lambda t: t.update({"transformer.output_layer.weight": torch.ones(64, 41)}),
            r"output_layer\.weight' has shape \[64, 41\], .*\[64, 40\]",
        ),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused_by_tensor(damage, message):
    tensors = reference(SMALL).state_dict()
    damage(tensors)
    with pytest.raises(CheckpointError, match=message):
        glm_state_dict(read_chatglm_config(SMALL), tensors)
