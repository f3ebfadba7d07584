"""One rollout: an agent in one environment, its grading, and a typed outcome whatever happens.

::

    open session --> env.run under the rollout's deadline --> grade under its own --> Trajectory
         |                |  |  |                                |
         |   EngineError -+  |  +- anything foreign: env_crashed +- raised, slow, not finite: grader_failed
         +-- SandboxError ---+

A policy's failure is data and gets a reward; an environment's failure is noise and gets none.
"""

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Literal, Self

from longarc.errors import (
    ContractError,
    EngineError,
    EngineFaultError,
    LongArcError,
    ResourceError,
    RolloutError,
    SandboxError,
    boundary,
)
from longarc.records.lineage import Lineage
from longarc.records.message import Message, ToolSpec
from longarc.records.outcome import Outcome, OutcomeFamily
from longarc.records.ports import (
    AssistantTurn,
    ContextExhausted,
    ContextUse,
    Env,
    PolicyClient,
    PolicySession,
    SandboxBackend,
    SessionFactory,
    TaskFamily,
)
from longarc.records.sampling import Sampling
from longarc.records.segment import Segment
from longarc.records.trajectory import Admission, EpisodeResult, Reward, Trajectory

Clock = Callable[[], float]
"""Returns the time [seconds since the epoch]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSpec:
    """How every rollout of a stage is sampled and bounded."""

    sampling: Sampling
    """The distribution and the budget of one turn; each rollout gets its own seed."""
    max_context_tokens: int
    """Budget of a whole rollout [tokens]."""
    timeout_s: float
    """Wall-clock budget of a rollout without its grading [seconds]."""
    grader_timeout_s: float
    """Wall-clock budget of its grading [seconds]."""


class Recall:
    """The orchestrator's way to end a rollout early; the rollout then returns a cancelled trajectory.

    A cancellation from anywhere else passes through a rollout as usual.
    """

    def __init__(self) -> None:
        self.outcome: Outcome | None = None
        """What the rollout was asked to end as."""
        self.took_effect = False
        """True where the rollout was still running when it was asked."""
        self._scope: asyncio.Timeout | None = None

    def end(self, outcome: Outcome) -> None:
        """End the rollout as ``outcome``, now or before it starts; without effect once it is over."""
        self.outcome = self.outcome or outcome
        if self._scope is not None and not self._scope.expired():
            self._scope.reschedule(asyncio.get_running_loop().time())

    async def __aenter__(self) -> Self:
        self._scope = await asyncio.timeout(None).__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        scope, self._scope = self._scope, None
        if scope is None:
            return False
        try:
            await scope.__aexit__(kind, error, traceback)
        except TimeoutError:
            self.took_effect = True
        return self.took_effect


@dataclass(slots=True)
class _WatchedPolicy:
    """The policy as the environment sees it; remembers the conversation, which a time-out would lose."""

    policy: PolicyClient
    messages: tuple[Message, ...]
    num_calls: int = 0
    num_turns: int = 0
    engine_error: EngineError | None = None
    """The last call's failure; kept because an environment may swallow it."""

    async def chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[ToolSpec] = (),
        max_new_tokens: int | None = None,
        tool_choice: Literal["auto", "none"] = "auto",
        lineage: Lineage | None = None,
    ) -> AssistantTurn:
        self.num_calls += 1
        self.messages = tuple(messages)
        self.engine_error = None
        try:
            turn = await self.policy.chat(
                messages,
                tools=tools,
                max_new_tokens=max_new_tokens,
                tool_choice=tool_choice,
                lineage=lineage,
            )
        except EngineError as error:
            self.engine_error = error
            raise
        self.num_turns += 1
        self.messages = (*self.messages, turn.message)
        return turn

    def context_use(
        self, messages: Sequence[Message], *, tools: Sequence[ToolSpec] = ()
    ) -> ContextUse:
        return self.policy.context_use(messages, tools=tools)

    def episode(self, outcome: Outcome) -> EpisodeResult:
        return EpisodeResult(outcome=outcome, messages=self.messages, num_turns=self.num_turns)


