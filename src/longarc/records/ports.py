"""The ports: how parts that do not know each other meet.

Workers (orchestrator, trainer, engine, gateway, envs, data) import these Protocols and never each
other; ``pipeline`` gives each one an object that satisfies them.

::

    orchestrator --SessionFactory--> gateway --Engine--> engine
         |  \\--TaskFamily, Env, Grader--> envs --SandboxBackend--> sandbox
         |                                  \\--PolicyClient--> gateway
         \\--Trainer--> trainer
"""

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

from longarc.records.batch import Batch, StepReport
from longarc.records.lineage import Lineage
from longarc.records.message import Message, ToolSpec
from longarc.records.metric import Metric
from longarc.records.sampling import EngineHealth, SampledTokens, Sampling, WeightSource
from longarc.records.segment import Segment
from longarc.records.task import Task
from longarc.records.trajectory import EpisodeResult, Reward


@runtime_checkable
class Engine(Protocol):
    """Ids in, ids with log-probabilities and versions out."""

    def stream(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, session_id: str
    ) -> AsyncIterator[SampledTokens]:
        """Sample one completion; closing the iterator cancels the request.

        Args:
            prompt_ids: the whole prompt; the engine finds by itself what its cache holds.
            sampling: the distribution and the budget.
            session_id: requests of one session extend each other, which is a hint for the cache.

        Raises:
            EngineError: the prompt does not fit the context, the engine stopped, or logits were not finite.
        """
        ...

    async def score(self, token_ids: Sequence[int], *, temperature: float = 1.0) -> list[float]:
        """Return log p(token[i] | token[:i]) [nats] for i >= 1, preceded by 0.0."""
        ...

    async def update_weights(self, source: WeightSource, *, policy_version: int) -> None:
        """Swap the weights between two decode steps, without draining what is running."""
        ...

    async def health(self) -> EngineHealth:
        """Say whether the engine answers, and what it has done so far."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class AssistantTurn:
    """One answer of the policy, parsed."""

    message: Message
    finish_reason: Literal["stop", "length", "tool_calls"]
    num_prompt_tokens: int
    num_sampled_tokens: int


class ContextExhausted(Exception):  # noqa: N818 - an event of a rollout, not an error
    """The session has no room for another turn: the rollout ends as ``truncated_tokens``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextUse:
    """How full a session's context would be."""

    num_tokens: int
    """The prompt of a conversation, with the opening of the next answer [tokens]."""
    max_tokens: int
    """What prompt and answer may have together [tokens]."""

    @property
    def num_unused_tokens(self) -> int:
        """Room behind the prompt; negative where it does not fit [tokens]."""
        return self.max_tokens - self.num_tokens


class PolicyClient(Protocol):
    """What a white-box environment talks to: the in-process door of the gateway."""

    async def chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[ToolSpec] = (),
        max_new_tokens: int | None = None,
        tool_choice: Literal["auto", "none"] = "auto",
        lineage: Lineage | None = None,
    ) -> AssistantTurn:
        """Send the whole conversation, get the policy's next message.

        Args:
            messages: the whole conversation, as the policy is to see it.
            tools: the tools of the prompt.
            max_new_tokens: bound of this answer [tokens]; None leaves it to the session.
            tool_choice: ``none`` keeps the tools in the prompt, so that its ids stay the same, and leaves calls out
                of the answer.
            lineage: what the request is for, from an environment that rewrites its context; None from others.

        Raises:
            ContextExhausted: prompt and budget do not fit the context any more.
            EngineError: the engine failed; the rollout becomes ``engine_lost`` or ``engine_fault``.
        """
        ...

    def context_use(
        self, messages: Sequence[Message], *, tools: Sequence[ToolSpec] = ()
    ) -> ContextUse:
        """Say how full the context would be if this conversation were sent; nothing is sampled."""
        ...


class PolicySession(PolicyClient, Protocol):
    """One rollout's session: a client, and afterwards the exact segments."""

    def segments(self) -> tuple[Segment, ...]:
        """Everything the engine saw and sampled in this session, as training segments."""
        ...

    async def close(self) -> None:
        """Revoke the session; later calls are refused."""
        ...


