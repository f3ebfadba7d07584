"""Sampled trajectories and groups, as the benchmarks of training need them: tokens and rewards, and nothing else."""

from collections.abc import Sequence

from longarc.records.outcome import Outcome
from longarc.records.segment import NOT_SAMPLED, Segment
from longarc.records.trajectory import Group, Trajectory


def sampled_trajectory(
    name: str, prompt: Sequence[int], ids: Sequence[int], logprobs: Sequence[float], version: int
) -> Trajectory:
    """Return a finished trajectory whose reward is the share of even ids.

    Args:
        name: its id, ``step/task/member``.
        prompt: ids before the sampled ones.
        ids: sampled ids.
        logprobs: of each sampled id, as the engine reports them [nats].
        version: of the weights that sampled them.
    """
    is_sampled = (False,) * len(prompt) + (True,) * len(ids)
    segment = Segment(
        token_ids=(*prompt, *ids),
        is_sampled=is_sampled,
        train_mask=is_sampled,
        behaviour_logprobs=(*[0.0] * len(prompt), *logprobs),
        policy_versions=(*[NOT_SAMPLED] * len(prompt), *[version] * len(ids)),
    )
    return Trajectory(
        id=name,
        stage="bench",
        group_id=name.rpartition("/")[0],
        task_id=name.split("/")[1],
        family="bench",
        outcome=Outcome.COMPLETED,
        reward=sum(token % 2 == 0 for token in ids) / len(ids),
        reward_parts={},
        segments=(segment,),
        messages=(),
        tools=(),
        num_turns=1,
        difficulty=0.0,
        started_at_s=0.0,
        duration_s=0.0,
    )


def sampled_group(members: Sequence[Trajectory]) -> Group:
    """Return a group in which every member counts once."""
    return Group(
        id=members[0].group_id,
        task_id=members[0].task_id,
        family=members[0].family,
        trajectories=tuple(members),
        multiplicities=(1,) * len(members),
    )
