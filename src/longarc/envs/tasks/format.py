"""``format``: instructions whose every constraint can be checked by a rule.

::

    user:       Words: name list file key. Answer with 3 of them, reversed, in upper case, joined by commas.
    assistant:  FILE,LIST,NAME

There are several right answers: any three of the words that keep all the constraints.
"""

import random
import re
from collections.abc import Iterator, Mapping, Sequence
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
    *("name", "list", "file", "key", "data", "type", "code", "line"),
    *("path", "text", "node", "item", "link", "page", "size", "time"),
    *("mode", "test", "user", "view", "base", "form", "host", "port"),
)
"""Words that a small tokenizer trained on Python source is likely to hold whole."""
_PHRASES: Final[Mapping[str, Mapping[str, str]]] = {
    "order": {"reversed": "reversed", "kept": "in the same order"},
    "case": {"upper": "in upper case"},
    "joiner": {",": "joined by commas", "-": "joined by dashes", "/": "joined by slashes"},
    "ending": {"!": "ending with !", "?": "ending with ?"},
}
_KINDS: Final = tuple(_PHRASES)


class FormatSettings(FamilySettings):
    """How many words and constraints there are."""

    num_words: Range = (3, 5)
    """Words to choose from."""
    task_constraints: Range = (2, 4)
    """Constraints of tasks, beside the number of words."""
    expert_constraints: Range = (1, 3)
    """Constraints of demonstrations."""
    is_partial: bool = False
    """Whether the reward is the share of constraints that hold, or 1 only where all do."""


@dataclass(frozen=True, slots=True)
class Instruction:
    """What is asked for; a constraint that is not asked for is empty."""

    words: tuple[str, ...]
    num_chosen: int
    order: str = ""
    case: str = ""
    joiner: str = ""
    ending: str = ""

    @property
    def text(self) -> str:
        """The instruction as the policy reads it."""
        asked = [f"Answer with {self.num_chosen} of them"]
        asked += [_PHRASES[kind][getattr(self, kind)] for kind in _KINDS if getattr(self, kind)]
        return f"Words: {' '.join(self.words)}. {', '.join(asked)}."

    @property
    def num_constraints(self) -> int:
        """Constraints beside the number of words."""
        return sum(bool(getattr(self, kind)) for kind in _KINDS)

    def answer(self) -> str:
        """One right answer: the first words that are allowed."""
        chosen = list(self.words[: self.num_chosen])
        if self.order == "reversed":
            chosen.reverse()
        text = (self.joiner or " ").join(chosen)
        return (text.upper() if self.case else text) + self.ending

    def check(self, answer: str) -> dict[str, bool]:
        """Say of each constraint whether ``answer`` keeps it.

        An answer that holds anything but the given words, one of them twice, or no word at all keeps
        none, so that no constraint is won by writing something else.
        """
        body = (
            answer[: -len(self.ending)] if self.ending and answer.endswith(self.ending) else answer
        )
        pieces = re.split(r"[ ,/-]", body)
        lowered = [piece.lower() for piece in pieces]
        held = {
            "words": len(pieces) == self.num_chosen,
            "case": all(
                piece == (w.upper() if self.case else w)
                for piece, w in zip(pieces, lowered, strict=True)
            ),
            "joiner": body == (self.joiner or " ").join(pieces),
            "order": self._is_ordered(lowered),
            "ending": not self.ending or answer.endswith(self.ending),
        }
        is_ours = set(lowered) <= set(self.words) and len(set(lowered)) == len(lowered)
        return {name: is_ours and holds for name, holds in held.items()}

    def _is_ordered(self, chosen: Sequence[str]) -> bool:
        positions = [self.words.index(word) for word in chosen if word in self.words]
        return not self.order or positions == sorted(positions, reverse=self.order == "reversed")


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
        if self.settings.num_words[1] > len(WORDS):
            raise ConfigError(
                f"num_words up to {self.settings.num_words[1]}: there are {len(WORDS)}"
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
                    "words": list(instruction.words),
                    "num_chosen": instruction.num_chosen,
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
            lambda rng: _draw(rng, self.settings.num_words, num_constraints),
            lambda instruction: instruction.text,
            split=split,
            key=f"{self.name}/{self.settings.seed}/{purpose}/{index}",
        )


def _draw(
    rng: random.Random, num_words: tuple[int, int], num_constraints: tuple[int, int]
) -> Instruction:
    words = tuple(rng.sample(WORDS, rng.randint(*num_words)))
    kinds = rng.sample(_KINDS, rng.randint(*num_constraints))
    return Instruction(
        words=words,
        num_chosen=rng.randint(min(2, len(words)), len(words)),
        **{kind: rng.choice(sorted(_PHRASES[kind])) for kind in kinds},
    )


def _instruction_of(task: Task) -> Instruction:
    data = task.data or {}
    words, num_chosen = data["words"], data["num_chosen"]
    assert isinstance(words, Sequence)
    assert isinstance(num_chosen, int)
    return Instruction(
        words=tuple(str(word) for word in words),
        num_chosen=num_chosen,
        **{kind: str(data[kind]) for kind in _KINDS},
    )
