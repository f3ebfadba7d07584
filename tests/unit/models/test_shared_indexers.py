"""Layers that share indexers: less to store, the same numbers everywhere, and the search for which to share."""

import pytest
import torch

from longarc.config.index_share import kinds_of, pattern_of
from longarc.config.model import AttentionPattern
from longarc.errors import CheckpointError, ConfigError, ContractError
from longarc.models.build import build_model
from longarc.models.conversion import to_hybrid
from longarc.models.hf_weights import load_pretrained_dir, load_weights, save_pretrained_dir
from longarc.models.index_share import search_shared_layers, with_shared_indexers
from longarc.models.kernels.native import native
from longarc.models.layout import Layout
from longarc.models.selection import Selection
from model_cases import sharpened, small_glm

PATTERN = "FSSFS"


def model_of(pattern, **changes):
    config = small_glm(num_hidden_layers=len(pattern), index_topk_pattern=pattern, **changes)
    return sharpened(build_model(config, seed=3))


def layers_of_indexers(model):
    return {name.split(".")[2] for name in model.state_dict() if ".indexer." in name}


def test_a_shared_layer_has_no_indexer_and_leaves_no_index_keys(monkeypatch):
    shared, full = model_of(PATTERN), model_of("FFFFF")
    assert layers_of_indexers(shared) == {"0", "3"}
    key_bytes = 3 * 2 * 64 * 4 * shared.config.index_head_dim
    assert full.new_cache(2, 64).num_bytes - shared.new_cache(2, 64).num_bytes == key_bytes
    monkeypatch.setenv("LONGARC_NATIVE", "0")
    assert full.new_cache(2, 64).num_bytes - shared.new_cache(2, 64).num_bytes == key_bytes


@pytest.mark.parametrize("native_kernels", ["0", "1"])
def test_a_shared_layer_attends_to_what_the_layer_before_selected(
    make_ids, monkeypatch, native_kernels
):
    """A model with an indexer in every layer, whose later indexers are made to choose what the first one chose."""
    monkeypatch.setenv("LONGARC_NATIVE", native_kernels)
    full, shared = model_of("FF"), model_of("FS")
    shared.load_state_dict(full.state_dict(), strict=False)
    ids, layout = make_ids(60), Layout.documents([60])
    apart, together = full(ids, layout).hidden, shared(ids, layout).hidden
    assert not torch.equal(apart, together)

    first = full.model.layers[0].self_attn.indexer
    chosen = []
    select = type(first).select

    def reselect(self, *arguments):
        chosen.append(select(self, *arguments))
        return chosen[0]

    monkeypatch.setattr(type(first), "select", reselect)
    assert torch.equal(full(ids, layout).hidden, together)
    assert not torch.equal(*chosen)


def test_the_last_layer_that_uses_a_selection_lets_go_of_it(make_ids):
    model, handed_on = model_of(PATTERN), []
    for layer in model.model.layers:
        layer.register_forward_hook(lambda *call: handed_on.append(call[-1].selection is not None))
    model(make_ids(20), Layout.documents([20]), indexer_loss="sparse")
    assert handed_on == [True, True, False, True, False]


def test_layers_out_of_order_are_refused(make_ids):
    model = model_of("FS")
    layers = list(model.model.layers)
    model.model.layers = torch.nn.ModuleList(layers[::-1])
    with pytest.raises(ContractError, match="layer 1 reuses the selection of layer 0"):
        model(make_ids(20), Layout.documents([20]))


def test_fewer_indexers_share_the_other_weights():
    full = model_of("FFFFF")
    shared = with_shared_indexers(full, kinds_of(PATTERN))
    assert shared.config.indexer_kinds == kinds_of(PATTERN)
    assert layers_of_indexers(shared) == {"0", "3"}
    weights = full.state_dict()
    for name, tensor in shared.state_dict().items():
        assert tensor.data_ptr() == weights[name].data_ptr(), name
    fewer = with_shared_indexers(shared, kinds_of("FSSSS"))
    assert fewer.config.indexed_layers == (0,)
    assert with_shared_indexers(shared, kinds_of(PATTERN)) is shared


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("FSSFF", "layer 4 should have an indexer in 'FSSFF', .* 'FSSFS', has no weights"),
        ("FS", "'FS' describes 2 layers"),
        ("SSSFS", "layer 0 is shared"),
    ],
)
def test_sharing_that_does_not_fit_the_model_is_refused(pattern, message):
    with pytest.raises(ConfigError, match=message):
        with_shared_indexers(model_of(PATTERN), kinds_of(pattern))


def test_a_model_without_indexers_is_refused(llama):
    with pytest.raises(ConfigError, match="llama model has no indexers"):
        with_shared_indexers(llama, kinds_of("FS"))
    with pytest.raises(ConfigError, match="llama model has no indexers"):
        list(search_shared_layers(llama, lambda _: 0.0, num_full=1))


def test_a_hybrid_has_no_indexers_to_share():
    hybrid = to_hybrid(model_of("FFF"), AttentionPattern(layers="FSG"))
    for kinds in ("FFF", "FSS"):
        with pytest.raises(ConfigError, match="glm_hybrid model has no indexers"):
            with_shared_indexers(hybrid, kinds_of(kinds))
    with pytest.raises(ConfigError, match="glm_hybrid model has no indexers"):
        list(search_shared_layers(hybrid, lambda _: 0.0, num_full=1))


