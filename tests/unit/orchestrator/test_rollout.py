"""Every ending of a rollout has its type, and only the policy's own endings have a reward."""

import asyncio
import contextlib

import pytest

from longarc.errors import (
    ConfigError,
    ContractError,
    EngineError,
    EngineFaultError,
    ResourceError,
    RolloutError,
    SandboxError,
)
from longarc.orchestrator.inflight import new_admissions
from longarc.orchestrator.rollout import Recall, RolloutSpec, run_rollout
from longarc.records.outcome import Outcome
from longarc.records.ports import ContextExhausted
from longarc.records.sampling import Sampling
from longarc.records.trajectory import EpisodeResult, Reward
from stage_fakes import FakeEngine, FakeFamily, FakeSandboxes, FakeSession, FakeSessions, Play
from virtual_time import run_virtual

SPEC = RolloutSpec(
    sampling=Sampling(max_new_tokens=4, temperature=0.7),
    max_context_tokens=64,
    timeout_s=100.0,
    grader_timeout_s=10.0,
)


class EnvOf:
    def __init__(self, run):
        self.run = run


class Family(FakeFamily):
    """A family whose environment and grader are given functions."""

    def __init__(self, run=None, grade=None):
        super().__init__(how=lambda task_index, rollout: Play())
        self._run, self._grade = run, grade

    def open(self, task, *, sandboxes, seed):
        return EnvOf(self._run) if self._run else super().open(task, sandboxes=sandboxes, seed=seed)

    async def grade(self, task, episode):
        return await (self._grade or super().grade)(task, episode)


def admission(family: FakeFamily, **changes):
    settings = {
        "stage": "rl",
        "group_index": 3,
        "group_size": 1,
        "policy_version": 0,
        "run_seed": 7,
    }
    task = next(family.tasks("train", cursor=0))
    return new_admissions(task, **(settings | changes))[0]


def rolled_out(family, *, session=FakeSession, recall=None, spec=SPEC, meanwhile=None):
    sessions = FakeSessions(FakeEngine(), make=session)

    async def main():
        async with asyncio.TaskGroup() as tasks:
            if meanwhile is not None:
                tasks.create_task(meanwhile())
            return await run_rollout(
                admission(family),
                family,
                sessions,
                FakeSandboxes(),
                spec=spec,
                clock=asyncio.get_running_loop().time,
                recall=recall,
            )

    trajectory = run_virtual(main())
    assert all(one.is_closed for one in sessions.opened.values())
    return trajectory


def raising(error, *, after_turn=True):
    async def run(policy):
        if after_turn:
            await policy.chat(())
        raise error

    return run


def failing_session(error):
    return lambda engine: FakeSession(engine, error=error)


def test_a_finished_episode_is_graded_and_carries_what_the_engine_saw():
    family = Family()
    trajectory = rolled_out(family)
    assert trajectory.outcome is Outcome.COMPLETED
    assert trajectory.reward == 1.0
    assert trajectory.id == "rl/3/0/0"
    assert trajectory.task_id == "fake/train/0"
    assert trajectory.num_turns == 1
    assert trajectory.num_trained_tokens == 2
    assert trajectory.duration_s == 2.0
    assert trajectory.error is None


def test_each_rollout_samples_with_its_own_seed_and_the_stage_s_distribution():
    family = Family()
    sessions = FakeSessions(FakeEngine())

    async def main():
        for member in new_admissions(
            next(family.tasks("train", cursor=0)),
            stage="rl",
            group_index=0,
            group_size=2,
            policy_version=0,
            run_seed=0,
        ):
            await run_rollout(
                member, family, sessions, FakeSandboxes(), spec=SPEC, clock=lambda: 0.0
            )

    run_virtual(main())
    first, second = sessions.sampling.values()
    assert (first.temperature, first.max_new_tokens) == (0.7, 4)
    assert first.seed != second.seed
    assert 0 <= first.seed < 2**63


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (ValueError("a bug in the environment"), Outcome.ENV_CRASHED),
        (RolloutError("the world broke"), Outcome.ENV_CRASHED),
        (TimeoutError("the environment's own"), Outcome.ENV_CRASHED),
        (SandboxError("the box died"), Outcome.SANDBOX_LOST),
    ],
)
def test_what_the_environment_raises_is_never_a_reward_of_zero(error, outcome):
    trajectory = rolled_out(Family(raising(error)))
    assert trajectory.outcome is outcome
    assert trajectory.reward is None
    assert str(error) in trajectory.error
    assert trajectory.num_sampled_tokens == 2, "what was sampled is kept, to be looked at"


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (EngineError("the engine stopped"), Outcome.ENGINE_LOST),
        (EngineFaultError("logits are not finite"), Outcome.ENGINE_FAULT),
    ],
)
def test_an_engine_s_failure_is_the_engine_s(error, outcome):
    trajectory = rolled_out(Family(), session=failing_session(error))
    assert (trajectory.outcome, trajectory.reward) == (outcome, None)


