"""Muon with one owner per matrix, on two and four ranks: the updates of one process, a share of its memory."""

import pytest
import torch
from muon_ranks import (
    CONFIG,
    NANO,
    NUM_STEPS,
    inputs_of,
    run_ranks,
    train,
    two_layers,
    whole_weights,
)
from safetensors.torch import load_file, save_file
from trainer_fixtures import TINY, TINY_LLAMA, tiny_model

from longarc.models.build import build_model
from longarc.trainer.optim import MuonAdamW
from longarc.trainer.optim_rules import MuonRule, parameter_rule

pytestmark = pytest.mark.slow

RANKS = (2, 4)
MATRICES = {
    name
    for name, p in tiny_model().named_parameters()
    if isinstance(parameter_rule(name, tuple(p.shape), TINY, use_muon=True), MuonRule)
}


def alone(steps=range(NUM_STEPS), *, state=None):
    model = tiny_model()
    optimizer = MuonAdamW(model, TINY, CONFIG)
    if state is not None:
        train(model, optimizer, range(2))
        optimizer = MuonAdamW(model, TINY, CONFIG)
        optimizer.load_state_dict(state)
    train(model, optimizer, steps)
    return whole_weights(model), optimizer


@pytest.fixture(scope="module")
def one_process():
    torch.set_num_threads(1)
    return alone()


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two ranks resume from the state of one process, and four from that of two."""
    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("ranks")
    state_file = root / "alone.safetensors"
    save_file(dict(alone(range(2))[1].state_dict()), state_file)
    run_ranks(root, sizes=RANKS, state=str(state_file))
    results = {n: [torch.load(root / str(n) / f"{r}.pt") for r in range(n)] for n in RANKS}
    return results, root


def assert_equal(weights, expected, *, is_sharded=False):
    """Compare bit for bit; AdamW's vectors only nearly if cut in shards, whose ends round differently."""
    assert weights.keys() == expected.keys()
    for name, value in expected.items():
        if is_sharded and name not in MATRICES:
            torch.testing.assert_close(weights[name], value, rtol=0, atol=1e-6)
        else:
            assert torch.equal(weights[name], value), name


@pytest.mark.parametrize("num_ranks", RANKS)
@pytest.mark.parametrize("case", ["whole", "in_small_buckets", "sharded", "mixed", "resumed"])
def test_every_rank_has_the_weights_of_one_process_bit_for_bit(runs, one_process, num_ranks, case):
    is_sharded = case in ("sharded", "mixed")
    for rank in runs[0][num_ranks]:
        assert_equal(rank[case]["weights"], one_process[0], is_sharded=is_sharded)


@pytest.mark.parametrize("num_ranks", RANKS)
def test_the_momenta_of_nano_are_shared_out(runs, num_ranks):
    optimizer = MuonAdamW(build_model(NANO, seed=0), NANO, CONFIG)
    state = optimizer.state_dict()
    all_bytes = sum(v.nbytes for name, v in state.items() if name.startswith("momentum."))
    held = [rank["nano_momentum_bytes"] for rank in runs[0][num_ranks]]
    assert sum(held) == all_bytes
    assert max(held) < 1.1 * all_bytes / num_ranks


@pytest.mark.parametrize("num_ranks", RANKS)
def test_one_process_continues_from_the_state_of_several(runs, one_process, num_ranks):
    state = load_file(runs[1] / str(num_ranks) / "state.safetensors")
    weights, _ = alone(range(2, NUM_STEPS), state=state)
    assert_equal(weights, one_process[0])


@pytest.mark.parametrize("num_ranks", RANKS)
def test_only_the_first_rank_gets_the_state(runs, num_ranks):
    first, *others = (rank["sharded"]["num_keys"] for rank in runs[0][num_ranks])
    assert first == len(alone()[1].state_dict())
    assert set(others) == {0}


@pytest.mark.parametrize("num_ranks", RANKS)
def test_a_model_under_fsdp_trains_like_one_process(runs, num_ranks):
    model = two_layers()
    optimizer = MuonAdamW(model, TINY_LLAMA, CONFIG)
    for step in range(3):
        model(inputs_of(step)).square().mean().backward()
        optimizer.step(0.05)
        optimizer.zero_grad()
    for rank in runs[0][num_ranks]:  # the gradient is added up in another order
        for name, value in whole_weights(model).items():
            torch.testing.assert_close(rank["fsdp"]["weights"][name], value, rtol=0, atol=1e-5)


def test_reset_forgets_the_momenta_of_all_ranks(runs):
    assert all(rank["resumed"]["forgotten"] for rank in runs[0][4])


def test_matrices_travel_in_several_buckets(runs):
    assert all(rank["in_small_buckets"]["num_buckets"] > 3 for rank in runs[0][2])


@pytest.mark.parametrize("num_ranks", RANKS)
def test_ranks_that_do_not_fit_together_are_refused(runs, num_ranks):
    for messages in (rank["refused"] for rank in runs[0][num_ranks]):
        differing, no_group, incomplete, other_dtype, other_rule = messages
        assert "o_proj" in differing
        assert "no process group" in no_group
        assert "do not make it up" in incomplete
        assert "float32 in 1 blocks of (4,) rows on rank 0" in other_dtype
        assert "bfloat16 in 1 blocks of (4,) rows on rank 1" in other_dtype
        assert "float32 in 1 blocks of (2, 2) rows on rank 1" in other_rule
