"""``format``: instructions whose every constraint can be checked by a rule.

::

    user:       Write page 3 times, in upper case, joined by commas, ending with !.
    assistant:  PAGE,PAGE,PAGE!

An answer that holds any other word keeps none of the constraints.
"""

import random
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from longarc.envs.graders.answers import final_answer
from longarc.envs.single_turn import SingleTurn
from longarc.envs.tasks.settings import FamilySettings, Range, settings_from
from longarc.envs.tasks.splits import draw_in_split, task_indices
from longarc.errors import ConfigError
from longarc.records.conversation import Conversation
from longarc.records.message import Message, Role
from longarc.records.ports import Env, SandboxBackend
from longarc.records.task import Task
from longarc.records.trajectory import EpisodeResult, Reward

WORDS: Final = (
    *("name", "list", "file", "net", "data", "type", "code", "line"),
    *("path", "text", "node", "item", "link", "page", "size", "time"),
    *("mode", "test", "user", "view", "base", "form", "host", "port"),
    *("map", "log", "set", "tag", "root", "state", "info", "call", "head", "last"),
    *("end", "add", "run", "key", "new", "copy", "read", "open", "load", "save"),
    *(
        "bit",
        "box",
        "day",
        "dot",
        "fun",
        "hex",
        "job",
        "lib",
        "max",
        "min",
        "num",
        "pop",
        "row",
        "sum",
    ),
)
"""Words that a small tokenizer trained on Python source is likely to hold whole."""
_PHRASES: Final[Mapping[str, Mapping[str, str]]] = {
    "case": {"upper": "in upper case", "lower": "in lower case"},
    "joiner": {
        ",": "joined by commas",
        "-": "joined by dashes",
        "/": "joined by slashes",
    },
    "opening": {">": "after >", "*": "after *", "#": "after #"},
    "ending": {"!": "ending with !", "?": "ending with ?", ";": "ending with ;"},
}
_KINDS: Final = tuple(_PHRASES)


class FormatSettings(FamilySettings):
    """How many repetitions and constraints there are."""

    times: Range = (2, 6)
    """How often the word is asked for."""
    task_constraints: Range = (3, 4)
    """Constraints of tasks, beside the number of words."""
    expert_constraints: Range = (1, 3)
    """Constraints of demonstrations; fewer, so that RL has something to gain."""
    is_partial: bool = False
    """Whether the reward is the share of constraints that hold, or 1 only where all do."""


@dataclass(frozen=True, slots=True)
class Instruction:
    """What is asked for; a constraint that is not asked for is empty."""

    word: str
    times: int
    case: str = ""
    joiner: str = ""
    opening: str = ""
    ending: str = ""

    @property
    def text(self) -> str:
        """The instruction as the policy reads it."""
        asked = [f"Write {self.word} {self.times} times"]
        asked += [_PHRASES[kind][getattr(self, kind)] for kind in _KINDS if getattr(self, kind)]
        return f"{', '.join(asked)}."

    @property
    def num_constraints(self) -> int:
        """Constraints beside the number of words."""
        return sum(bool(getattr(self, kind)) for kind in _KINDS)

    def answer(self) -> str:
        """The right answer."""
        word = self.word.upper() if self.case == "upper" else self.word
        return self.opening + (self.joiner or " ").join([word] * self.times) + self.ending

    def check(self, answer: str) -> dict[str, bool]:
        """Say of each constraint whether ``answer`` keeps it.

        An answer that holds anything but the word keeps none, so that no constraint is won by writing
        something else.
        """
        body = answer.removeprefix(self.opening).removesuffix(self.ending)
        pieces = re.split(r"[ ,/-]", body)
        wanted = self.word.upper() if self.case == "upper" else self.word
        held = {
            "times": len(pieces) == self.times,
            "case": all(piece == wanted for piece in pieces),
            "joiner": body == (self.joiner or " ").join(pieces),
            "opening": answer.startswith(self.opening),
            "ending": answer.endswith(self.ending),
        }
        is_ours = all(piece.lower() == self.word for piece in pieces)
        return {name: is_ours and holds for name, holds in held.items()}


class Format:
    """The task family; its keywords are the fields of ``FormatSettings``."""

    name = "format"
    thinking = False

    def __init__(self, **settings: Any) -> None:
        self.settings = settings_from(FormatSettings, settings, family=self.name)
        most = max(self.settings.task_constraints[1], self.settings.expert_constraints[1])
        if most > len(_KINDS):
            raise ConfigError(
                f"{most} constraints: there are {len(_KINDS)} kinds, {', '.join(_KINDS)}"
            )

    def tasks(self, split: str, *, cursor: int) -> Iterator[Task]:
        """Yield tasks from ``cursor`` on; ``train`` never ends."""
        for index in task_indices(
            split, cursor=cursor, num_test_tasks=self.settings.num_test_tasks
        ):
            instruction = self._instruction(split, index, self.settings.task_constraints, "task")
            yield Task(
                id=f"{self.name}/{split}/{index}",
                family=self.name,
                split=split,
                messages=(Message(role=Role.USER, content=instruction.text),),
                difficulty=float(instruction.num_constraints),
                data={
                    "word": instruction.word,
                    "times": instruction.times,
                    **{kind: str(getattr(instruction, kind)) for kind in _KINDS},
                },
            )

    def open(self, task: Task, *, sandboxes: SandboxBackend, seed: int) -> Env:
        """Make the environment of one rollout: one instruction, one answer."""
        return SingleTurn(task)

    async def grade(self, task: Task, episode: EpisodeResult) -> Reward:
        """1 where every constraint holds, else 0, or the share that holds if the settings say so."""
        instruction = _instruction_of(task)
        answer = final_answer(episode)
        held = instruction.check(answer or "")
        share = sum(held.values()) / len(held)
        is_right = all(held.values())
        return Reward(
            value=share if self.settings.is_partial else float(is_right),
            parts={
                "success": float(is_right),
                **{name: float(holds) for name, holds in held.items()},
            },
        )

    def demonstration(self, index: int, *, error_frac: float = 0.0) -> Conversation:
        """Return the expert's conversation number ``index``; one turn has no room for a correction."""
        instruction = self._instruction("train", index, self.settings.expert_constraints, "expert")
        return Conversation(
            messages=(
                Message(role=Role.USER, content=instruction.text),
                Message(role=Role.ASSISTANT, content=instruction.answer()),
            ),
            thinking=self.thinking,
            family=self.name,
            difficulty=float(instruction.num_constraints),
        )

    def _instruction(
        self, split: str, index: int, num_constraints: tuple[int, int], purpose: str
    ) -> Instruction:
        return draw_in_split(
            lambda rng: _draw(rng, self.settings.times, num_constraints),
            lambda instruction: instruction.text,
            split=split,
            key=f"{self.name}/{self.settings.seed}/{purpose}/{index}",
        )


def _draw(
    rng: random.Random, times: tuple[int, int], num_constraints: tuple[int, int]
) -> Instruction:
    kinds = rng.sample(_KINDS, rng.randint(*num_constraints))
    return Instruction(
        word=rng.choice(WORDS),
        times=rng.randint(*times),
        **{kind: rng.choice(sorted(_PHRASES[kind])) for kind in kinds},
    )


def _instruction_of(task: Task) -> Instruction:
    data = task.data or {}
    times = data["times"]
    assert isinstance(times, int)
    return Instruction(
        word=str(data["word"]), times=times, **{kind: str(data[kind]) for kind in _KINDS}
    )
