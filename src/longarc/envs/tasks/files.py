"""``files``: follow a trail of files in a sandbox to a code.

::

    user:       Find the code.\\nnext: host/node
    assistant:  bash(cat host/node)          tool:  find: id=state
    assistant:  bash(grep -rl ^id=state *)   tool:  data/loop
    assistant:  bash(cat data/loop)          tool:  id=state\\ncode: flags-open
    assistant:  code: flags-open

Difficulty is the number of hops: files to read until the code is found. A pointer names a file
(``next: host/node``, one command), a directory that holds only the next file (``dir: host``, ``ls``
then ``cat``) or the first line of the next file (``find: id=state``, ``grep`` then ``cat``). Distractor
files look the same and end in other codes, so that only the trail tells which code is right. Codes of
the test split never occur in the train split.

Demonstrations come from two experts. One follows the trail. The other takes a short cut,
``grep -rh ^code: *``, in trees that hold a single code, where that is right. A policy that imitates
both takes the short cut in trees full of other codes as well; that following the trail is what pays
there is left for RL to find out.
"""

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Self

from pydantic import Field, model_validator

from longarc.config.context import ContextConfig
from longarc.envs.bash_tool import BASH, bash_tool
from longarc.envs.graders.answers import final_answer, is_labelled, success
from longarc.envs.tasks.settings import FamilySettings, Frac, Range, settings_from
from longarc.envs.tasks.splits import draw_in_split, rng_of, task_indices
from longarc.envs.tool_loop import run_tool_loop
from longarc.errors import ConfigError, SandboxError
from longarc.records.conversation import Conversation
from longarc.records.message import Json, Message, Role, ToolCall
from longarc.records.outcome import Outcome
from longarc.records.ports import Env, PolicyClient, SandboxBackend, SandboxSpec
from longarc.records.task import Task
from longarc.records.trajectory import EpisodeResult, Reward
from longarc.tokens.words import CODE_WORDS, DIRECTORIES, FILE_IDS, FILE_NAMES

_KINDS: Final = ("next", "dir", "find")
_SHORTCUT: Final = "grep -rh ^code: *"


@dataclass(frozen=True, slots=True)
class Trail:
    """A tree with one trail through it."""

    pointer: str
    """Where the trail starts, as a file would say it."""
    files: Mapping[str, str]
    """The tree: text by relative path."""
    steps: tuple[str, ...]
    """The commands that follow the trail without a detour."""
    code: str
    num_hops: int


class FilesSettings(FamilySettings):
    """How large the trees are and how long the trails."""

    train_hops: Range = (1, 5)
    """Files to read in tasks of the train split."""
    test_hops: Range = (3, 5)
    """Files to read in tasks of the test split."""
    expert_hops: Range = (1, 2)
    """Files to read in demonstrations; kept short, so that RL has something to gain."""
    num_distractors: int = Field(6, ge=2)
    """Files beside the trail."""
    num_directories: int = Field(3, ge=1)
    """Directories that hold several files."""
    indirect_frac: Frac = 0.25
    """Share of pointers that name a directory or an id, so that ls or grep is needed."""
    expert_indirect_frac: Frac = 0.35
    """The same in demonstrations; more, because ids are learned from these pointers alone."""
    expert_shortcut_frac: Frac = 0.0
    """Share of demonstrations that search for a code instead of following the trail, in trees that hold
    one code only."""
    max_turns: int = Field(14, ge=2)
    """Answers the policy may give [turns]."""
    command_timeout_s: float = Field(5.0, gt=0)
    """Time one command may take [seconds]."""
    max_output_chars: int = Field(300, ge=20)
    """What the policy sees of one command's output [characters]."""
    context: ContextConfig | None = None
    """What keeps the conversation within the context: ``{ policy = "keep_recent" }``, ``"hierarchical"`` or
    ``"summary"`` with their settings; None shows everything until the context is full."""

    @model_validator(mode="after")
    def _words_suffice(self) -> Self:
        max_hops = max(self.train_hops[1], self.test_hops[1], self.expert_hops[1])
        for what, needed, names in (
            ("directories", self.num_directories + max_hops, DIRECTORIES),
            ("file names", max_hops + self.num_distractors + 1, FILE_NAMES),
            ("file ids", max_hops + self.num_distractors, FILE_IDS),
        ):
            if needed > len(names):
                raise ValueError(
                    f"{self.num_directories} directories, {max_hops} hops and {self.num_distractors} "
                    f"distractors need {needed} different {what}, there are {len(names)}"
                )
        return self


