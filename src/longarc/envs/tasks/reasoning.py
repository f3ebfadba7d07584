"""``reasoning``: families of ``reasoning-gym``, thinking before the answer.

Questions, answers and scores are reasoning-gym's own. Two things are added. Long instructions about
the form of the answer are cut from the question, because a miniature pays for every token of them and
learns the form from demonstrations; ``_SHORTENED`` lists every cut. And answers that reasoning-gym
would take although they are wrong are refused before it sees them; ``_is_honest`` lists the cases.
Any family of reasoning-gym can be a task. Those of ``WORKED`` have demonstrations too, and only their
scores were looked at for such answers.
"""

import random
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Final, Literal, Protocol

from pydantic import Field

from longarc.envs.graders.answers import final_answer, last_number
from longarc.envs.single_turn import SingleTurn
from longarc.envs.tasks.settings import FamilySettings, Frac, settings_from
from longarc.envs.tasks.splits import draw_in_split, rng_of, task_indices
from longarc.envs.tasks.worked import WORKED, Entry
from longarc.errors import ConfigError, boundary
from longarc.records.conversation import Conversation
from longarc.records.message import Message, Role
from longarc.records.ports import Env, SandboxBackend
from longarc.records.task import Task
from longarc.records.trajectory import EpisodeResult, Reward

_TASK_SETTINGS: Final[Mapping[str, Mapping[str, Any]]] = {
    "chain_sum": {"min_terms": 3, "max_terms": 5, "min_digits": 1, "max_digits": 1},
    "number_sorting": {
        "min_numbers": 3,
        "max_numbers": 4,
        "max_decimals": 0,
        "min_value": 10,
        "max_value": 99,
    },
    "number_filtering": {
        "min_numbers": 4,
        "max_numbers": 5,
        "max_decimals": 0,
        "min_value": 10,
        "max_value": 99,
    },
    "word_sequence_reversal": {"min_words": 4, "max_words": 6},
    "spell_backward": {"min_word_len": 4, "max_word_len": 7},
}
_EXPERT_SETTINGS: Final[Mapping[str, Mapping[str, Any]]] = {
    "chain_sum": {"min_terms": 2, "max_terms": 4},
    "number_sorting": {"min_numbers": 2, "max_numbers": 3},
    "number_filtering": {"min_numbers": 3, "max_numbers": 4},
    "word_sequence_reversal": {"min_words": 3, "max_words": 5},
    "spell_backward": {"min_word_len": 3, "max_word_len": 5},
}
_SHORTENED: Final[Mapping[str, tuple[str, str]]] = {
    # what is looked for (regular expression), what stands in its place
    "number_sorting": (
        r"(?s)\nPlease follow the instruction below:.*",
        "\nAnswer like ['1.0', '2.0'].",
    ),
    "number_filtering": (r"\nReturn the new list in the same format\.", ""),
    "word_sequence_reversal": (r"(?s)^.*(?=Reverse this list of words)", ""),
    "spell_backward": (r" \(example: sun -> nus\)", ""),
}
_INDEX_BITS: Final = 48
_NO_THOUGHT: Final = "pass"
"""An empty thought would be the other mode, in which the policy is not asked to think."""
_SUMS_PER_DRILL: Final = 12
_FEWEST_TERMS_BESIDE_DRILLS: Final = 3
_RUNNING_SUMS: Final = (-9, 18)
"""What the running results of three one-digit terms lie between, all but a few."""


def _default_families() -> dict[str, dict[str, Any]]:
    return {name: {} for name in ("chain_sum", "number_filtering", "number_sorting")}


