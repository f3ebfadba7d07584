"""A whole RL stage made of fakes: an engine, a trainer, environments and graders with chosen speeds."""

import asyncio
import hashlib
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from longarc.config.orchestrator import RolloutLoopConfig
from longarc.orchestrator.loop import run_stage
from longarc.orchestrator.mixture import FamilyShare
from longarc.orchestrator.stage import StageResult, StageSpec, Workers
from longarc.records.batch import Batch, StepReport
from longarc.records.message import Message, Role, ToolSpec
from longarc.records.outcome import Outcome
from longarc.records.ports import AssistantTurn, PolicyClient, Progress
from longarc.records.sampling import EngineHealth, Sampling, WeightSource
from longarc.records.segment import NOT_SAMPLED, Segment
from longarc.records.task import Task
from longarc.records.trajectory import EpisodeResult, Reward, Trajectory
from longarc.runs.ledger import Ledger

STAGE = "agentic_rl"


@contextmanager
def quick_directory() -> Iterator[Path]:
    """A directory in memory where there is one: these tests write hundreds of ledgers, each synced."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as name:
        yield Path(name)


@dataclass
class FakeEngine:
    push_s: float = 0.0
    version: int = 0
    num_sampled_tokens: int = 0
    pushed: list[int] = field(default_factory=list)

    def stream(self, prompt_ids, sampling, *, session_id):
        raise NotImplementedError("the loop samples through sessions")

    async def score(self, token_ids, *, temperature=1.0):
        raise NotImplementedError("the loop does not score")

    async def update_weights(self, source: WeightSource, *, policy_version: int) -> None:
        await asyncio.sleep(self.push_s)
        self.version = policy_version
        self.pushed.append(policy_version)

    async def health(self) -> EngineHealth:
        return EngineHealth(
            is_ready=True,
            policy_version=self.version,
            num_running=0,
            num_waiting=0,
            num_sampled_tokens=self.num_sampled_tokens,
            num_prompt_tokens=0,
            num_cached_tokens=0,
        )


@dataclass
class FakeTrainer:
    version: int = 0
    step_s: float = 1.0
    batches: list[Batch] = field(default_factory=list)
    fails_at_step: int | None = None
    keeps_policy: bool = False
    """Whether a step leaves the policy as it was, as value pre-training does."""

    async def step(self, batch: Batch) -> StepReport:
        await asyncio.sleep(self.step_s)
        if batch.step == self.fails_at_step:
            raise ValueError("the trainer broke")
        self.batches.append(batch)
        self.version += not self.keeps_policy
        return StepReport(
            step=batch.step,
            policy_version=self.version,
            weights_sha256=hashlib.sha256(str(self.version).encode()).hexdigest(),
            num_trained_tokens=sum(
                t.num_trained_tokens for g in batch.groups for t in g.trajectories
            ),
            metrics=(),
        )

    async def publish(self) -> WeightSource:
        return WeightSource(path=f"v{self.version}", sha256="")

    async def save(self, directory: str) -> None:
        raise NotImplementedError("the loop does not save")


@dataclass
class FakeSession:
    """Each turn samples one token when it starts and one when it ends, ``turn_s`` later."""

    engine: FakeEngine
    turn_s: Callable[[], float] = lambda: 1.0
    versions: list[int] = field(default_factory=list)
    is_closed: bool = False
    error: Exception | None = None
    logprob: float = -0.5

    async def chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[ToolSpec] = (),
        max_new_tokens: int | None = None,
        tool_choice: str = "auto",
        lineage: object = None,
    ) -> AssistantTurn:
        if self.error is not None:
            raise self.error
        self._sample()
        await asyncio.sleep(self.turn_s())
        self._sample()
        return AssistantTurn(
            message=Message(role=Role.ASSISTANT, content="done"),
            finish_reason="stop",
            num_prompt_tokens=1,
            num_sampled_tokens=2,
        )

    def _sample(self) -> None:
        self.versions.append(self.engine.version)
        self.engine.num_sampled_tokens += 1

    def segments(self) -> tuple[Segment, ...]:
        if not self.versions:
            return ()
        n = len(self.versions)
        return (
            Segment(
                token_ids=(1, *range(2, n + 2)),
                is_sampled=(False,) + (True,) * n,
                train_mask=(False,) + (True,) * n,
                behaviour_logprobs=(0.0,) + (self.logprob,) * n,
                policy_versions=(NOT_SAMPLED, *self.versions),
            ),
        )

    def turns(self) -> tuple[()]:
        return ()

    def tools(self) -> tuple[()]:
        return ()

    async def close(self) -> None:
        self.is_closed = True


@dataclass
class FakeSessions:
    engine: FakeEngine
    opened: dict[str, FakeSession] = field(default_factory=dict)
    sampling: dict[str, Sampling] = field(default_factory=dict)
    make: Callable[[FakeEngine], FakeSession] = FakeSession

    def open(self, session_id, *, sampling, thinking, max_context_tokens):
        assert session_id not in self.opened, "a session is opened once"
        self.opened[session_id] = self.make(self.engine)
        self.sampling[session_id] = sampling
        return self.opened[session_id]


class FakeSandboxes:
    async def create(self, spec):
        raise NotImplementedError("the fake environments need no sandbox")

    async def close(self) -> None:
        pass


@dataclass
class Play:
    """How one rollout goes."""

    seconds: float = 1.0
    reward: float = 1.0
    outcome: Outcome = Outcome.COMPLETED
    num_turns: int = 1
    error: Exception | None = None


@dataclass
class FakeEnv:
    task: Task
    play: Play

    async def run(self, policy: PolicyClient) -> EpisodeResult:
        for _ in range(self.play.num_turns):
            await policy.chat(self.task.messages)
            await asyncio.sleep(self.play.seconds / self.play.num_turns)
        if self.play.error is not None:
            raise self.play.error
        return EpisodeResult(
            outcome=self.play.outcome,
            messages=self.task.messages,
            num_turns=self.play.num_turns,
            info={"reward": self.play.reward},
        )


def alternating(task_index: int, rollout: int) -> Play:
    """Members of a group take turns in succeeding, so that no group has zero variance."""
    return Play(reward=float(rollout % 2))


class FakeFamily:
    """``how(task_index, n)`` decides the n-th rollout of a task; n counts on across retries."""

    def __init__(
        self,
        name: str = "fake",
        how: Callable[[int, int], Play] = alternating,
        length: int | None = None,
    ) -> None:
        self.name = name
        self.thinking = False
        self.how = how
        self.length = length
        self.opened: dict[str, int] = {}

    def tasks(self, split: str, *, cursor: int) -> Iterator[Task]:
        index = cursor
        while self.length is None or index < self.length:
            yield Task(
                id=f"{self.name}/{split}/{index}",
                family=self.name,
                split=split,
                messages=(Message(role=Role.USER, content=f"task {index}"),),
            )
            index += 1

    def open(self, task: Task, *, sandboxes, seed: int) -> FakeEnv:
        rollout = self.opened.get(task.id, 0)
        self.opened[task.id] = rollout + 1
        return FakeEnv(task, self.how(int(task.id.rsplit("/", 1)[1]), rollout))

    async def grade(self, task: Task, episode: EpisodeResult) -> Reward:
        return Reward(value=episode.info["reward"])


def trajectory(
    index: int, reward: float | None, *, outcome=Outcome.COMPLETED, versions=(5, 5), is_trained=True
) -> Trajectory:
    """A member of group ``rl/0`` whose tokens were sampled by ``versions``."""
    segment = Segment(
        token_ids=(1, *range(2, 2 + len(versions))),
        is_sampled=(False, *(True for _ in versions)),
        train_mask=(False, *(is_trained for _ in versions)),
        behaviour_logprobs=(0.0, *(-1.0 for _ in versions)),
        policy_versions=(NOT_SAMPLED, *versions),
    )
    return Trajectory(
        id=f"rl/0/{index}/0",
        stage="rl",
        group_id="rl/0",
        task_id="task",
        family="family",
        outcome=outcome,
        reward=reward,
        reward_parts={},
        segments=(segment,),
        messages=(),
        tools=(),
        num_turns=1,
        difficulty=0.0,
        started_at_s=0.0,
        duration_s=0.0,
    )


@dataclass
class Sink:
    values: list[Mapping[str, float]] = field(default_factory=list)

    def write(self, *, stage: str, step: int, values: Mapping[str, float]) -> None:
        self.values.append(values)

    def close(self) -> None:
        pass


def loop_config(**settings) -> RolloutLoopConfig:
    defaults = {"num_steps": 3, "groups_per_step": 2, "group_size": 2}
    return RolloutLoopConfig(**(defaults | settings))


@dataclass
class Stage:
    """One process's life of a stage; make another one on the same path to resume it."""

    path: Path
    config: RolloutLoopConfig
    family: FakeFamily = field(default_factory=FakeFamily)
    families: Sequence[FamilyShare] = ()
    push_s: float = 0.0
    step_s: float = 1.0
    turn_s: float = 0.0
    progress: Progress | None = None
    open_ledger: Callable[[Path], Ledger] = Ledger.open

    def __post_init__(self) -> None:
        with Ledger.open(self.path) as ledger:
            version = len(ledger.steps(STAGE))
        self.engine = FakeEngine(push_s=self.push_s)
        self.trainer = FakeTrainer(version=version, step_s=self.step_s)
        self.sessions = FakeSessions(
            self.engine, make=lambda engine: FakeSession(engine, lambda: self.turn_s)
        )
        self.sink = Sink()
        self.stop = asyncio.Event()
        self.reports: list[StepReport] = []

    async def run(self) -> StageResult:
        async def on_step(report: StepReport) -> None:
            self.reports.append(report)

        with self.open_ledger(self.path) as ledger:
            return await run_stage(
                self.config,
                StageSpec(
                    stage=STAGE,
                    families=self.families or [FamilyShare(family=self.family, share=1.0)],
                    sampling=Sampling(max_new_tokens=8),
                    max_context_tokens=64,
                    run_seed=0,
                ),
                Workers(
                    trainer=self.trainer,
                    engine=self.engine,
                    sessions=self.sessions,
                    sandboxes=FakeSandboxes(),
                    ledger=ledger,
                    sinks=[self.sink],
                    progress=self.progress,
                ),
                policy_version=self.trainer.version,
                on_step=on_step,
                stop=self.stop,
                clock=lambda: 0.0,
            )


def ledger_batches(path: Path) -> list[Batch]:
    with Ledger.open(path) as ledger:
        return [ledger.batch(STAGE, row.step) for row in ledger.steps(STAGE)]


def lags(batches: Sequence[Batch]) -> list[int]:
    """Lag of every trained trajectory, from its tokens."""
    return [
        batch.trainer_version - min(v for s in t.segments for v in s.policy_versions if v >= 0)
        for batch in batches
        for group in batch.groups
        for t in group.trajectories
    ]


def group_indices(batches: Sequence[Batch]) -> list[list[int]]:
    return [[int(group.id.rsplit("/", 1)[1]) for group in batch.groups] for batch in batches]
