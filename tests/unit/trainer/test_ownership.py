"""Owners of matrices: equal work, equal memory, little travel, and nothing that is not held."""

import pytest

from longarc.config.model import GlmMoeDsaConfig
from longarc.errors import ContractError
from longarc.models.build import build_model
from longarc.trainer.optim_rules import MuonRule, parameter_rule
from longarc.trainer.ownership import Box, plan_ownership, three_dimensional

NANO = GlmMoeDsaConfig()
SHAPES = {
    name: tuple(parameter.shape) for name, parameter in build_model(NANO, seed=0).named_parameters()
}
RULES = {
    name: rule
    for name, shape in SHAPES.items()
    if isinstance(rule := parameter_rule(name, shape, NANO, use_muon=True), MuonRule)
}


def whole(shape):
    return Box((0, 0, 0), three_dimensional(shape))


def rows_of(shape, rank, num_ranks):
    """What FSDP2 leaves a rank of the first dimension."""
    full = three_dimensional(shape)
    dim = 0 if len(shape) == 3 else 1
    size = -(-full[dim] // num_ranks)
    start, stop = [0, 0, 0], list(full)
    start[dim] = min(rank * size, full[dim])
    stop[dim] = min((rank + 1) * size, full[dim])
    return Box(tuple(start), tuple(stop))


def plan(holding_of, num_ranks):
    holdings = [
        {name: holding_of(SHAPES[name], rank, num_ranks) for name in RULES}
        for rank in range(num_ranks)
    ]
    return plan_ownership(RULES, SHAPES, holdings)


def copies(shape, rank, num_ranks):
    return whole(shape)


@pytest.mark.parametrize("holding_of", [copies, rows_of])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 8])
def test_work_and_memory_are_shared_out_evenly(holding_of, num_ranks):
    work, memory = [0] * num_ranks, [0] * num_ranks
    for matrix in plan(holding_of, num_ranks):
        work[matrix.owner] += matrix.box.numel * min(matrix.shape)
        memory[matrix.owner] += matrix.box.numel
    assert max(work) <= 1.01 * sum(work) / num_ranks
    assert max(memory) <= 1.2 * sum(memory) / num_ranks


@pytest.mark.parametrize("holding_of", [copies, rows_of])
def test_every_element_has_one_source_and_one_matrix(holding_of):
    matrices = plan(holding_of, 3)
    assert sum(m.box.numel for m in matrices) == sum(whole(SHAPES[n]).numel for n in RULES)
    for matrix in matrices:
        assert sum(box.numel for _, box in matrix.sources) == matrix.box.numel
        for i, (_, box) in enumerate(matrix.sources):
            assert all(box.overlap(other).numel == 0 for _, other in matrix.sources[:i])


def test_copies_send_no_gradient_and_update_everyone():
    for matrix in plan(copies, 4):
        assert [rank for rank, _ in matrix.sources] == [matrix.owner]
        assert [rank for rank, _ in matrix.holders] == [0, 1, 2, 3]


def test_whole_heads_and_experts_stay_where_they_are():
    """Four heads and eight experts over two ranks."""
    for matrix in plan(rows_of, 2):
        if "q_b_proj" in matrix.name or ".experts." in matrix.name:
            assert matrix.sources == matrix.holders == ((matrix.owner, matrix.box),)


def test_a_head_has_its_key_and_value_rows_apart():
    name = "model.layers.0.self_attn.kv_b_proj.weight"
    boxes = sorted(m.box.start for m in plan(copies, 1) if m.name == name)
    assert boxes == [(0, row, 0) for row in (0, 16, 48, 64, 96, 112, 144, 160)]


@pytest.mark.parametrize(
    "held",
    [
        [Box((0, 0, 0), (1, 2, 4)), Box((0, 2, 0), (1, 3, 4))],
        [Box((0, 0, 0), (1, 3, 4)), Box((0, 1, 0), (1, 4, 4))],
    ],
    ids=["a row is missing", "rows overlap"],
)
def test_parts_that_do_not_make_up_a_parameter_are_refused(held):
    rules = {"weight": MuonRule(num_blocks=1, rows=(4,))}
    with pytest.raises(ContractError, match="weight"):
        plan_ownership(rules, {"weight": (4, 4)}, [{"weight": box} for box in held])
