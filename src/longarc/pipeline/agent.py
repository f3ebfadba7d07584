"""Runs one agent program on one task: in a box, with the gateway as its only network.

::

    run's checkpoint --embedded engine--+   (agent_checkpoint)
                                        +--> gateway <-- program in the box --> trajectory, segments, workspace
    --upstream URL   --engine client----+

Nothing here imports torch: with engine servers, the base install is enough.
"""

import io
import os
import tarfile
import time
from collections.abc import Iterator, Mapping
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path, PurePosixPath

from longarc.config.harness import HarnessConfig
from longarc.envs.sandbox.backend import BwrapBackend
from longarc.errors import ConfigError, ContractError, boundary
from longarc.gateway.core import Gateway
from longarc.gateway.rollouts import RolloutSessions
from longarc.orchestrator.rollout import RolloutSpec, run_rollout
from longarc.pipeline.harness import played_by
from longarc.pipeline.upstream import UpstreamSettings, open_upstream
from longarc.records.message import Json, Message, Role
from longarc.records.ports import Env, Sandbox, SandboxBackend
from longarc.records.sampling import Sampling
from longarc.records.task import Task
from longarc.records.trajectory import Admission, EpisodeResult, Reward, Trajectory
from longarc.runs.exchange import write_lines
from longarc.runs.files import make_directory, new_directory, write_atomically
from longarc.runs.record_json import to_json_line, trajectory_to_json
from longarc.tokens.chat_format import ChatFormat

STAGE = "agent"
"""What the ledger calls these trajectories."""
_GRACE_S = 60.0
"""What a rollout may take beside the program itself [seconds]."""
_TAR = "/tmp/longarc-workspace.tar"


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSettings:
    """One run of one program."""

    harness: HarnessConfig
    task: str
    """What the program is told."""
    files: Mapping[str, bytes]
    """The workspace at the beginning, by relative path."""
    temperature: float
    max_new_tokens: int
    """Of one answer [tokens]."""
    max_context_tokens: int | None
    """Prompt and answer together [tokens]; None takes what model or engines can."""
    thinking: bool
    seed: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentRun:
    """What came of it."""

    trajectory: Trajectory
    files: Mapping[str, bytes]
    """The workspace at the end."""

    def write(self, directory: Path) -> None:
        """Write ``segments.jsonl``, ``trajectory.json`` and the workspace into a new directory, all or nothing.

        ``trajectory.json`` is what ``longarc runs import`` reads.

        Raises:
            ConfigError: the directory holds something already.
            ResourceError: the disk is full, or the directory cannot be written.
        """
        with new_directory(directory):
            segments = (to_json_line(asdict(segment)) for segment in self.trajectory.segments)
            write_lines(directory / "segments.jsonl", segments)
            write_lines(
                directory / "trajectory.json", [to_json_line(trajectory_to_json(self.trajectory))]
            )
            for path, data in self.files.items():
                target = directory / "workspace" / path
                make_directory(target.parent)
                write_atomically(target, data)


async def run_upstream(
    upstream: UpstreamSettings, chat_format: ChatFormat, settings: AgentSettings
) -> AgentRun:
    """Run a program with engine servers behind it.

    Raises:
        ConfigError: an option does not fit the engines, or the program is not installed.
        EngineLostError: an engine does not answer.
        ResourceError: this machine cannot run sandboxes.
    """
    async with AsyncExitStack() as opened:
        engines = await opened.enter_async_context(open_upstream(upstream))
        sandboxes = BwrapBackend()
        opened.push_async_callback(sandboxes.close)
        sampling = Sampling(
            max_new_tokens=settings.max_new_tokens,
            temperature=settings.temperature,
            stop_ids=chat_format.stop_ids,
        )
        return await run_program_on_task(
            RolloutSessions(Gateway(engines.engine, chat_format)),
            sandboxes,
            settings,
            name=f"{STAGE}/0",
            sampling=sampling,
            max_context_tokens=engines.max_context_tokens,
            policy_version=upstream.policy_version or 0,
        )


