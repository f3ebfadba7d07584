"""Models that cannot be built or trained as asked say which field is wrong and what to do."""

import json

import pytest
import torch
from pydantic import ValidationError

from longarc.errors import ConfigError, ContractError
from longarc.models.build import build_model
from longarc.models.hf_config import config_from_hf, config_to_hf
from longarc.models.hf_weights import load_pretrained_dir, save_pretrained_dir
from longarc.models.key_selection import IndexerRows, select_rows
from longarc.models.layout import Layout
from longarc.models.plan import AttentionPlan
from model_cases import sharpened, small_glm, small_llama


@pytest.mark.parametrize(
    ("weight", "part"), [("wk", "key"), ("wq_b", "query"), ("weights_proj", "weight")]
)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("mode", [("sparse", "none"), ("sparse", "sparse"), ("dense", "warmup")])
def test_scores_that_are_not_finite_name_layer_and_token(glm, make_ids, weight, part, value, mode):
    getattr(glm.model.layers[2].self_attn.indexer, weight).weight.data[0] = value
    attention, loss = mode
    with pytest.raises(
        ContractError, match=f"layer 2: the indexer's {part} of packed token 0 .*lower"
    ):
        glm(make_ids(30), Layout.documents([30]), attention=attention, indexer_loss=loss)


def test_the_token_is_the_first_one_that_is_broken(glm, make_ids):
    ids = make_ids(30).clamp_max(62)
    ids[17] = 63
    glm.model.embed_tokens.weight.data[63] = float("nan")
    with pytest.raises(ContractError, match=r"layer 0: .* of packed token 17 "):
        glm(ids, Layout.documents([30]))