class Files:
    """The task family; its keywords are the fields of ``FilesSettings``."""

    name = "files"
    thinking = False

    def __init__(self, **settings: Any) -> None:
        self.settings = settings_from(FilesSettings, settings, family=self.name)

    def tasks(self, split: str, *, cursor: int) -> Iterator[Task]:
        """Yield tasks from ``cursor`` on; ``train`` never ends."""
        for index in task_indices(
            split, cursor=cursor, num_test_tasks=self.settings.num_test_tasks
        ):
            hops = self.settings.train_hops if split == "train" else self.settings.test_hops
            trail = self._trail(split, index, hops=hops)
            yield Task(
                id=f"{self.name}/{split}/{index}",
                family=self.name,
                split=split,
                messages=_opening(trail),
                tools=(BASH,),
                difficulty=float(trail.num_hops),
                data={
                    "files": dict(trail.files),
                    "code": trail.code,
                    "steps": list(trail.steps),
                },
            )

    def open(self, task: Task, *, sandboxes: SandboxBackend, seed: int) -> Env:
        """Make the environment of one rollout; nothing in it is random."""
        return _FilesEnv(
            task=task,
            sandboxes=sandboxes,
            max_turns=self.settings.max_turns,
            command_timeout_s=self.settings.command_timeout_s,
            max_output_chars=self.settings.max_output_chars,
            context=self.settings.context,
        )

    async def grade(self, task: Task, episode: EpisodeResult) -> Reward:
        """1 where the last message is the code and nothing else (``code:`` may precede it), else 0."""
        code = str((task.data or {})["code"])
        return success(is_labelled(final_answer(episode), label="code", value=code))

    def demonstration(self, index: int, *, error_frac: float = 0.0) -> Conversation:
        """Return the expert's conversation number ``index``; ``error_frac`` of them hold a mistake and its correction.

        The tool's answers are worked out here rather than run, so that a million demonstrations cost
        no sandbox; a test holds them against the real commands.
        """
        trail = self._expert_trail(index)
        rng = rng_of(self.name, self.settings.seed, "mistakes", index)
        is_wrong = rng.random() < error_frac
        wrong_at = rng.randrange(len(trail.steps)) if is_wrong else -1

        messages = list(_opening(trail))
        untrained: list[int] = []
        for number, command in enumerate(trail.steps):
            if number == wrong_at:
                untrained.append(len(messages))
                messages += _mistake(command, trail.files, rng, call_id=f"call_{number}_wrong")
            messages += _exchange(command, trail.files, call_id=f"call_{number}")
        messages.append(Message(role=Role.ASSISTANT, content=f"code: {trail.code}"))
        return Conversation(
            messages=tuple(messages),
            tools=(BASH,),
            untrained=frozenset(untrained),
            thinking=self.thinking,
            family=self.name,
            difficulty=float(trail.num_hops),
        )

    def _expert_trail(self, index: int) -> Trail:
        """The trail of a demonstration, and how its expert goes about it."""
        trail = self._trail("train", index, hops=self.settings.expert_hops, purpose="expert")
        rng = rng_of(self.name, self.settings.seed, "shortcuts", index)
        if rng.random() >= self.settings.expert_shortcut_frac:
            return trail
        alone = {
            path: text
            for path, text in trail.files.items()
            if "code: " not in text or trail.code in text
        }
        return replace(trail, files=alone, steps=(_SHORTCUT,))

    def _trail(
        self, split: str, index: int, *, hops: tuple[int, int], purpose: str = "task"
    ) -> Trail:
        """Draw the code, which decides the split, then the tree around it."""
        key = f"{self.name}/{self.settings.seed}/{purpose}/{index}"
        code = draw_in_split(_code, str, split=split, key=key)
        rng = rng_of(key, split, "tree")
        is_expert = purpose == "expert"
        indirect_frac = (
            self.settings.expert_indirect_frac if is_expert else self.settings.indirect_frac
        )
        return self._draw(rng, code, num_hops=rng.randint(*hops), indirect_frac=indirect_frac)

    def _draw(self, rng: random.Random, code: str, *, num_hops: int, indirect_frac: float) -> Trail:
        kinds = [
            rng.choice(_KINDS[1:]) if rng.random() < indirect_frac else _KINDS[0]
            for _ in range(num_hops)
        ]
        num_files = num_hops + self.settings.num_distractors
        names, ids = rng.sample(FILE_NAMES, num_files), rng.sample(FILE_IDS, num_files)
        directories = rng.sample(DIRECTORIES, self.settings.num_directories + num_hops)
        shared = [directories.pop() for _ in range(self.settings.num_directories)]
        decoys = [_code(rng, other_than=code) for _ in range(self.settings.num_distractors)]

        files: dict[str, str] = {}
        pointer = f"code: {code}"
        steps: tuple[str, ...] = ()
        for kind in reversed(kinds):  # from the code back to the start
            directory = directories.pop() if kind == "dir" else rng.choice(shared)
            path = f"{directory}/{names.pop()}"
            file_id = ids.pop()
            files[path] = f"id={file_id}\n{pointer}\n" if kind == "find" else f"{pointer}\n"
            target = {"next": path, "dir": directory, "find": f"id={file_id}"}[kind]
            pointer = f"{kind}: {target}"
            first = {
                "next": (),
                "dir": (f"ls {directory}",),
                "find": (f"grep -rl ^{target} *",),
            }[kind]
            steps = (*first, f"cat {path}", *steps)

        on_trail = sorted(files)
        for number in range(self.settings.num_distractors):
            path = f"{rng.choice(shared)}/{names.pop()}"
            is_end = number < 2 or rng.random() < 0.3
            text = (
                f"code: {decoys[number % len(decoys)]}"
                if is_end
                else f"next: {rng.choice(on_trail)}"
            )
            has_id = rng.random() < 0.3
            files[path] = f"id={ids.pop()}\n{text}\n" if has_id else f"{text}\n"
        # By name, because tools list files in the order in which they were made: made from the code back to
        # the start, the last file that `grep -r` prints is the one with the code, and RL finds that out.
        by_name = dict(sorted(files.items()))
        return Trail(pointer=pointer, files=by_name, steps=steps, code=code, num_hops=num_hops)


