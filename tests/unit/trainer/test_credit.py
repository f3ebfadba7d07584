"""From the rewards of a step to what each token is worth and how much it counts."""

import math

import pytest
import torch
from trainer_fixtures import make_batch, make_group, make_segment, make_trajectory

from longarc.algos.advantages import group_advantages
from longarc.config.rollout import OverlongConfig
from longarc.config.stages import LossConfig
from longarc.config.training import OptimizerConfig
from longarc.errors import CheckpointError
from longarc.pipeline.policy_factory import PolicyTrainerSpec, baseline
from longarc.trainer.baselines import RunningBaselines
from longarc.trainer.credit import train_items

PROMPT = tuple(range(20))


def member(name, lengths, reward, *, family="math"):
    """A trajectory with a segment of each length."""
    segments = [
        make_segment(PROMPT, range(30, 30 + n), [-4.0] * n, order=order)
        for order, n in enumerate(lengths)
    ]
    return make_trajectory(segments, name=name, reward=reward, family=family)


def itself(rewards):
    return torch.tensor(rewards, dtype=torch.float64)


def compacted():
    """A rollout in three segments, twice in its group, and a plain one; then another group."""
    first = make_group(
        [member("a", (6, 1, 3), 1.0), member("b", (5,), 0.0)], name="g", multiplicities=(2, 1)
    )
    second = make_group([member("c", (2,), 0.5), member("d", (3,), 1.0)], name="h")
    return make_batch([first, second])


@pytest.mark.parametrize(
    ("reduction", "weights", "normaliser"),
    [
        ("token_mean", [2, 2, 2, 1, 1, 1], 30),
        ("sequence_mean", [2 / 10, 2 / 10, 2 / 10, 1 / 5, 1 / 2, 1 / 3], 5),
        ("segment_mean", [2 / 6, 2 / 1, 2 / 3, 1 / 5, 1 / 2, 1 / 3], 9),
        ("group_mean", [2 / 25, 2 / 25, 2 / 25, 1 / 25, 1 / 5, 1 / 5], 2),
    ],
)
def test_a_reduction_decides_what_counts_alike(reduction, weights, normaliser):
    items = train_items(compacted(), reduction=reduction, advantage_fn=group_advantages)
    assert [item.token_weight for item in items] == pytest.approx(weights)
    lengths = [item.segment.num_trained_tokens for item in items]
    total = math.fsum(w * n for w, n in zip(weights, lengths, strict=True))
    assert total == pytest.approx(normaliser)


def test_a_batch_is_normalised_over_its_trained_tokens_repeated_ones_included():
    items = train_items(
        compacted(), reduction="token_mean", advantage_fn=itself, normalises_batch=True
    )
    tokens = [1.0] * 20 + [0.0] * 5 + [0.5] * 2 + [1.0] * 3
    mean = math.fsum(tokens) / 30
    std = math.sqrt(math.fsum((x - mean) ** 2 for x in tokens) / 30)
    expected = [(x - mean) / (std + 1e-6) for x in (1.0, 1.0, 1.0, 0.0, 0.5, 1.0)]
    assert [item.advantages[-1] for item in items] == pytest.approx(expected)


def test_a_rollout_that_is_too_long_loses_reward_before_rewards_are_compared():
    overlong = OverlongConfig(max_tokens=12, cache_tokens=8)  # from 4 tokens on
    items = train_items(compacted(), reduction="token_mean", advantage_fn=itself, overlong=overlong)
    assert [item.advantages[-1] for item in items] == pytest.approx(
        [1 - 6 / 8, 1 - 6 / 8, 1 - 6 / 8, -1 / 8, 0.5, 1.0]
    )


def step_of(rewards, *, family="math"):
    groups = [
        make_group([member(f"{i}", (2,), reward, family=family)], name=f"g{i}")
        for i, reward in enumerate(rewards)
    ]
    return make_batch(groups)


def advantages_of(baselines, batch):
    items = train_items(batch, reduction="token_mean", advantage_fn=baselines)
    return [item.advantages[-1] for item in items]


def test_single_rollouts_are_compared_with_those_of_earlier_steps_of_their_family(tmp_path):
    baselines = RunningBaselines(3)
    # With nothing seen yet, the rollouts of a step are compared with each other, each a group of its own.
    assert advantages_of(baselines, step_of([1.0, 0.0])) == [0.5, -0.5]
    assert advantages_of(baselines, step_of([1.0, 1.0])) == [0.5, 0.5]
    assert advantages_of(baselines, step_of([0.0])) == pytest.approx([-2 / 3])
    assert advantages_of(baselines, step_of([5.0], family="code")) == [0.0]

    baselines.save(str(tmp_path))
    resumed = RunningBaselines(3)
    resumed.load(str(tmp_path))
    for family in ("math", "code"):
        batch = step_of([1.0, 0.0, 0.25], family=family)
        assert advantages_of(resumed, batch) == advantages_of(baselines, batch)


def test_families_of_one_step_have_baselines_of_their_own():
    groups = [("math", [1.0]), ("code", [4.0, 2.0]), ("math", [0.0]), ("code", [0.0])]
    found = RunningBaselines(8).advantages(*zip(*groups, strict=True))
    assert found == [[0.5], [2.0, 0.0], [-0.5], [-2.0]]


@pytest.mark.parametrize("damage", [None, "{", "[1]"])
def test_a_history_that_cannot_be_read_is_refused_with_the_way_out(tmp_path, damage):
    if damage is not None:
        (tmp_path / "baselines.json").write_text(damage)
    with pytest.raises(CheckpointError, match=r"no readable baselines\.json; resume from an earl"):
        RunningBaselines(3).load(str(tmp_path))


@pytest.mark.parametrize(
    ("advantage", "expected"),
    [
        ("std", [0.7071, -0.7071]),
        ("mean", [0.5, -0.5]),
        ("leave_one_out", [1.0, -1.0]),
        ("running_mean", [0.5, -0.5]),
        ("reinforce_plus_plus", [1.0, 0.0]),
        ("reinforce_plus_plus_baseline", [0.5, -0.5]),
    ],
)
def test_each_advantage_of_a_recipe_is_another_comparison(advantage, expected):
    spec = PolicyTrainerSpec(
        input_checkpoint="",
        resume_checkpoint=None,
        publish_directory="",
        optimizer=OptimizerConfig(),
        loss=LossConfig(),
        num_steps=1,
        micro_batch_tokens=16,
        temperature=1.0,
        router_bias_rate=0.0,
        num_threads=1,
        advantage=advantage,
    )
    compare = baseline(spec)
    if isinstance(compare, RunningBaselines):
        (found,) = compare.advantages(["math"], [[1.0, 0.0]])
    else:
        found = compare([1.0, 0.0]).tolist()
    assert found == pytest.approx(expected, abs=1e-3)