class ReasoningSettings(FamilySettings):
    """Which families there are and how hard they are."""

    families: dict[str, dict[str, Any]] = Field(
        default_factory=_default_families,
        min_length=1,
    )
    """Families by reasoning-gym's name, all equally often; the values go over the family's settings, which for
    families with demonstrations are those of this package and for others reasoning-gym's."""
    expert_families: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Settings of the demonstrations, over those of the tasks; easier ones leave RL something to gain."""
    expert_direct_frac: Frac = 0.0
    """Share of demonstrations that pass over the thinking and answer at once. Whether working pays differs
    between families; a policy that imitates both leaves RL to find out."""
    expert_drill_frac: Frac = 0.0
    """Share of demonstrations that drill single sums, a dozen in one conversation: the facts that worked sums
    are made of, at a tenth of their tokens. Only where ``chain_sum`` has three terms or more, because a
    drilled sum of two could be a held-out task."""
    thinking: bool = True
    """Whether the policy is asked to think before it answers. A published model that was not trained for it is better
    asked without."""
    instruction: str = ""
    """Text behind every question, on a line of its own: how the answer has to look."""
    answer_from: Literal["whole", "last_number"] = "whole"
    """What is graded: the whole visible answer, or the last number in it, for a model that answers in sentences."""
    is_partial: bool = False
    """Whether a reward between 0 and 1 that reasoning-gym gives counts as it is, or as 0."""


def _drill(rng: random.Random, *, family: str) -> Conversation:
    """Single sums, asked and answered one after the other, as the lines of a worked sum are written."""
    messages: list[Message] = []
    for _ in range(_SUMS_PER_DRILL):
        sum_ = f"{rng.randint(*_RUNNING_SUMS)}{rng.choice('+-')}{rng.randint(0, 9)}"
        messages.append(Message(role=Role.USER, content=sum_))
        messages.append(Message(role=Role.ASSISTANT, content=f"{sum_}={_value(sum_)}"))
    return Conversation(messages=tuple(messages), thinking=False, family=family, difficulty=1.0)


def _value(sum_: str) -> int:
    match = re.fullmatch(r"(-?\d+)([+-])(\d)", sum_)
    assert match is not None
    left, operator, right = match.groups()
    return int(left) + (int(right) if operator == "+" else -int(right))


class Dataset(Protocol):
    """What is used of a reasoning-gym dataset."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Make entry number ``index``."""
        ...

    def score_answer(self, answer: str | None, entry: dict[str, Any]) -> float:
        """Score an answer from 0 to 1."""
        ...


@dataclass(frozen=True, slots=True)
class Problem:
    """One entry and how to make it again."""

    dataset: str
    index: int
    question: str
    entry: Entry


class Reasoning:
    """The task family; its keywords are the fields of ``ReasoningSettings``."""

    name = "reasoning"

    def __init__(self, **settings: Any) -> None:
        self.settings = settings_from(ReasoningSettings, settings, family=self.name)
        self.thinking = self.settings.thinking
        tasks, expert = self.settings.families, self.settings.expert_families
        self._without_expert = sorted({*tasks, *expert} - set(WORKED))
        stray = sorted(set(expert) - set(tasks))
        if stray:
            raise ConfigError(f"expert_families {stray} are not among families {sorted(tasks)}")
        if self.settings.expert_direct_frac > 0 and not self.thinking:
            raise ConfigError(
                f"expert_direct_frac={self.settings.expert_direct_frac} chooses between thinking and not, but "
                f"thinking is off and every answer is direct; set it to 0"
            )
        self._check_drills()
        self._datasets: Mapping[str, Dataset] = {
            name: _dataset(name, {**_TASK_SETTINGS.get(name, {}), **own})
            for name, own in tasks.items()
        }
        self._expert_datasets: Mapping[str, Dataset] = {
            name: _dataset(
                name,
                {**_TASK_SETTINGS[name], **own, **_EXPERT_SETTINGS[name], **expert.get(name, {})},
            )
            for name, own in tasks.items()
            if name in WORKED
        }

    def _check_drills(self) -> None:
        if self.settings.expert_drill_frac == 0:
            return
        sums = self.settings.families.get("chain_sum")
        fewest = None if sums is None else {**_TASK_SETTINGS["chain_sum"], **sums}["min_terms"]
        if fewest is None or fewest < _FEWEST_TERMS_BESIDE_DRILLS:
            found = "there is no chain_sum" if fewest is None else f"its min_terms is {fewest}"
            raise ConfigError(
                f"expert_drill_frac={self.settings.expert_drill_frac} needs a family chain_sum of at least "
                f"{_FEWEST_TERMS_BESIDE_DRILLS} terms, so that no drilled sum is a held-out task, but "
                f"{found}; raise min_terms or set expert_drill_frac to 0"
            )

    def tasks(self, split: str, *, cursor: int) -> Iterator[Task]:
        """Yield tasks from ``cursor`` on, the families in turn; ``train`` never ends."""
        for index in task_indices(
            split, cursor=cursor, num_test_tasks=self.settings.num_test_tasks
        ):
            problem = self._problem(self._datasets, split, index, purpose="task")
            yield Task(
                id=f"{self.name}/{split}/{index}",
                family=self.name,
                split=split,
                messages=(Message(role=Role.USER, content=self._asked(problem)),),
                difficulty=_size(problem),
                data={
                    "dataset": problem.dataset,
                    "index": problem.index,
                    "answer": problem.entry["answer"],
                },
            )

    def open(self, task: Task, *, sandboxes: SandboxBackend, seed: int) -> Env:
        """Make the environment of one rollout: one question, one answer."""
        return SingleTurn(task)

    async def grade(self, task: Task, episode: EpisodeResult) -> Reward:
        """Score the visible answer with reasoning-gym; thinking is not looked at."""
        data = task.data or {}
        dataset = self._datasets[str(data["dataset"])]
        index = data["index"]
        assert isinstance(index, int)
        entry = dataset[index]
        answer = final_answer(episode)
        if self.settings.answer_from == "last_number":
            answer = last_number(answer)
        score = 0.0
        if answer is not None and _is_honest(str(data["dataset"]), answer, entry):
            score = float(dataset.score_answer(answer, entry))
        is_right = score >= 1.0
        return Reward(
            value=score if self.settings.is_partial else float(is_right),
            parts={"success": float(is_right), "score": score},
        )

    def demonstration(self, index: int, *, error_frac: float = 0.0) -> Conversation:
        """Return the expert's conversation number ``index``; one turn has no room for a correction.

        Raises:
            ConfigError: a family of the settings has no expert.
        """
        if self._without_expert:
            raise ConfigError(
                f"task family 'reasoning': {self._without_expert} have no expert to demonstrate them; leave them out of "
                f"stages that need demonstrations, or choose from {sorted(WORKED)}"
            )
        rng = rng_of(self.name, self.settings.seed, "expert", index)
        if rng.random() < self.settings.expert_drill_frac:
            return _drill(rng, family=self.name)
        problem = self._problem(self._expert_datasets, "train", index, purpose="expert")
        is_direct = rng.random() < self.settings.expert_direct_frac
        thoughts = _NO_THOUGHT if is_direct else WORKED[problem.dataset](problem.entry)
        return Conversation(
            messages=(
                Message(role=Role.USER, content=self._asked(problem)),
                Message(
                    role=Role.ASSISTANT,
                    reasoning=thoughts if self.thinking else None,
                    content=problem.entry["answer"],
                ),
            ),
            thinking=self.thinking,
            family=self.name,
            difficulty=_size(problem),
        )

    def _asked(self, problem: Problem) -> str:
        return "\n".join(part for part in (problem.question, self.settings.instruction) if part)

    def _problem(
        self, datasets: Mapping[str, Dataset], split: str, index: int, *, purpose: str
    ) -> Problem:
        names = sorted(datasets)
        name = names[index % len(names)]
        return draw_in_split(
            lambda rng: _made(name, datasets[name], rng.getrandbits(_INDEX_BITS)),
            lambda problem: problem.question,
            split=split,
            key=f"{self.name}/{self.settings.seed}/{purpose}/{index}",
        )