@pytest.mark.parametrize("native", ["0", "1"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("weight", ["wk", "wq_b", "weights_proj"])
def test_without_gradients_scores_that_are_nan_end_in_nan(
    shared_glm, make_ids, monkeypatch, native, value, weight
):
    """An engine finds a fault in its logits, so what selects nothing sensible must not look like a result."""
    monkeypatch.setenv("LONGARC_NATIVE", native)
    ids = make_ids(30)
    healthy = shared_glm(ids, Layout.documents([30])).hidden
    getattr(shared_glm.model.layers[3].self_attn.indexer, weight).weight.data[:] = value
    with torch.no_grad():
        whole = shared_glm(ids, Layout.documents([30])).hidden
    cache = shared_glm.new_cache(1, 30)
    prefill = shared_glm.extend(ids[:20], [0], [0], [20], cache)
    steps = [shared_glm.extend(ids[i : i + 1], [0], [i], [1], cache) for i in range(20, 30)]
    for hidden in (whole, torch.cat([prefill, *steps])):
        assert hidden[12:].isnan().all()  # index_topk = 12: the first queries read everything
        if (native, value) != (
            "0",
            float("inf"),
        ):  # in torch a score of -inf is a key that is hidden
            torch.testing.assert_close(hidden[:12], healthy[:12])


@pytest.mark.parametrize("native", ["0", "1"])
def test_a_selection_wider_than_the_context_is_dense_attention(make_ids, monkeypatch, native):
    monkeypatch.setenv("LONGARC_NATIVE", native)
    config = small_glm(index_topk=10**9, max_position_embeddings=40)
    model, ids = sharpened(build_model(config, seed=3)), make_ids(40)
    sparse = model(ids, Layout.documents([40]), attention="sparse").hidden
    dense = model(ids, Layout.documents([40]), attention="dense").hidden
    torch.testing.assert_close(sparse, dense, rtol=0, atol=1e-5)
    decoded = model.extend(ids, [0], [0], [40], model.new_cache(1, 40))
    torch.testing.assert_close(decoded, dense, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("make", "changes", "message"),
    [
        (small_glm, {"qk_rope_head_dim": 5}, "qk_rope_head_dim=5 must be even"),
        (small_glm, {"index_head_dim": 2}, "index_head_dim=2 is smaller than qk_rope_head_dim=4"),
        (small_llama, {"head_dim": 7}, "heads are 7 wide .*set an even head_dim"),
        (small_llama, {"hidden_size": 36}, "heads are 9 wide .*hidden_size=36"),
    ],
)
def test_sizes_that_cannot_be_rotated_are_refused(make, changes, message):
    with pytest.raises(ValidationError, match=message):
        make(**changes)


def test_a_checkpoint_with_an_odd_rotary_size_is_refused(tmp_path):
    save_pretrained_dir(build_model(small_glm(), seed=0), tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | {"qk_rope_head_dim": 5}))
    with pytest.raises(ConfigError, match="qk_rope_head_dim=5 must be even"):
        load_pretrained_dir(tmp_path)


SAID = {
    "llama": ["num_attention_heads", "hidden_size", "vocab_size"],
    "glm_moe_dsa": ["index_topk", "num_experts_per_tok", "first_k_dense_replace", "rms_norm_eps"],
}


@pytest.mark.parametrize("change", ["missing", "null"])
@pytest.mark.parametrize("family", SAID)
def test_a_config_is_not_completed_with_the_defaults_of_a_small_model(family, change):
    make = small_llama if family == "llama" else small_glm
    raw = config_to_hf(make(), dtype="float32")
    for name in SAID[family]:
        damaged = raw | {name: None}
        if change == "missing":
            del damaged[name]
        with pytest.raises(
            ConfigError, match=f"(does not say|names no) {name}; .*[Cc]opy it again"
        ):
            config_from_hf(damaged)


def test_a_llama_that_names_no_key_heads_has_one_for_each_query_head():
    raw = config_to_hf(small_llama(num_key_value_heads=4), dtype="float32")
    del raw["num_key_value_heads"]
    assert config_from_hf(raw) == small_llama(num_key_value_heads=4)


def test_a_list_of_feed_forwards_goes_before_the_number_of_dense_ones():
    raw = config_to_hf(small_glm(first_k_dense_replace=1), dtype="float32")
    types = ["dense", "dense", "sparse"]
    assert config_from_hf(raw | {"mlp_layer_types": types}) == small_glm(first_k_dense_replace=2)


@pytest.mark.parametrize(
    "types", [["sparse", "dense", "sparse"], ["dense", "sparse"], ["dense", "x", "sparse"], "dense"]
)
def test_feed_forwards_in_another_order_are_refused(types):
    raw = config_to_hf(small_glm(), dtype="float32")
    with pytest.raises(ConfigError, match=r"mlp_layer_types=.* one name for each of the 3 layers"):
        config_from_hf(raw | {"mlp_layer_types": types})


def test_a_number_of_layers_that_no_model_has_is_refused_at_once():
    raw = config_to_hf(small_glm(), dtype="float32") | {"num_hidden_layers": 10**9}
    del raw["indexer_types"]
    with pytest.raises(
        ConfigError, match=r"num_hidden_layers: .*less than or equal to 10000, not 1000"
    ):
        config_from_hf(raw)


@pytest.mark.parametrize("num_selected", [5, 12, 15])
@pytest.mark.parametrize("is_native", [True, False], ids=["native", "eager"])
def test_scores_that_are_no_numbers_select_none_but_visible_keys(num_selected, is_native):
    """Infinity times nothing is a NaN with its sign set, which as an integer lies below -infinity."""
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(*shape, generator=generator) for shape in ((21, 4, 8), (21, 8)))
    rows = IndexerRows(query, key, torch.full((21, 4), float("inf")))
    plan = AttentionPlan.of_layout(Layout.documents([21]), torch.device("cpu"))
    selected = select_rows(
        rows,
        key,
        plan,
        num_selected=num_selected,
        backend="cpu",
        flat_runs=plan.flat_runs() if is_native else None,
    )
    assert (selected <= torch.arange(21)[:, None]).all()
    assert (selected >= -1).all()
