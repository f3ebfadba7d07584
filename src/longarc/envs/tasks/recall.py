"""``recall``: one line among thousands of tokens, so that choosing what to attend to matters.

::

    user:       the host reads the node in order\\nstate=71\\n... code: output-level ... 2,048 to 3,900 tokens
                What was the code?
    assistant:  code: output-level
"""

import math
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from pydantic import Field

from longarc.envs.graders.answers import final_answer, is_labelled, success
from longarc.envs.single_turn import SingleTurn
from longarc.envs.tasks.settings import FamilySettings, Range, settings_from
from longarc.envs.tasks.splits import draw_in_split, rng_of, task_indices
from longarc.errors import ConfigError
from longarc.records.conversation import Conversation
from longarc.records.message import Message, Role
from longarc.records.ports import Env, SandboxBackend
from longarc.records.task import Task
from longarc.records.trajectory import EpisodeResult, Reward
from longarc.tokens.words import CODE_WORDS, OTHER_WORDS

_VERBS: Final = ("returns", "calls", "has", "contains")
_ENDS: Final = ("in order", "by default", "on error", "when called", "as given", "after that")
_TOKENS_PER_LINE: Final = 12
"""So many tokens of haystack for each pair at least, of which a pair takes about five."""


class RecallSettings(FamilySettings):
    """How long the haystack is and what it is made of."""

    task_tokens: Range = (2048, 3900)
    """Length of a task's haystack [tokens]; question, answer and chat format need about 60 more."""
    expert_tokens: Range = (512, 2048)
    """Length of a demonstration's haystack [tokens], drawn so that each doubling comes equally often: finding
    is learned on short haystacks and carries over to long ones."""
    expert_questions: int = Field(1, ge=1)
    """Questions of a demonstration. The first asks for the code, as tasks do; each further one asks for one of the
    key=value lines, so that a haystack teaches looking up several times at little cost. A haystack with fewer such lines is
    asked about less often."""
    num_pairs: Range = (16, 48)
    """Lines that are key=value, fewer where the haystack is short; the others are text of the same words."""


@dataclass(frozen=True, slots=True)
class Haystack:
    """A text of sentences and ``key=value`` lines that names one code."""

    text: str
    code: str
    pairs: tuple[str, ...]
    """The ``key=value`` lines, in no order."""
    num_tokens: int


class Recall:
    """The task family; its keywords are ``count_tokens`` and the fields of ``RecallSettings``."""

    name = "recall"
    thinking = False

    def __init__(
        self, *, count_tokens: Callable[[str], int] | None = None, **settings: Any
    ) -> None:
        """Keep the settings.

        Args:
            count_tokens: length of a text under the model's tokenizer [tokens]; None estimates it, and
                then a haystack may be some per cent longer or shorter than the settings say. Tasks
                depend on it: the same function gives the same tasks.
            settings: fields of ``RecallSettings``.
        """
        self.settings = settings_from(RecallSettings, settings, family=self.name)
        if self.settings.num_pairs[1] > len(OTHER_WORDS):
            raise ConfigError(
                f"num_pairs up to {self.settings.num_pairs[1]}: there are {len(OTHER_WORDS)} keys"
            )
        self._count_tokens = count_tokens or estimated_tokens

    def tasks(self, split: str, *, cursor: int) -> Iterator[Task]:
        """Yield tasks from ``cursor`` on; ``train`` never ends."""
        for index in task_indices(
            split, cursor=cursor, num_test_tasks=self.settings.num_test_tasks
        ):
            haystack = self._haystack(split, index, self.settings.task_tokens, "task")
            yield Task(
                id=f"{self.name}/{split}/{index}",
                family=self.name,
                split=split,
                messages=(_question(haystack),),
                difficulty=float(haystack.num_tokens),
                data={"code": haystack.code},
            )

    def open(self, task: Task, *, sandboxes: SandboxBackend, seed: int) -> Env:
        """Make the environment of one rollout: one question, one answer."""
        return SingleTurn(task)

    async def grade(self, task: Task, episode: EpisodeResult) -> Reward:
        """1 where the answer is the code and nothing else (``code:`` may precede it), else 0."""
        code = str((task.data or {})["code"])
        return success(is_labelled(final_answer(episode), label="code", value=code))

    def demonstration(self, index: int, *, error_frac: float = 0.0) -> Conversation:
        """Return the expert's conversation number ``index``; one turn has no room for a correction."""
        haystack = self._haystack("train", index, self.settings.expert_tokens, "expert")
        messages = [
            _question(haystack),
            Message(role=Role.ASSISTANT, content=f"code: {haystack.code}"),
        ]
        for pair in haystack.pairs[: self.settings.expert_questions - 1]:
            key = pair.partition("=")[0]
            messages.append(Message(role=Role.USER, content=f"What was {key}?"))
            messages.append(Message(role=Role.ASSISTANT, content=pair))
        return Conversation(
            messages=tuple(messages),
            thinking=self.thinking,
            family=self.name,
            difficulty=float(haystack.num_tokens),
        )

    def _haystack(self, split: str, index: int, bounds: tuple[int, int], purpose: str) -> Haystack:
        """Draw the needle, which decides the split, then the hay around it."""
        key = f"{self.name}/{self.settings.seed}/{purpose}/{index}"
        code = draw_in_split(_code, str, split=split, key=key)
        rng = rng_of(key, split, "hay")
        wanted = _log_uniform(rng, bounds) if purpose == "expert" else rng.randint(*bounds)
        return self._buried(code, rng, wanted)

    def _buried(self, code: str, rng: random.Random, wanted: int) -> Haystack:
        num_others = min(rng.randint(*self.settings.num_pairs), wanted // _TOKENS_PER_LINE)
        others = rng.sample(OTHER_WORDS, num_others)
        pairs = tuple(f"{key}={rng.randint(10, 99)}" for key in others)
        lines = [f"code: {code}", *pairs]
        num_tokens = sum(self._count_tokens(line + "\n") for line in lines)
        while True:
            line = _text(rng)
            num_tokens += self._count_tokens(line + "\n")
            if num_tokens > wanted:
                break
            lines.append(line)
        rng.shuffle(lines)
        text = "\n".join(lines)
        return Haystack(text, code, pairs, self._count_tokens(text))


def estimated_tokens(text: str) -> int:
    """Tokens of a haystack under a tokenizer that splits digits and holds common words whole."""
    return len(re.findall(r"[A-Za-z]+|\d|\s+|[^A-Za-z\d\s]", text))


def _question(haystack: Haystack) -> Message:
    return Message(role=Role.USER, content=f"{haystack.text}\nWhat was the code?")


def _code(rng: random.Random) -> str:
    return "-".join(rng.choice(words) for words in CODE_WORDS)


def _log_uniform(rng: random.Random, bounds: tuple[int, int]) -> int:
    return round(math.exp(rng.uniform(*map(math.log, bounds))))


def _text(rng: random.Random) -> str:
    return f"the {rng.choice(OTHER_WORDS)} {rng.choice(_VERBS)} the {rng.choice(OTHER_WORDS)} {rng.choice(_ENDS)}"