def _dataset(name: str, settings: Mapping[str, Any]) -> Dataset:
    with boundary(ConfigError, f"reasoning-gym family {name!r} with {dict(settings)}"):
        # here and not at the top: the import takes more than a second and needs the extra "train"
        import reasoning_gym
        from reasoning_gym.factory import DATASETS

        if name not in DATASETS:
            near = get_close_matches(name, DATASETS, n=3) or sorted(DATASETS)
            raise ConfigError(
                f"task family 'reasoning': reasoning-gym has no family {name!r}; choose {' or '.join(near)}"
            )
        dataset: Dataset = reasoning_gym.create_dataset(
            name, seed=0, size=1 << _INDEX_BITS, **settings
        )
        return dataset


def _made(name: str, dataset: Dataset, index: int) -> Problem:
    entry = dataset[index]
    pattern, replacement = _SHORTENED.get(name, ("", ""))
    question = re.sub(pattern, replacement, entry["question"]) if pattern else entry["question"]
    return Problem(name, index, question.strip(), entry)


def _size(problem: Problem) -> float:
    """Difficulty: how many things the question holds (terms, numbers, words, letters)."""
    metadata = problem.entry["metadata"]
    for key in ("num_terms", "num_words", "numbers", "word_len"):
        if key in metadata:
            return float(metadata[key])
    return 0.0


def _is_honest(name: str, answer: str, entry: Entry) -> bool:
    """Refuse what reasoning-gym's scores let through.

    number_sorting compares with a tolerance of 1 and takes NaN for any number, so the answer must hold
    exactly the numbers of the question.
    """
    if name != "number_sorting":
        return True
    numbers = re.findall(r"-?\d+(?:\.\d+)?", answer)
    is_list = (
        re.fullmatch(r"\[(?:['\"]?-?\d+(?:\.\d+)?['\"]?(?:, ?|(?=\])))*\]", answer) is not None
    )
    given = sorted(float(number) for number in entry["metadata"]["original_numbers"])
    return is_list and sorted(float(number) for number in numbers) == given