@dataclass(slots=True)
class _Course:
    """One rollout on its way: filled in from the opening of its session to its reward."""

    admission: Admission
    family: TaskFamily
    spec: RolloutSpec
    episode: EpisodeResult | None = None
    segments: tuple[Segment, ...] = ()
    reward: Reward | None = None
    failure: tuple[Outcome, str] | None = None
    """Set where the ending is not the policy's doing."""

    @property
    def has_ended(self) -> bool:
        """Whether it is known how the rollout ended."""
        return self.failure is not None or self.reward is not None

    def fail(self, outcome: Outcome, error: object) -> None:
        """End the rollout through no doing of the policy."""
        self.failure, self.reward = (outcome, str(error)), None

    async def play(self, session: PolicySession, sandboxes: SandboxBackend) -> None:
        """Let the policy act until the episode, the rollout's time or the world is over."""
        task = self.admission.task
        policy = _WatchedPolicy(session, task.messages)
        deadline = asyncio.timeout(self.spec.timeout_s)
        try:
            async with deadline:
                with boundary(RolloutError, f"environment of task {task.id!r}"):
                    env = self.family.open(task, sandboxes=sandboxes, seed=self.admission.seed)
                    self.episode = _checked_episode(await _run(env, policy))
        except TimeoutError:
            pass  # ours: a TimeoutError of the environment has become a RolloutError
        except (EngineError, SandboxError, RolloutError) as error:
            self.fail(_environment_outcome(error), error)
        finally:
            self.segments = session.segments()
        if deadline.expired():
            self._time_out(policy)
        elif policy.engine_error is not None:
            self.fail(_environment_outcome(policy.engine_error), policy.engine_error)
        if not all(map(_is_finite, self.segments)):
            self.segments = ()
            self.fail(
                Outcome.ENGINE_FAULT, "a sampled token has a log-probability that is not finite"
            )

    def _time_out(self, policy: _WatchedPolicy) -> None:
        """Tell whose time ran out: a policy that never acted has not caused it."""
        self.failure = None
        self.episode = policy.episode(Outcome.TIMED_OUT)
        limit = f"{self.spec.timeout_s:g} s"
        if policy.num_calls == 0:
            self.fail(Outcome.ENV_CRASHED, f"the environment did not ask the policy within {limit}")
        elif not any(any(segment.is_sampled) for segment in self.segments):
            self.fail(Outcome.ENGINE_LOST, f"the engine gave no first answer within {limit}")

    async def grade(self) -> None:
        """Give the policy's own endings their reward."""
        if self.failure is not None or self.episode is None:
            return
        task = self.admission.task
        if not self.episode.outcome.is_trainable:
            error = self.episode.info.get("error", "reported by the environment")
            self.fail(self.episode.outcome, error)
            return
        try:
            async with asyncio.timeout(self.spec.grader_timeout_s):
                with boundary(RolloutError, f"grader of task {task.id!r}"):
                    reward = await self.family.grade(task, self.episode)
                    self.reward = _checked_reward(reward)
        except TimeoutError:
            self.fail(
                Outcome.GRADER_FAILED,
                f"grader of task {task.id!r}: no reward within {self.spec.grader_timeout_s:g} s",
            )
        except (EngineError, ResourceError, RolloutError) as error:
            self.fail(Outcome.GRADER_FAILED, error)


async def run_rollout(
    admission: Admission,
    family: TaskFamily,
    sessions: SessionFactory,
    sandboxes: SandboxBackend,
    *,
    spec: RolloutSpec,
    clock: Clock,
    recall: Recall | None = None,
) -> Trajectory:
    """Run and grade one admitted rollout; every ending but an outside cancellation is a trajectory.

    Raises:
        ContractError: the session's segments are inconsistent: a bug, which stops the run.
        ConfigError: the user's environment or grader says that the recipe is wrong.
        ResourceError: the machine lacks something that every rollout needs.
    """
    started_at_s = clock()
    recall = recall or Recall()
    course = _Course(admission, family, spec)
    if recall.outcome is None:
        async with recall:
            await _run_course(course, sessions, sandboxes)
    if recall.outcome is not None and (recall.took_effect or not course.has_ended):
        course.fail(recall.outcome, "ended by the orchestrator")
    return _record(course, started_at_s=started_at_s, duration_s=clock() - started_at_s)