class SessionFactory(Protocol):
    """Opens sessions (implemented by the gateway)."""

    def open(
        self, session_id: str, *, sampling: Sampling, thinking: bool, max_context_tokens: int
    ) -> PolicySession:
        """Open the session of one rollout."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecResult:
    """What a command did in a sandbox."""

    rc: int | None
    """Exit status, negative for a signal; None when it was killed for its time or output."""
    stdout: bytes
    stderr: bytes
    timed_out: bool = False
    num_dropped_bytes: int = 0
    """Output beyond the cap."""
    wall_s: float = 0.0
    failure: Literal["env_crashed"] | None = None
    """Set where the sandbox itself failed: an environment outcome, never reward 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxSpec:
    """What a box holds and what it may use."""

    files: Mapping[str, bytes]
    """Files of the workspace by relative path; a group of boxes with equal files shares them."""
    memory_bytes: int = 1 << 30
    disk_bytes: int = 64 << 20
    num_processes: int = 64
    output_bytes: int = 1 << 16
    """Output of one command that is kept [bytes]."""
    lifetime_s: float = 600.0


class Sandbox(Protocol):
    """An isolated place to run commands; single-use."""

    async def exec(
        self, argv: Sequence[str], *, stdin: bytes = b"", timeout_s: float = 10.0
    ) -> ExecResult:
        """Run one command in the workspace and wait for it."""
        ...

    async def write(self, path: str, data: bytes) -> None:
        """Write a file; relative paths start at the workspace."""
        ...

    async def read(self, path: str) -> bytes:
        """Read a file; relative paths start at the workspace."""
        ...

    async def close(self) -> None:
        """End every process of the box and remove all it wrote."""
        ...


class SandboxBackend(Protocol):
    """Makes sandboxes."""

    async def create(self, spec: SandboxSpec) -> Sandbox:
        """Start a box.

        Raises:
            SandboxError: it could not start; says what the machine lacks.
        """
        ...

    async def close(self) -> None:
        """Close every box that is still open."""
        ...


class Env(Protocol):
    """The live world of one task; single-use, no reset. It owns the agent loop."""

    async def run(self, policy: PolicyClient) -> EpisodeResult:
        """Let the policy act until the episode is over."""
        ...


class Grader(Protocol):
    """Says how good an episode was."""

    async def grade(self, task: Task, episode: EpisodeResult) -> Reward:
        """Return a finite reward; raising means ``grader_failed``, never reward 0."""
        ...


@runtime_checkable
class TaskSource(Protocol):
    """Tasks with splits, resumable by cursor."""

    def tasks(self, split: str, *, cursor: int) -> Iterator[Task]:
        """Yield the tasks of ``train`` or ``test`` from position ``cursor`` on, always in the same order.

        ``train`` is endless or long; ``test`` has at least 1,000 tasks where a family can make them.
        """
        ...


@runtime_checkable
class TaskFamily(TaskSource, Grader, Protocol):
    """One kind of task: its source, its environment and its grader. This is what a user writes."""

    name: str
    thinking: bool
    """Whether answers open with a thinking block."""

    def open(self, task: Task, *, sandboxes: SandboxBackend, seed: int) -> Env:
        """Make the environment of one rollout."""
        ...


class Trainer(Protocol):
    """Turns batches into better weights."""

    async def step(self, batch: Batch) -> StepReport:
        """Take one optimizer step."""
        ...

    async def publish(self) -> WeightSource:
        """Write the current weights where engines can read them."""
        ...

    async def save(self, directory: str) -> None:
        """Write weights and optimizer state into an existing empty directory, for an exact resume."""
        ...


@runtime_checkable
class MetricSink(Protocol):
    """Somewhere metrics go."""

    def write(self, *, stage: str, step: int, values: Mapping[str, float]) -> None:
        """Record the combined metrics of one step."""
        ...

    def close(self) -> None:
        """Flush and release."""
        ...


class Scorer(Protocol):
    """Reward models and judges behind a port, so that environments stay free of torch."""

    async def score(self, items: Sequence[str]) -> list[float]:
        """Return one number per item."""
        ...


class Progress(Protocol):
    """Told what happens while a stage runs (the live display, plain lines, nothing)."""

    def update(self, *, stage: str, step: int, num_steps: int, metrics: Sequence[Metric]) -> None:
        """A step is done."""
        ...