def search(losses, *, model=None, num_full=1):
    """Search with a table of losses by pattern; return the steps and the patterns that were asked for."""
    asked = []

    def loss(candidate):
        asked.append(pattern_of(candidate.config.indexer_kinds))
        return losses(asked[-1])

    steps = list(search_shared_layers(model or model_of("FFFF"), loss, num_full=num_full))
    return [(step.layer, step.loss, pattern_of(step.kinds)) for step in steps], asked


def test_the_search_takes_the_layer_that_costs_least_and_goes_on_from_there():
    costs = {"FFFF": 1.0, "FFSF": 1.1, "FFSS": 1.4, "FSSF": 1.3, "FSSS": 2.0}
    steps, asked = search(lambda pattern: costs.get(pattern, 9.0))
    assert steps == [
        (None, 1.0, "FFFF"),
        (2, 1.1, "FFSF"),
        (1, 1.3, "FSSF"),
        (3, 2.0, "FSSS"),
    ]
    assert asked == ["FFFF", "FSFF", "FFSF", "FFFS", "FSSF", "FFSS", "FSSS"]


def test_of_equal_losses_the_earliest_layer_counts_and_the_search_stops_where_it_should():
    steps, _ = search(lambda _: 1.0, num_full=3)
    assert steps[1:] == [(1, 1.0, "FSFF")]


def test_a_model_that_shares_already_is_searched_further():
    steps, asked = search(lambda _: 1.0, model=model_of("FSFF"), num_full=2)
    assert steps[-1] == (2, 1.0, "FSSF")
    assert asked == ["FSFF", "FSSF", "FSFS"]


def test_the_search_finds_the_layer_whose_indexer_changes_nothing(make_ids):
    """What layer 2 attends to is multiplied by zero, so its indexer can go for nothing."""
    model = model_of("FFFF")
    ids, layout = make_ids(80), Layout.documents([80])
    with torch.no_grad():
        model.model.layers[2].self_attn.o_proj.weight.zero_()
        expected = model(ids, layout).hidden

    def loss(candidate):
        with torch.no_grad():
            return (candidate(ids, layout).hidden - expected).square().mean().item()

    steps = list(search_shared_layers(model, loss, num_full=3))
    assert (steps[-1].layer, steps[-1].loss) == (2, 0.0)


@pytest.mark.parametrize("num_full", [0, 5])
def test_a_number_of_indexers_that_the_model_cannot_keep_is_refused(num_full):
    with pytest.raises(ConfigError, match=rf"cannot keep {num_full} indexers of the 4"):
        search(lambda _: 1.0, num_full=num_full)


def test_a_loss_that_compares_with_nothing_is_refused():
    with pytest.raises(ContractError, match="the loss with indexers FSFF is nan"):
        search(lambda pattern: float("nan") if "S" in pattern else 1.0)


def test_a_directory_gives_back_the_schedule_as_it_was_said(tmp_path):
    for name, fields in {
        "pattern": {"index_topk_pattern": "FSSF"},
        "frequency": {"index_topk_freq": 2, "index_skip_topk_offset": 1},
        "types": {"indexer_types": ("full", "full", "shared", "full")},
    }.items():
        model = build_model(small_glm(num_hidden_layers=4, **fields), seed=1)
        save_pretrained_dir(model, tmp_path / name)
        loaded = load_pretrained_dir(tmp_path / name)
        assert loaded.config == model.config
        for key, tensor in model.state_dict().items():
            assert torch.equal(tensor, loaded.state_dict()[key]), key


def test_weights_of_another_schedule_are_refused_by_name(tmp_path):
    save_pretrained_dir(model_of("FFF"), tmp_path / "full")
    save_pretrained_dir(model_of("FSF"), tmp_path / "shared")
    with pytest.raises(
        CheckpointError, match=r"does not have, the first is 'model\.layers\.1.*ind"
    ):
        load_weights(model_of("FSF"), tmp_path / "full" / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"lacks 5 tensors .*layers\.1\.self_attn\.indexer"):
        load_weights(model_of("FFF"), tmp_path / "shared" / "model.safetensors")


def test_a_selection_taken_apart_is_put_together_from_other_tensors():
    selection = Selection(torch.zeros(3, 2, dtype=torch.long), None, (torch.ones(3, 2),))
    tensors, put_together = selection.taken_apart()
    again = put_together([tensor + 1 for tensor in tensors])
    assert again.indexer_rows is None
    assert torch.equal(again.rows, torch.ones(3, 2, dtype=torch.long))
    assert torch.equal(again.attention[0], torch.full((3, 2), 2.0))
    assert Selection().taken_apart()[1]([]) == Selection()


@pytest.mark.skipif(native() is None, reason="the native kernels are not built")
@pytest.mark.parametrize("split", range(1, 40, 3))
def test_prefill_may_end_anywhere(make_ids, split):
    model = model_of(PATTERN)
    ids = make_ids(40)
    whole = model(ids, Layout.documents([40])).hidden
    cache = model.new_cache(2, 40)
    first = model.extend(ids[:split], [1], [0], [split], cache)
    rest = model.extend(ids[split:], [1], [split], [40 - split], cache)
    assert torch.equal(torch.cat([first, rest]), whole)
