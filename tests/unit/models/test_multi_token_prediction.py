"""The depths of multi-token prediction: what each computes, for which tokens, and from what."""

import json

import pytest
import torch
from mtp_reference import Reference
from safetensors.torch import load_file, save_file

from longarc.errors import CheckpointError, ConfigError, ContractError
from longarc.models.add_mtp import with_mtp
from longarc.models.build import build_model
from longarc.models.census import take_census
from longarc.models.draft_rows import draft_rows
from longarc.models.hf_config import config_to_hf
from longarc.models.hf_weights import (
    load_pretrained_dir,
    load_weights,
    save_pretrained_dir,
    save_weights,
)
from longarc.models.layout import Layout, Span
from model_cases import sharpened, small_glm, small_llama

CPU = torch.device("cpu")


def drafter(**changes):
    return sharpened(build_model(small_glm(num_nextn_predict_layers=1, **changes), seed=3))


@pytest.fixture
def mtp():
    return drafter()


def drafts_of(model, ids, layout, *, attention="sparse", **options):
    hidden = model(ids, layout, attention=attention).hidden
    return model.drafts(hidden, ids, layout, attention=attention, **options)


@pytest.mark.parametrize("attention", ["sparse", "dense"])
@pytest.mark.parametrize(
    "changes",
    [{}, {"mtp_query_position": "stay"}, {"mtp_feeds_normed": False}],
    ids=["default", "stay", "residual"],
)
def test_every_draft_is_the_formula_spelt_out(attention, changes, make_ids):
    model = drafter(**changes).double()
    ids, layout = make_ids(30), Layout.documents([30])
    hidden = model(ids, layout, attention=attention).hidden.detach()
    output = model.drafts(hidden, ids, layout, attention=attention)
    with torch.no_grad():
        reference = Reference(model, hidden, ids, attention=attention)
    for depth in range(1, 4):
        # The draft of position i lies in the row of the last token that it reads.
        expected = torch.stack(reference.outputs[depth - 1])
        torch.testing.assert_close(output.hidden[depth - 1, depth:], expected, rtol=0, atol=1e-10)
        assert output.has_draft[depth - 1].tolist() == [row >= depth for row in range(30)]
        assert not output.hidden[depth - 1, :depth].any()


@pytest.mark.parametrize("attention", ["sparse", "dense"])
def test_a_forest_drafts_what_its_sequences_draft_alone(mtp, make_ids, attention):
    mtp.double()
    prompt, answers, other = make_ids(20), [make_ids(15), make_ids(9)], make_ids(17)
    one, follow_up = make_ids(1), make_ids(6)
    pieces = [prompt, answers[0], other, answers[1], one, follow_up]
    forest = Layout((Span(20), Span(15, 0), Span(17), Span(9, 0), Span(1), Span(6, 4)))
    together = drafts_of(mtp, torch.cat(pieces), forest, attention=attention, trains_trunk=True)
    weights = torch.randn(3, 68, 32, dtype=torch.float64)
    (together.hidden * weights).sum().backward()
    shared = {n: p.grad.clone() for n, p in mtp.named_parameters() if p.grad is not None}
    mtp.zero_grad()

    total = 0
    places = torch.arange(68).split([len(piece) for piece in pieces])
    for members in ([0, 1], [0, 3], [2], [4, 5]):
        ids = torch.cat([pieces[i] for i in members])
        place = torch.cat([places[i] for i in members])
        alone = drafts_of(
            mtp, ids, Layout.documents([len(ids)]), attention=attention, trains_trunk=True
        )
        torch.testing.assert_close(together.hidden[:, place], alone.hidden, rtol=0, atol=1e-11)
        assert torch.equal(together.has_draft[:, place], alone.has_draft)
        own = slice(20 if members == [0, 3] else 0, None)  # the prompt counts once
        total = total + (alone.hidden[:, own] * weights[:, place[own]]).sum()
    total.backward()
    apart = {n: p.grad for n, p in mtp.named_parameters() if p.grad is not None}
    assert shared.keys() == apart.keys()
    for name, grad in apart.items():
        torch.testing.assert_close(shared[name], grad, rtol=1e-9, atol=1e-9, msg=name)


def test_no_draft_reads_what_it_predicts(mtp, make_ids):
    ids = make_ids(40)
    changed = ids.clone()
    changed[25:] = (changed[25:] + 1) % 64
    before = drafts_of(mtp, ids, Layout.documents([40])).hidden
    after = drafts_of(mtp, changed, Layout.documents([40])).hidden
    torch.testing.assert_close(before[:, :25], after[:, :25], rtol=0, atol=1e-5)
    assert all((before[d, 25:] - after[d, 25:]).abs().amax() > 1e-2 for d in range(3))


