"""Fakes that several test folders share. They satisfy ports; they patch nothing."""

import asyncio
import hashlib
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from longarc.errors import ContractError, EngineError, EngineLostError, LongArcError
from longarc.records.message import Message, ToolSpec
from longarc.records.ports import (
    AssistantTurn,
    ContextExhausted,
    ContextUse,
    ExecResult,
    SandboxSpec,
)
from longarc.records.sampling import (
    EngineHealth,
    FinishReason,
    SampledTokens,
    Sampling,
    WeightSource,
)


@dataclass
class EngineRequest:
    """What a fake engine was asked."""

    prompt_ids: tuple[int, ...]
    sampling: Sampling
    session_id: str


@dataclass
class FakeEngine:
    """Answers with scripted ids, ``piece_tokens`` at a time; cut to the budget with finish reason length.

    The log-probability of the n-th token of a completion is -(n + 1) / 8. ``version_of_piece`` gives the
    policy version by (request index, piece index); by default it is ``policy_version`` at that moment.
    """

    completions: Iterable[Sequence[int]]
    piece_tokens: int = 2
    policy_version: int = 0
    version_of_piece: Callable[[int, int], int] | None = None
    before_piece: Callable[[int, int], None] | None = None
    """Called with (request index, piece index) before each piece; may raise."""
    requests: list[EngineRequest] = field(default_factory=list)
    num_cancelled: int = 0
    yields: bool = False
    """Lets other tasks run before each piece, so that requests overlap."""

    def __post_init__(self) -> None:
        self._script = iter(self.completions)

    async def stream(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, session_id: str
    ) -> AsyncIterator[SampledTokens]:
        request = len(self.requests)
        self.requests.append(EngineRequest(tuple(prompt_ids), sampling, session_id))
        try:
            ids = tuple(next(self._script))
        except StopIteration:
            raise EngineError(f"the fake engine has no completion for request {request}") from None
        is_cut = len(ids) > sampling.max_new_tokens
        ids = ids[: sampling.max_new_tokens]
        finish: FinishReason = "length" if is_cut or ids[-1] not in sampling.stop_ids else "stop"
        is_done = False
        try:
            for piece, start in enumerate(range(0, len(ids), self.piece_tokens)):
                if self.yields:
                    await asyncio.sleep(0)
                if self.before_piece is not None:
                    self.before_piece(request, piece)
                part = ids[start : start + self.piece_tokens]
                is_done = start + len(part) == len(ids)
                yield SampledTokens(
                    token_ids=part,
                    logprobs=tuple(-(start + i + 1) / 8 for i in range(len(part))),
                    policy_version=(
                        self.version_of_piece(request, piece)
                        if self.version_of_piece
                        else self.policy_version
                    ),
                    finish_reason=finish if is_done else None,
                    kept_ids=self._kept_ids(part, sampling),
                )
        finally:
            self.num_cancelled += not is_done

    @staticmethod
    def _kept_ids(part: Sequence[int], sampling: Sampling) -> tuple[tuple[int, ...], ...]:
        """Say that each token was drawn from itself and the one behind it."""
        if not sampling.returns_kept_ids:
            return ()
        return tuple((i, i + 1) if sampling.is_truncated else () for i in part)

    async def score(self, token_ids: Sequence[int], *, temperature: float = 1.0) -> list[float]:
        return [0.0] + [-1.0 / temperature] * (len(token_ids) - 1)

    async def update_weights(self, source: WeightSource, *, policy_version: int) -> None:
        self.policy_version = policy_version

    async def health(self) -> EngineHealth:
        return EngineHealth(
            is_ready=True,
            policy_version=self.policy_version,
            num_running=0,
            num_waiting=0,
            num_sampled_tokens=0,
            num_prompt_tokens=sum(len(r.prompt_ids) for r in self.requests),
            num_cached_tokens=0,
        )


def fake_token(seed: int | None, position: int) -> int:
    """The token that every FakeWorkerEngine samples at a position of a seed's stream."""
    digest = hashlib.blake2b(f"{seed}/{position}".encode(), digest_size=2).digest()
    return int.from_bytes(digest, "big")