def test_an_engine_s_failure_that_the_environment_swallows_is_still_the_engine_s():
    async def run(policy):
        with contextlib.suppress(EngineError):
            await policy.chat(())
        return EpisodeResult(outcome=Outcome.COMPLETED, messages=(), num_turns=0)

    trajectory = rolled_out(Family(run), session=failing_session(EngineError("stopped")))
    assert (trajectory.outcome, trajectory.reward) == (Outcome.ENGINE_LOST, None)


def test_a_session_that_cannot_be_opened_is_an_engine_lost():
    def refuse(engine):
        raise EngineError("no room for another session")

    assert rolled_out(Family(), session=refuse).outcome is Outcome.ENGINE_LOST


@pytest.mark.parametrize(
    "error", [ContractError("a bug"), ConfigError("no"), ResourceError("disk")]
)
def test_a_broken_contract_stops_the_run_instead_of_becoming_data(error):
    with pytest.raises(ExceptionGroup) as raised:
        rolled_out(Family(raising(error)))
    assert raised.value.exceptions == (error,)


def test_a_full_context_is_graded_as_truncated():
    trajectory = rolled_out(
        Family(raising(ContextExhausted("full")), grade=_reward(0.25)),
    )
    assert (trajectory.outcome, trajectory.reward) == (Outcome.TRUNCATED_TOKENS, 0.25)


def test_a_policy_that_runs_out_of_time_is_graded():
    async def run(policy):
        await policy.chat(())
        await asyncio.sleep(1e6)

    seen = []

    async def grade(task, episode):
        seen.append(episode)
        return Reward(value=0.0)

    trajectory = rolled_out(Family(run, grade))
    assert (trajectory.outcome, trajectory.reward) == (Outcome.TIMED_OUT, 0.0)
    assert trajectory.duration_s == 100.0
    assert [message.content for message in seen[0].messages] == ["done"]


def test_a_time_out_before_the_policy_was_asked_is_the_environment_s():
    async def run(policy):
        await asyncio.sleep(1e6)

    trajectory = rolled_out(Family(run))
    assert (trajectory.outcome, trajectory.reward) == (Outcome.ENV_CRASHED, None)


def test_a_time_out_without_one_sampled_token_is_the_engine_s():
    class Silent(FakeSession):
        async def chat(self, messages, **options):
            await asyncio.sleep(1e6)

    trajectory = rolled_out(Family(), session=Silent)
    assert (trajectory.outcome, trajectory.reward) == (Outcome.ENGINE_LOST, None)


def test_an_environment_that_turns_the_time_out_into_an_error_changes_nothing():
    async def run(policy):
        await policy.chat(())
        try:
            await asyncio.sleep(1e6)
        except BaseException as cause:
            raise RuntimeError("interrupted") from cause

    trajectory = rolled_out(Family(run, _reward(0.0)))
    assert (trajectory.outcome, trajectory.reward) == (Outcome.TIMED_OUT, 0.0)


def _reward(value):
    async def grade(task, episode):
        return Reward(value=value)

    return grade


async def _raise(task, episode):
    raise KeyError("answer")


async def _hang(task, episode):
    await asyncio.sleep(1e6)


async def _wrong_type(task, episode):
    return 1.0


async def _bad_part(task, episode):
    return Reward(value=1.0, parts={"style": float("inf")})


async def _lose_sandbox(task, episode):
    raise SandboxError("the grader's box died")