def test_native_kernels_and_their_twins_draft_alike(mtp, make_ids, monkeypatch):
    ids, layout = make_ids(60), Layout((Span(25), Span(20, 0), Span(15, 0)))
    for attention in ("sparse", "dense"):
        hidden = mtp(ids, layout, attention=attention).hidden
        monkeypatch.delenv("LONGARC_NATIVE", raising=False)
        native = mtp.drafts(hidden, ids, layout, attention=attention).hidden
        monkeypatch.setenv("LONGARC_NATIVE", "0")
        torch.testing.assert_close(
            mtp.drafts(hidden, ids, layout, attention=attention).hidden, native, rtol=0, atol=1e-4
        )


def test_short_sequences_have_as_many_depths_as_they_have_tokens(mtp):
    layout = Layout.documents([1, 2, 3])
    output = drafts_of(mtp, torch.arange(6), layout)
    expected = [[0, 0, 1, 0, 1, 1], [0, 0, 0, 0, 0, 1], [0] * 6]
    assert output.has_draft.int().tolist() == expected
    assert (output.hidden.abs().sum(dim=-1) > 0).int().tolist() == expected
    assert len(draft_rows(layout, num_depths=3, device=CPU)) == 2
    lonely = drafts_of(mtp, torch.arange(2), Layout.documents([1, 1]))
    assert not lonely.has_draft.any()
    assert not lonely.hidden.any()


def test_later_depths_share_the_keys_of_the_first(make_ids):
    """The layer's key projection is asked once, and its indexer selects once."""
    model = drafter()
    calls = []
    for module in (model.mtp.self_attn.kv_a_proj_with_mqa, model.mtp.self_attn.indexer.wk):
        module.register_forward_hook(lambda *_: calls.append(1))
    drafts_of(model, make_ids(40), Layout.documents([40]))
    assert len(calls) == 2


def test_gradients_stop_at_the_trunk_unless_they_are_asked_for(mtp, make_ids):
    ids, layout = make_ids(30), Layout.documents([30])
    drafts_of(mtp, ids, layout).hidden.sum().backward()
    reached = {name for name, p in mtp.named_parameters() if p.grad is not None}
    assert reached
    assert all(name.startswith("mtp.") and "indexer" not in name for name in reached)
    drafts_of(mtp, ids, layout, trains_trunk=True).hidden.sum().backward()
    reached = {name for name, p in mtp.named_parameters() if p.grad is not None}
    assert {"model.embed_tokens.weight", "model.layers.0.self_attn.o_proj.weight"} <= reached


def test_the_loss_of_its_indexer_reaches_that_indexer_alone(mtp, make_ids):
    ids, layout = make_ids(40), Layout.documents([40])
    output = drafts_of(mtp, ids, layout, trains_trunk=True, with_indexer_loss=True)
    assert output.num_indexer_terms == 39
    output.indexer_loss_sum.backward()
    reached = {name for name, p in mtp.named_parameters() if p.grad is not None and p.grad.any()}
    assert reached
    assert all(name.startswith("mtp.self_attn.indexer.") for name in reached)
    strided = drafts_of(mtp, ids, layout, with_indexer_loss=True, indexer_stride=4)
    assert strided.num_indexer_terms == 10


def test_the_trunk_of_a_seed_is_the_same_with_and_without_drafts(mtp):
    plain = build_model(small_glm(), seed=3)
    other = build_model(mtp.config, seed=3).state_dict()
    assert all(torch.equal(value, other[name]) for name, value in plain.state_dict().items())


def test_parameters_are_as_many_as_the_census_counts(mtp):
    census = take_census(config_to_hf(mtp.config, dtype="float32"))
    assert sum(p.numel() for p in mtp.parameters()) == census.num_parameters
    assert sum(p.numel() for p in mtp.mtp.parameters()) == census.num_mtp_parameters