@dataclass(frozen=True, slots=True, kw_only=True)
class _FilesEnv:
    """One rollout: a box with the tree, and the agent loop around it."""

    task: Task
    sandboxes: SandboxBackend
    max_turns: int
    command_timeout_s: float
    max_output_chars: int
    context: ContextConfig | None

    async def run(self, policy: PolicyClient) -> EpisodeResult:
        """Let the policy follow the trail."""
        files = (self.task.data or {})["files"]
        assert isinstance(files, Mapping)
        spec = SandboxSpec(files={path: str(text).encode() for path, text in files.items()})
        try:
            sandbox = await self.sandboxes.create(spec)
        except SandboxError as error:
            return EpisodeResult(
                outcome=Outcome.SANDBOX_LOST,
                messages=self.task.messages,
                num_turns=0,
                info={"error": str(error)},
            )
        try:
            bash = bash_tool(
                sandbox, timeout_s=self.command_timeout_s, max_output_chars=self.max_output_chars
            )
            return await run_tool_loop(
                policy,
                self.task,
                {"bash": bash},
                max_turns=self.max_turns,
                context=self.context,
            )
        finally:
            await sandbox.close()


def _opening(trail: Trail) -> tuple[Message, ...]:
    return (Message(role=Role.USER, content=f"Find the code.\n{trail.pointer}"),)


def _code(rng: random.Random, *, other_than: str = "") -> str:
    """Two words; a guess is right once in 256."""
    while (code := "-".join(rng.choice(words) for words in CODE_WORDS)) == other_than:
        pass
    return code


def _exchange(command: str, files: Mapping[str, str], *, call_id: str) -> tuple[Message, Message]:
    """One right call and its answer."""
    call = ToolCall(id=call_id, name=BASH.name, arguments={"command": command})
    return _turn(call, simulated(command, files))


def _mistake(
    command: str, files: Mapping[str, str], rng: random.Random, *, call_id: str
) -> tuple[Message, Message]:
    """One wrong call, as a policy makes them, and what comes back."""
    kind = rng.choice(("misread", "wandered", "no_argument", "no_tool"))
    arguments: Mapping[str, Json] = {"command": command}
    if kind == "no_argument":
        return _turn(
            ToolCall(id=call_id, name=BASH.name, arguments={}), "error: bash needs command"
        )
    if kind == "no_tool":
        call = ToolCall(id=call_id, name="cat", arguments=arguments)
        return _turn(call, "error: no tool 'cat'; use bash")
    if kind == "wandered":
        wrong = f"cat {rng.choice(sorted(p for p in files if p not in command))}"
    else:
        taken = {name for path in files for name in path.split("/")}
        free = rng.choice([name for name in FILE_NAMES if name not in taken])
        wrong = f"cat {rng.choice(sorted(files)).split('/')[0]}/{free}"
    return _exchange(wrong, files, call_id=call_id)


def _turn(call: ToolCall, answer: str) -> tuple[Message, Message]:
    return (
        Message(role=Role.ASSISTANT, content="", tool_calls=(call,)),
        Message(role=Role.TOOL, content=answer, tool_call_id=call.id),
    )


def simulated(command: str, files: Mapping[str, str]) -> str:
    """What the commands of the experts print over ``files``, as the bash tool shows it."""
    words: Sequence[str] = command.split()
    match words:
        case ["cat", path]:
            if path in files:
                return files[path].rstrip("\n")
            return f"cat: {path}: No such file or directory"
        case ["ls", directory]:
            return "\n".join(
                sorted(p.split("/")[1] for p in files if p.startswith(f"{directory}/"))
            )
        case ["grep", "-rl", pattern, "*"]:
            start = pattern.removeprefix("^")
            named = [path for path, text in files.items() if _lines_with(text, start)]
            return "\n".join(sorted(named))
        case ["grep", "-rh", pattern, "*"]:
            start = pattern.removeprefix("^")
            return "\n".join(
                line for path in sorted(files) for line in _lines_with(files[path], start)
            )
        case _:
            raise ConfigError(f"the expert of files does not know the command {command!r}")


def _lines_with(text: str, start: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith(start)]