@pytest.mark.parametrize(
    ("grade", "error"),
    [
        (_raise, "KeyError: 'answer'"),
        (_hang, "no reward within 10 s"),
        (_wrong_type, "returned float; it must return a Reward"),
        (_bad_part, "is not finite"),
        (_lose_sandbox, "the grader's box died"),
        (_reward(float("nan")), "reward nan"),
        (_reward(float("inf")), "reward inf"),
        (_reward("high"), "could not convert string"),
    ],
)
def test_a_grader_that_fails_gives_no_reward(grade, error):
    trajectory = rolled_out(Family(grade=grade))
    assert (trajectory.outcome, trajectory.reward) == (Outcome.GRADER_FAILED, None)
    assert error in trajectory.error


def test_an_environment_outcome_that_the_environment_reports_is_not_graded():
    async def run(policy):
        return EpisodeResult(outcome=Outcome.SANDBOX_LOST, messages=(), num_turns=0)

    trajectory = rolled_out(Family(run, grade=_raise))
    assert (trajectory.outcome, trajectory.reward) == (Outcome.SANDBOX_LOST, None)


@pytest.mark.parametrize(
    ("episode", "error"),
    [
        (None, "returned NoneType; run() must return an EpisodeResult"),
        (
            EpisodeResult(outcome=Outcome.CANCELLED_STALE, messages=(), num_turns=0),
            "'cancelled_stale', which only the orchestrator gives",
        ),
        (
            EpisodeResult(
                outcome=Outcome.COMPLETED, messages=(), num_turns=0, info={"box": {1: object()}}
            ),
            "info that is not JSON",
        ),
    ],
)
def test_an_episode_that_cannot_be_recorded_is_a_crash_of_the_environment(episode, error):
    async def run(policy):
        return episode

    trajectory = rolled_out(Family(run))
    assert (trajectory.outcome, trajectory.reward) == (Outcome.ENV_CRASHED, None)
    assert error in trajectory.error


@pytest.mark.parametrize("logprob", [float("nan"), float("-inf")])
def test_a_log_probability_that_is_not_finite_is_an_engine_fault(logprob):
    trajectory = rolled_out(Family(), session=lambda engine: FakeSession(engine, logprob=logprob))
    assert (trajectory.outcome, trajectory.reward) == (Outcome.ENGINE_FAULT, None)
    assert trajectory.segments == ()


def test_a_recalled_rollout_ends_at_once_and_keeps_what_was_sampled():
    recall = Recall()

    async def later():
        await asyncio.sleep(0.5)
        recall.end(Outcome.CANCELLED_STALE)

    trajectory = rolled_out(Family(), recall=recall, meanwhile=later)
    assert (trajectory.outcome, trajectory.reward) == (Outcome.CANCELLED_STALE, None)
    assert trajectory.duration_s == 0.5
    assert trajectory.num_sampled_tokens == 1


def test_a_rollout_recalled_before_it_starts_asks_nothing_of_the_engine():
    recall = Recall()
    recall.end(Outcome.CANCELLED_SHUTDOWN)
    trajectory = rolled_out(Family(), recall=recall)
    assert trajectory.outcome is Outcome.CANCELLED_SHUTDOWN
    assert trajectory.segments == ()


def test_a_recall_after_the_end_changes_nothing():
    recall = Recall()
    trajectory = rolled_out(Family(), recall=recall)
    recall.end(Outcome.CANCELLED_SHUTDOWN)
    assert trajectory.outcome is Outcome.COMPLETED


def test_a_recall_during_grading_leaves_no_reward():
    recall = Recall()

    async def grade(task, episode):
        recall.end(Outcome.CANCELLED_SHUTDOWN)
        await asyncio.sleep(1.0)
        return Reward(value=1.0)

    trajectory = rolled_out(Family(grade=grade), recall=recall)
    assert (trajectory.outcome, trajectory.reward) == (Outcome.CANCELLED_SHUTDOWN, None)


def test_a_cancellation_from_outside_passes_through_and_closes_the_session():
    family, sessions = Family(), FakeSessions(FakeEngine())

    async def main():
        rollout = asyncio.create_task(
            run_rollout(
                admission(family), family, sessions, FakeSandboxes(), spec=SPEC, clock=lambda: 0.0
            )
        )
        await asyncio.sleep(0.5)
        rollout.cancel()
        with pytest.raises(asyncio.CancelledError):
            await rollout

    run_virtual(main())
    assert [session.is_closed for session in sessions.opened.values()] == [True]