@pytest.mark.parametrize("experts", ["separate", "fused"])
def test_drafts_come_back_from_a_directory_under_published_names(mtp, tmp_path, experts):
    save_pretrained_dir(mtp, tmp_path, experts=experts)
    names = set(load_file(tmp_path / "model.safetensors"))
    own = {name.removeprefix("model.layers.3.") for name in names if ".layers.3." in name}
    assert {"enorm.weight", "hnorm.weight", "eh_proj.weight", "shared_head.norm.weight"} <= own
    assert {"self_attn.indexer.wk.weight", "mlp.gate.e_score_correction_bias"} <= own
    assert ("mlp.experts.5.up_proj.weight" in own) == (experts == "separate")
    assert not any(name.startswith("mtp.") for name in names)
    loaded = load_pretrained_dir(tmp_path)
    assert loaded.config == mtp.config
    state = mtp.state_dict()
    assert state.keys() == loaded.state_dict().keys()
    assert all(torch.equal(value, state[name]) for name, value in loaded.state_dict().items())


def test_weights_with_drafts_come_back_bitwise(mtp, tmp_path):
    save_weights(mtp, tmp_path / "w.safetensors")
    other = build_model(mtp.config, seed=9)
    load_weights(other, tmp_path / "w.safetensors")
    state = mtp.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in other.state_dict().items())
    with pytest.raises(CheckpointError, match=r"tensors this model does not have.*layers\.3"):
        load_weights(build_model(small_glm(), seed=0), tmp_path / "w.safetensors")


def test_copies_of_the_shared_tables_are_not_read(mtp, tmp_path):
    save_pretrained_dir(mtp, tmp_path)
    copies = {
        "model.layers.3.embed_tokens.weight": torch.zeros(64, 32),
        "model.layers.3.shared_head.head.weight": torch.zeros(64, 32),
    }
    save_file(copies, tmp_path / "model-copies.safetensors")
    loaded = load_pretrained_dir(tmp_path).state_dict()
    assert all(torch.equal(value, loaded[name]) for name, value in mtp.state_dict().items())


def test_a_directory_that_lost_its_drafts_is_read_without(mtp, glm, tmp_path):
    """As transformers saves it: the config still names the layer."""
    save_pretrained_dir(glm, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    loaded = load_pretrained_dir(tmp_path)
    assert loaded.config == glm.config
    assert loaded.mtp is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_nextn_predict_layers": 2}, "num_nextn_predict_layers"),
        ({"index_share_for_mtp_iteration": False}, "index_share_for_mtp_iteration=False"),
    ],
)
def test_drafts_of_another_kind_are_refused(mtp, tmp_path, change, message):
    save_pretrained_dir(mtp, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | change
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=message):
        load_pretrained_dir(tmp_path)


def test_a_finished_model_gets_drafts_and_keeps_its_weights(glm):
    added = with_mtp(glm, num_depths=2, seed=1)
    assert added.config.mtp_num_depths == 2
    state = added.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in glm.state_dict().items())
    last = glm.model.layers[2].state_dict()
    copied = {name: value for name, value in added.mtp.state_dict().items() if name in last}
    assert len(copied) == len(last)
    assert all(torch.equal(value, last[name]) for name, value in copied.items())
    fresh = with_mtp(glm, start="random", seed=1).mtp.state_dict()
    assert not torch.equal(fresh["self_attn.o_proj.weight"], copied["self_attn.o_proj.weight"])
    assert torch.equal(fresh["eh_proj.weight"], state["mtp.eh_proj.weight"])


def test_drafts_that_are_there_are_kept(mtp):
    assert with_mtp(mtp, seed=1) is mtp
    deeper = with_mtp(mtp, num_depths=5, seed=1)
    assert deeper.config.mtp_num_depths == 5
    state = deeper.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in mtp.state_dict().items())


def test_what_cannot_draft_says_so(glm, mtp, llama, make_ids):
    ids, layout = make_ids(8), Layout.documents([8])
    hidden = glm(ids, layout).hidden
    with pytest.raises(ContractError, match="no MTP layer"):
        glm.drafts(hidden, ids, layout)
    with pytest.raises(ContractError, match="with_indexer_loss=True does not go with"):
        mtp.drafts(hidden, ids, layout, attention="dense", with_indexer_loss=True)
    with pytest.raises(ContractError, match="8 states and 8 token ids do not fit a layout of 7"):
        mtp.drafts(hidden, ids, Layout.documents([7]))
    with pytest.raises(ContractError, match="token id 64 is outside"):
        mtp.drafts(hidden, ids + 64 - ids.max(), layout)
    for num_depths in (0, 17):
        with pytest.raises(ConfigError, match=f"num_depths={num_depths} is not possible"):
            with_mtp(mtp, num_depths=num_depths, seed=0)
    with pytest.raises(ConfigError, match="llama model has no layer"):
        with_mtp(build_model(small_llama(), seed=0), seed=0)
