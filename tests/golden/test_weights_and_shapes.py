"""Golden numbers of what is around a loss: reductions, length penalties, and the critic's own loss."""

import json
from itertools import chain
from pathlib import Path

import pytest
import torch

from longarc.algos.reductions import token_weights
from longarc.algos.shaping import overlong_penalty
from longarc.algos.value_loss import clipped_value_loss

DATA = Path(__file__).parent / "data"


def case_ids(name):
    cases = json.loads((DATA / f"{name}.json").read_text())["cases"]
    return [pytest.param(case, id=case["name"]) for case in cases]


def mean_of(rollouts, reduction):
    """Reduce losses of tokens, one weight for all tokens of a segment."""
    lengths = [[len(segment) for segment in rollout] for rollout in rollouts]
    weights = token_weights(lengths, [1] * len(rollouts), reduction=reduction)
    total = normaliser = 0.0
    for segment, weight in zip(chain(*rollouts), chain(*weights), strict=True):
        total += weight * sum(segment)
        normaliser += weight * len(segment)
    return total / normaliser


@pytest.mark.parametrize("case", case_ids("compaction_token_norm"))
def test_tokens_count_alike_however_a_rollout_was_cut_into_segments(case):
    assert mean_of(case["rollouts"], "token_mean") == pytest.approx(case["token_level"], abs=1e-12)
    by_segment = mean_of(case["rollouts"], "segment_mean")
    assert by_segment == pytest.approx(case["segment_mean_WRONG"], abs=1e-12)
    by_rollout = mean_of(case["rollouts"], "sequence_mean")
    assert by_rollout == pytest.approx(case["per_rollout_mean_variant"], abs=1e-12)


@pytest.mark.parametrize("case", case_ids("dapo_overlong"))
def test_the_soft_punishment_grows_over_the_last_tokens(case):
    penalty = overlong_penalty(
        case["length"], max_tokens=case["L_max"], cache_tokens=case["L_cache"]
    )
    assert penalty == pytest.approx(case["penalty"], abs=1e-15)


@pytest.mark.parametrize("case", case_ids("value_loss"))
def test_the_value_loss_is_the_larger_of_clipped_and_unclipped(case):
    values = torch.tensor(case["values"], dtype=torch.float64, requires_grad=True)
    out = clipped_value_loss(
        values,
        torch.tensor(case["old_values"], dtype=torch.float64),
        torch.tensor(case["returns"], dtype=torch.float64),
        torch.tensor(case["loss_mask"]).bool(),
        clip=case["value_clip"],
    )
    mean = out.loss_sum / out.normaliser
    mean.backward()
    assert mean.item() == pytest.approx(case["loss"], abs=1e-12)
    expected = torch.tensor(case["grad_values"], dtype=torch.float64)
    torch.testing.assert_close(values.grad, expected, rtol=0, atol=1e-12)
    assert out.num_rejected.item() == (expected == 0).sum().item()