async def _run_course(course: _Course, sessions: SessionFactory, sandboxes: SandboxBackend) -> None:
    admission, spec = course.admission, course.spec
    try:
        session = sessions.open(
            admission.trajectory_id,
            sampling=replace(spec.sampling, seed=admission.seed),
            thinking=course.family.thinking,
            max_context_tokens=spec.max_context_tokens,
        )
    except EngineError as error:
        course.fail(_environment_outcome(error), error)
        return
    try:
        await course.play(session, sandboxes)
    finally:
        await session.close()
    await course.grade()


async def _run(env: Env, policy: _WatchedPolicy) -> EpisodeResult:
    try:
        return await env.run(policy)
    except ContextExhausted:
        return policy.episode(Outcome.TRUNCATED_TOKENS)


def _record(course: _Course, *, started_at_s: float, duration_s: float) -> Trajectory:
    admission, task, episode = course.admission, course.admission.task, course.episode
    if course.failure is not None:
        outcome, error = course.failure
    elif episode is not None:
        outcome, error = episode.outcome, None
    else:
        raise ContractError(
            f"rollout {admission.trajectory_id} ended without an episode and without a reason"
        )
    return Trajectory(
        id=admission.trajectory_id,
        stage=admission.stage,
        group_id=admission.group_id,
        task_id=task.id,
        family=task.family,
        outcome=outcome,
        reward=course.reward.value if course.reward else None,
        reward_parts=course.reward.parts if course.reward else {},
        segments=course.segments,
        messages=episode.messages if episode else task.messages,
        tools=task.tools,
        num_turns=episode.num_turns if episode else 0,
        difficulty=task.difficulty,
        started_at_s=started_at_s,
        duration_s=duration_s,
        error=error,
        info=episode.info if episode else {},
    )


def _environment_outcome(error: LongArcError) -> Outcome:
    match error:
        case EngineFaultError():
            return Outcome.ENGINE_FAULT
        case EngineError():
            return Outcome.ENGINE_LOST
        case SandboxError():
            return Outcome.SANDBOX_LOST
        case _:
            return Outcome.ENV_CRASHED


def _checked_episode(episode: object) -> EpisodeResult:
    """Refuse what a user's environment must not return; called where a RolloutError is expected."""
    if not isinstance(episode, EpisodeResult):
        raise RolloutError(
            f"the environment returned {type(episode).__name__}; run() must return an EpisodeResult"
        )
    if episode.outcome.family is OutcomeFamily.CONTROL:
        raise RolloutError(
            f"the environment returned outcome {episode.outcome.value!r}, which only the orchestrator "
            f"gives; return a policy or an environment outcome"
        )
    if not _is_json(episode.info):
        raise RolloutError(
            "the environment returned info that is not JSON; use strings, numbers, lists and objects"
        )
    return episode


def _checked_reward(reward: object) -> Reward:
    """Refuse what a user's grader must not return; called where a RolloutError is expected."""
    if not isinstance(reward, Reward):
        raise RolloutError(f"grade() returned {type(reward).__name__}; it must return a Reward")
    value = float(reward.value)
    parts = {name: float(part) for name, part in reward.parts.items()}
    if not all(map(math.isfinite, (value, *parts.values()))):
        raise RolloutError(f"reward {value} with parts {parts} is not finite; a reward is a number")
    return Reward(value=value, parts=parts)


def _is_json(value: object) -> bool:
    match value:
        case None | bool() | int() | float() | str():
            return True
        case Mapping():
            return all(isinstance(key, str) and _is_json(item) for key, item in value.items())
        case Sequence():
            return not isinstance(value, bytes) and all(map(_is_json, value))
        case _:
            return False


def _is_finite(segment: Segment) -> bool:
    return all(map(math.isfinite, segment.behaviour_logprobs))
