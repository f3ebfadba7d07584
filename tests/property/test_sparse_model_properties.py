"""Sparse attention for any model, any packing and any way of feeding a sequence: the same numbers, ties included.

The models have few index heads and narrow ones, so that ReLU leaves many scores at exactly zero.
"""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings

from longarc.models.build import build_model
from longarc.models.key_selection import IndexerRows, index_scores
from longarc.models.layout import Layout, Span
from longarc.models.sparse_attention import VARIABLE
from model_cases import sharpened, small_glm

configs = st.fixed_dictionaries(
    {
        "num_hidden_layers": st.integers(1, 3),
        "first_k_dense_replace": st.integers(0, 2),
        "num_attention_heads": st.sampled_from([1, 2, 3, 5]),
        "q_lora_rank": st.integers(4, 20),
        "kv_lora_rank": st.integers(3, 20),
        "qk_nope_head_dim": st.integers(1, 9),
        "qk_rope_head_dim": st.sampled_from([2, 4, 6]),
        "v_head_dim": st.integers(1, 9),
        "n_shared_experts": st.integers(0, 1),
        "index_n_heads": st.integers(1, 5),
        "index_head_dim": st.integers(6, 9),
        "index_topk": st.integers(1, 12),
        "index_topk_pattern": st.text("FS", min_size=2, max_size=2).map("F".__add__),
    }
).map(
    lambda config: (
        config | {"index_topk_pattern": config["index_topk_pattern"][: config["num_hidden_layers"]]}
    )
)


forests = st.lists(st.tuples(st.integers(1, 10), st.integers(-3, 4)), min_size=1, max_size=6)
"""Spans: their length, and how far back their parent is; without a parent where that is nowhere."""


def layout_of(forest):
    return Layout(
        tuple(
            Span(length, index - back if 0 < back <= index else None)
            for index, (length, back) in enumerate(forest)
        )
    )


def make(config, seed, dtype=torch.float64):
    return sharpened(build_model(small_glm(**config), seed=seed)).to(dtype)


def draw_ids(count, seed):
    return torch.randint(0, 64, (count,), generator=torch.Generator().manual_seed(seed))


@pytest.fixture(params=["reference", "cpu"])
def _backend(request, monkeypatch):
    monkeypatch.setenv(VARIABLE, request.param)


few = settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@few
@given(config=configs, forest=forests, seed=st.integers(0, 99))
@pytest.mark.usefixtures("_backend")
def test_a_span_of_any_packing_is_as_if_alone_behind_its_ancestors(config, forest, seed):
    layout = layout_of(forest)
    model, ids = make(config, seed), draw_ids(layout.num_tokens, seed)
    offsets = layout.offsets()
    with torch.no_grad():
        packed = model(ids, layout).hidden
        for index, span in enumerate(layout.spans):
            chain = [*layout.ancestors(index), index]
            pieces = [ids[offsets[i] : offsets[i] + layout.spans[i].length] for i in chain]
            alone = model(torch.cat(pieces), Layout.documents([sum(map(len, pieces))])).hidden
            here = packed[offsets[index] : offsets[index] + span.length]
            torch.testing.assert_close(here, alone[-span.length :], rtol=0, atol=1e-10)


@few
@given(config=configs, forest=forests, seed=st.integers(0, 99))
def test_back_ends_agree_on_any_model_and_packing(config, forest, seed):
    layout = layout_of(forest)
    model, ids = make(config, seed), draw_ids(layout.num_tokens, seed)
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        for backend in ("reference", "cpu"):
            patch.setenv(VARIABLE, backend)
            model.zero_grad()
            hidden = model(ids, layout).hidden
            hidden.square().sum().backward()
            found[backend] = hidden.detach(), [p.grad for p in model.parameters()]
    (ours, our_gradients), (reference, gradients) = found["cpu"], found["reference"]
    torch.testing.assert_close(ours, reference, rtol=0, atol=1e-10)
    for got, expected in zip(our_gradients, gradients, strict=True):
        if expected is None:
            assert got is None
            continue
        scale = max(1.0, float(expected.abs().max()))
        torch.testing.assert_close(got / scale, expected / scale, rtol=0, atol=1e-8)


@few
@given(config=configs, length=st.integers(2, 16), seed=st.integers(0, 99))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["native", "eager"])
def test_prefill_and_decode_split_anywhere_agree_with_one_forward_pass(config, length, seed, dtype):
    model, ids = make(config, seed, dtype), draw_ids(length, seed)
    tolerance = 1e-10 if dtype is torch.float64 else 1e-5
    with torch.no_grad():
        whole = model(ids, Layout.documents([length])).hidden
    cache = model.new_cache(length, length)
    # Slot s keeps a sequence that was prefilled with s tokens; then all of them decode together.
    starts, hidden = {}, {}
    for split in range(1, length):
        hidden[split] = [model.extend(ids[:split], [split], [0], [split], cache)]
        starts[split] = split
    while starts:
        slots = list(starts)
        step = model.extend(
            ids[list(starts.values())], slots, list(starts.values()), [1] * len(slots), cache
        )
        for slot, row in zip(slots, step, strict=True):
            hidden[slot].append(row[None])
        starts = {slot: at + 1 for slot, at in starts.items() if at + 1 < length}
    for pieces in hidden.values():
        torch.testing.assert_close(torch.cat(pieces), whole, rtol=0, atol=tolerance)


def test_scores_of_these_models_do_tie():
    """Where no scores tie, the tests above would say nothing about ties."""
    model = make({"index_n_heads": 1, "index_head_dim": 6}, seed=0)
    attention = model.model.layers[0].self_attn
    x = model.model.layers[0].input_layernorm(model.model.embed_tokens(draw_ids(40, 0)))
    latent = attention.q_a_layernorm(attention.q_a_proj(x))
    rows: IndexerRows = attention.indexer.project(x, latent, model.rotation(torch.arange(40)))
    scores = index_scores(rows.query, rows.weight, rows.key)
    zeros_per_query = (scores == 0).sum(dim=1)
    assert (zeros_per_query > 5).float().mean() > 0.5
