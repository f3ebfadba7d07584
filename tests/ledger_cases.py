"""Records for tests of what is on disk, made from a few numbers."""

import random
from collections.abc import Sequence

import numpy as np

from longarc.records.batch import Batch, StepReport, TokenReport
from longarc.records.message import Message, Role, ToolCall, ToolSpec
from longarc.records.metric import Metric
from longarc.records.outcome import Outcome
from longarc.records.segment import NOT_SAMPLED, Segment
from longarc.records.task import Task
from longarc.records.trajectory import Admission, Group, Trajectory

TOOL = ToolSpec(
    name="bash",
    description="Run a command.",
    parameters={"type": "object", "properties": {"cmd": {"type": "string"}}},
)


def make_segment(*, length: int = 12, version: int = 0, seed: int = 0, order: int = 0) -> Segment:
    """A third prompt, then sampled tokens with one observed token in between."""
    rng = random.Random(seed)
    sampled = [i >= length // 3 and i % 5 != 4 for i in range(length)]
    return Segment(
        token_ids=tuple(rng.randrange(2048) for _ in range(length)),
        is_sampled=tuple(sampled),
        train_mask=tuple(sampled),
        behaviour_logprobs=tuple(float(np.float32(-rng.random())) if s else 0.0 for s in sampled),
        policy_versions=tuple(version if s else NOT_SAMPLED for s in sampled),
        order=order,
    )


def make_task(index: int = 0, *, family: str = "files") -> Task:
    return Task(
        id=f"{family}/train/{index}",
        family=family,
        split="train",
        messages=(Message(role=Role.USER, content="Find the code word."),),
        tools=(TOOL,),
        difficulty=float(index % 5),
        data={"answer": "heron", "files": {"a.txt": "see b.txt"}},
    )


def make_admission(
    group_index: int = 0, member_index: int = 0, *, stage: str = "rl", attempt: int = 0
) -> Admission:
    return Admission(
        trajectory_id=f"{stage}/{group_index}/{member_index}/{attempt}",
        stage=stage,
        group_id=f"{stage}/{group_index}",
        group_index=group_index,
        member_index=member_index,
        attempt=attempt,
        task=make_task(group_index),
        policy_version=0,
        seed=2**63 + group_index,
    )


def make_trajectory(
    admission: Admission | None = None,
    *,
    version: int = 0,
    reward: float | None = 1.0,
    outcome: Outcome = Outcome.COMPLETED,
    length: int = 12,
    num_segments: int = 1,
) -> Trajectory:
    admission = admission or make_admission()
    call = ToolCall(id="c1", name="bash", arguments={"cmd": "cat a.txt"})
    return Trajectory(
        id=admission.trajectory_id,
        stage=admission.stage,
        group_id=admission.group_id,
        task_id=admission.task.id,
        family=admission.task.family,
        outcome=outcome,
        reward=reward,
        reward_parts={} if reward is None else {"exact": reward},
        segments=tuple(
            make_segment(
                length=length,
                version=version,
                seed=100 * admission.group_index + admission.member_index,
                order=order,
            )
            for order in range(num_segments)
        ),
        messages=(
            *admission.task.messages,
            Message(role=Role.ASSISTANT, content="", reasoning="Look.", tool_calls=(call,)),
            Message(role=Role.TOOL, content="see b.txt\n", tool_call_id="c1"),
            Message(role=Role.ASSISTANT, content="heron"),
        ),
        tools=(TOOL,),
        num_turns=2,
        difficulty=admission.task.difficulty,
        started_at_s=1_700_000_000.5,
        duration_s=1.25,
        error=None if outcome.is_trainable else "lost",
        info={"tool_errors": 0},
    )


def make_group(trajectories: Sequence[Trajectory], multiplicities: Sequence[int] = ()) -> Group:
    return Group(
        id=trajectories[0].group_id,
        task_id=trajectories[0].task_id,
        family=trajectories[0].family,
        trajectories=tuple(trajectories),
        multiplicities=tuple(multiplicities) or (1,) * len(trajectories),
    )


def make_batch(
    groups: Sequence[Group], *, step: int = 0, trainer_version: int | None = None, stage: str = "rl"
) -> Batch:
    return Batch(
        stage=stage,
        step=step,
        groups=tuple(groups),
        trainer_version=step if trainer_version is None else trainer_version,
        resets_optimizer=step % 2 == 1,
    )


def make_report(batch: Batch) -> StepReport:
    return StepReport(
        step=batch.step,
        policy_version=batch.trainer_version + 1,
        weights_sha256=f"{batch.step:064x}",
        num_trained_tokens=sum(t.num_trained_tokens for g in batch.groups for t in g.trajectories),
        metrics=(Metric("loss/policy", 1.5, 3.0), Metric("rollout/lag_steps", 2.0, reduce="max")),
        token_reports=(
            TokenReport(
                trajectory_id="rl/0/0/0",
                segment_order=0,
                policy_logprobs=(0.0, -0.1),
                advantages=(0.0, 1.0),
                values=(0.0, 0.25),
            ),
        ),
        histograms={"log_ratio": (0.0, 1e-7)},
    )