async def run_program_on_task(
    sessions: RolloutSessions,
    sandboxes: SandboxBackend,
    settings: AgentSettings,
    *,
    name: str,
    sampling: Sampling,
    max_context_tokens: int,
    policy_version: int,
) -> AgentRun:
    """Run the program in one session.

    Args:
        sessions: over the engine that answers.
        sandboxes: make the box.
        settings: program and task.
        name: of the trajectory.
        sampling: how answers are drawn.
        max_context_tokens: prompt and answer together [tokens].
        policy_version: of the weights [optimizer steps].
    """
    family = _OneTask(settings)
    task = next(family.tasks("test", cursor=0))
    admission = Admission(
        trajectory_id=name,
        stage=STAGE,
        group_id=name,
        group_index=0,
        member_index=0,
        attempt=0,
        task=task,
        policy_version=policy_version,
        seed=time.time_ns() >> 10 if settings.seed is None else settings.seed,
    )
    trajectory = await run_rollout(
        admission,
        played_by(settings.harness, family, where="--harness"),
        sessions,
        sandboxes,
        spec=RolloutSpec(
            sampling=sampling,
            max_context_tokens=max_context_tokens,
            timeout_s=settings.harness.timeout_s + _GRACE_S,
            grader_timeout_s=_GRACE_S,
        ),
        clock=time.time,
    )
    # Nobody was asked how good it is.
    return AgentRun(
        trajectory=replace(trajectory, reward=None, reward_parts={}), files=family.left_behind
    )


class _OneTask:
    """The task as a family; satisfies ``TaskFamily``, and keeps the workspace that the program leaves."""

    name = STAGE

    def __init__(self, settings: AgentSettings) -> None:
        self.settings = settings
        self.thinking = settings.thinking
        self.left_behind: dict[str, bytes] = {}

    def tasks(self, split: str, *, cursor: int) -> Iterator[Task]:
        """Yield the one task."""
        said = Message(role=Role.USER, content=self.settings.task)
        yield Task(id=f"{STAGE}/{split}/0", family=STAGE, split=split, messages=(said,))

    def workspace(self, task: Task) -> Mapping[str, bytes]:
        """Return the files at the beginning."""
        return self.settings.files

    async def inspect(self, task: Task, sandbox: Sandbox) -> Mapping[str, Json]:
        """Take the workspace along."""
        done = await sandbox.exec(["tar", "-cf", _TAR, "."], timeout_s=_GRACE_S)
        if done.rc != 0:
            return {"workspace": f"could not be packed: {done.stderr.decode(errors='replace')}"}
        try:
            data = await sandbox.read(_TAR)
        except OSError as error:
            return {"workspace": f"is not kept: {error}"}
        try:
            self.left_behind |= regular_files(data)
        except ContractError as error:
            return {"workspace": f"is not kept: {error}"}
        return {}

    def open(self, task: Task, *, sandboxes: SandboxBackend, seed: int) -> Env:
        """Never called: the harness works on the task."""
        raise ContractError("a task of `longarc agent` has no agent loop of its own")

    async def grade(self, task: Task, episode: EpisodeResult) -> Reward:
        """Return what nobody reads."""
        return Reward(value=0.0)


def regular_files(tar: bytes) -> dict[str, bytes]:
    """Return the regular files of an archive by relative path; whoever packed it is not trusted.

    Links and devices are left out; so are names that lead elsewhere, and files with holes, which can claim any size.

    Raises:
        ContractError: it is no archive of tar, or a damaged one, or has a file where another one has a folder.
    """
    found: dict[str, bytes] = {}
    # Anything may come of bytes that are made to be misread.
    with (
        boundary(ContractError, "the box packed no archive of tar"),
        tarfile.open(fileobj=io.BytesIO(tar), mode="r:") as archive,
    ):
        for member in archive:
            path = PurePosixPath(member.name)
            if not member.isreg() or member.issparse() or path.is_absolute() or ".." in path.parts:
                continue
            file = archive.extractfile(member)
            if file is not None:
                found[str(path)] = file.read()
    for name in found:
        folders = {str(folder) for folder in PurePosixPath(name).parents}
        if name == "." or "\0" in name or folders & found.keys():
            raise ContractError(f"the box packed {name!r}, which is no file in a folder")
    return found


def files_below(directory: Path) -> dict[str, bytes]:
    """Return the regular files of a directory by relative path.

    Raises:
        ConfigError: there is no such directory, or a file cannot be read.
    """
    if not directory.is_dir():
        raise ConfigError(
            f"there is no directory {directory}; --workspace names one, whose files are copied"
        )
    found: dict[str, bytes] = {}
    for folder, _, names in os.walk(directory):
        for name in names:
            path = Path(folder, name)
            if path.is_symlink() or not path.is_file():
                continue
            try:
                found[path.relative_to(directory).as_posix()] = path.read_bytes()
            except OSError as error:
                raise ConfigError(
                    f"cannot read {path}: {error.strerror}; leave it out of --workspace"
                ) from error
    return found