@dataclass
class FakeWorkerEngine:
    """An engine that can be killed, hung or started anew; takes ``token_s`` of the loop's time per token.

    It checks that a completion begun elsewhere comes with the tokens of its positions.
    """

    token_s: float = 0.01
    policy_version: int = 0
    instance_id: str = "first"
    is_ready: bool = True
    refuses: LongArcError | None = None
    """Raised by every update."""
    loses: bool = False
    """Every request is lost at once, though the engine says that it is well."""
    sessions: list[str] = field(default_factory=list)
    """Session of each request, in order."""
    updates: list[tuple[str, int]] = field(default_factory=list)
    num_open: int = 0
    num_sampled: int = 0

    def __post_init__(self) -> None:
        self._died = asyncio.Event()
        self._hung = asyncio.Event()
        self._hung.set()

    def die(self) -> None:
        """End all requests, and refuse whatever comes."""
        self._died.set()

    def start_anew(self, *, policy_version: int = 0) -> None:
        """Live again with other weights."""
        self.instance_id += "+"
        self.policy_version, self.num_sampled = policy_version, 0
        self._died = asyncio.Event()

    def hang(self, *, on: bool = True) -> None:
        """Answer nothing any more, without a word."""
        if on:
            self._hung.clear()
        else:
            self._hung.set()

    async def stream(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, session_id: str
    ) -> AsyncIterator[SampledTokens]:
        self.sessions.append(session_id)
        first = sampling.num_sampled_before
        begun = tuple(fake_token(sampling.seed, i) for i in range(first))
        if tuple(prompt_ids)[len(prompt_ids) - first :] != begun:
            raise ContractError("the prompt does not end with the tokens that were sampled before")
        self.num_open += 1
        try:
            left = sampling.max_new_tokens
            while left:
                count = min(left, sampling.stream_interval_tokens or left)
                await self._alive(after_s=count * self.token_s)
                start = first + sampling.max_new_tokens - left
                ids = tuple(fake_token(sampling.seed, start + i) for i in range(count))
                left -= count
                self.num_sampled += count
                yield SampledTokens(
                    token_ids=ids,
                    logprobs=tuple(-i / 7 for i in ids),
                    policy_version=self.policy_version,
                    finish_reason=None if left else "length",
                    num_cached_tokens=len(prompt_ids) - 1,
                )
        finally:
            self.num_open -= 1

    async def score(self, token_ids: Sequence[int], *, temperature: float = 1.0) -> list[float]:
        await self._alive()
        return [0.0] + [-1.0 / temperature] * (len(token_ids) - 1)

    async def update_weights(self, source: WeightSource, *, policy_version: int) -> None:
        await self._alive(after_s=self.token_s)
        if self.refuses is not None:
            raise self.refuses
        self.updates.append((source.path, policy_version))
        self.policy_version = policy_version

    async def health(self) -> EngineHealth:
        await self._alive()
        return EngineHealth(
            is_ready=self.is_ready,
            policy_version=self.policy_version,
            num_running=self.num_open,
            num_waiting=0,
            num_sampled_tokens=self.num_sampled,
            num_prompt_tokens=0,
            num_cached_tokens=0,
            instance_id=self.instance_id,
        )

    async def _alive(self, *, after_s: float = 0.0) -> None:
        died = self._died
        try:
            async with asyncio.timeout(after_s):
                await died.wait()
        except TimeoutError:
            await self._hung.wait()
        if died.is_set() or (self.loses and after_s):
            raise EngineLostError("the fake engine is dead")


@dataclass
class FakeSandbox:
    """A directory of the host in place of a box: the commands are real, the isolation is not there."""

    directory: Path
    fails_with: LongArcError | None = None
    """Raised by every exec."""
    reports_failure: bool = False
    """Every exec says that the box itself crashed."""
    is_closed: bool = False

    async def exec(
        self, argv: Sequence[str], *, stdin: bytes = b"", timeout_s: float = 10.0
    ) -> ExecResult:
        if self.fails_with is not None:
            raise self.fails_with
        if self.reports_failure:
            return ExecResult(rc=None, stdout=b"", stderr=b"gone", failure="env_crashed")
        process = await asyncio.create_subprocess_exec(
            *argv,
            cwd=self.directory,
            env={"PATH": os.environ["PATH"], "LC_ALL": "C"},
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        try:
            async with asyncio.timeout(timeout_s):
                out, err = await process.communicate(stdin)
        except TimeoutError:
            os.killpg(process.pid, signal.SIGKILL)
            out, err = await process.communicate()
            return ExecResult(rc=None, stdout=out, stderr=err, timed_out=True)
        return ExecResult(rc=process.returncode, stdout=out, stderr=err)

    async def write(self, path: str, data: bytes) -> None:
        target = self.directory / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)

    async def read(self, path: str) -> bytes:
        return (self.directory / path).read_bytes()

    async def close(self) -> None:
        self.is_closed = True


@dataclass
class FakeSandboxes:
    """Makes FakeSandboxes below ``directory``, all with the same faults."""

    directory: Path
    create_error: LongArcError | None = None
    exec_error: LongArcError | None = None
    reports_failure: bool = False
    made: list[FakeSandbox] = field(default_factory=list)

    async def create(self, spec: SandboxSpec) -> FakeSandbox:
        if self.create_error is not None:
            raise self.create_error
        place = self.directory / f"box{len(self.made)}"
        place.mkdir()
        sandbox = FakeSandbox(place, self.exec_error, self.reports_failure)
        for path, data in spec.files.items():
            await sandbox.write(path, data)
        self.made.append(sandbox)
        return sandbox

    async def close(self) -> None:
        for sandbox in self.made:
            await sandbox.close()


@dataclass
class ScriptedPolicy:
    """A policy that says what it was told to: messages, or turns where the ending matters.

    After the last scripted message the context is exhausted.
    """

    script: Iterable[Message | AssistantTurn]
    seen: list[tuple[Message, ...]] = field(default_factory=list)
    """The conversation at each request."""
    asked: list[tuple[object, ...]] = field(default_factory=list)
    """Tools, tool choice, lineage and budget of each request."""
    max_tokens: int = 1000
    """Context, in words of the messages' contents, of which each counts as a token."""

    def __post_init__(self) -> None:
        self._rest = iter(self.script)

    def context_use(
        self, messages: Sequence[Message], *, tools: Sequence[ToolSpec] = ()
    ) -> ContextUse:
        used = sum(len(message.content.split()) for message in messages)
        return ContextUse(num_tokens=used, max_tokens=self.max_tokens)

    async def chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[ToolSpec] = (),
        max_new_tokens: int | None = None,
        tool_choice: str = "auto",
        lineage: object = None,
    ) -> AssistantTurn:
        self.seen.append(tuple(messages))
        self.asked.append((tuple(tools), tool_choice, lineage, max_new_tokens))
        said = next(self._rest, None)
        if said is None:
            raise ContextExhausted
        if isinstance(said, AssistantTurn):
            return said
        return AssistantTurn(
            message=said,
            finish_reason="tool_calls" if said.tool_calls else "stop",
            num_prompt_tokens=0,
            num_sampled_tokens=0,
        )
