"""Needles in haystacks: texts whose end asks for lines that stand somewhere before, in the manner of RULER.

::

    the name returns the list            <- hay, as long as wanted
    host=buffer                          <- a needle
    ...
    Look up:
    host=                                <- a question
    buffer                               <- the answer, behind it: the text is scored, or trained, as it stands

Source: RULER, Hsieh et al., arXiv:2404.06654, needle tasks; GLM-5, arXiv:2602.15763, section 2.1.2 scores with it.
"""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias, get_args

from longarc.errors import ConfigError
from longarc.tokens.words import WORDS

NeedleKind: TypeAlias = Literal["single", "multi_key", "multi_value"]
"""One pair and one question; many pairs and several questions; several values of a key, asked for together."""
KINDS: Final[tuple[NeedleKind, ...]] = get_args(NeedleKind)

CountTokens: TypeAlias = Callable[[str], int]
"""Length of a text under the model's tokenizer [tokens]."""

_VERBS: Final = ("returns", "calls", "has", "contains")
_TOKENS_PER_PAIR: Final = 16
"""So many tokens of a text for each pair at least, so that short texts are not all pairs."""
KEYS: Final = WORDS[::4]
"""Words that are keys and nothing else, so that hay is never taken for a needle."""
_OTHERS: Final = tuple(word for word in WORDS if word not in KEYS)
_NUM_VALUES: Final = 3
_MAX_QUESTIONS: Final = {"single": 1, "multi_key": 16, "multi_value": 8}
_TOKENS_PER_QUESTION: Final = 16
"""So many tokens of a text for each line that is asked for at least."""
_HEADER: Final = "Look up:\n"


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a text."""

    text: str
    is_answer: bool
    """Whether it follows from what stands before it."""


@dataclass(frozen=True, slots=True)
class NeedleText:
    """Hay, questions and answers, in order."""

    kind: NeedleKind
    pieces: tuple[Piece, ...]

    @property
    def text(self) -> str:
        """The whole."""
        return "".join(piece.text for piece in self.pieces)


def needle_text(
    kind: NeedleKind,
    seed: str,
    *,
    num_tokens: int,
    count_tokens: CountTokens,
    num_keys: int = 16,
) -> NeedleText:
    """Return the text that ``seed`` names; another seed gives another text.

    Args:
        kind: what is hidden and asked for.
        seed: of the text.
        num_tokens: most tokens of the text; less than a line of hay remains.
        count_tokens: under the tokenizer of the model.
        num_keys: keys there are, all of them in a long text; the fewer, the sooner a small model tells
            them apart.

    Raises:
        ConfigError: ``num_tokens`` does not hold questions and answers, or there are not so many keys.
    """
    if not 1 <= num_keys <= len(KEYS):
        raise ConfigError(
            f"num_keys={num_keys}: there are {len(KEYS)} keys; choose 1 to {len(KEYS)}"
        )
    rng = random.Random(f"needles/{kind}/{seed}")
    pairs = _pairs(kind, rng, num_tokens, num_keys)
    asked = rng.sample(sorted(pairs), min(_num_questions(kind, num_tokens), len(pairs)))
    questions = [Piece(_HEADER, is_answer=False)]
    questions += [piece for name in asked for piece in _question(name, pairs[name])]
    lines = [f"{name}={value}" for name, values in pairs.items() for value in values]
    # A pair's values keep their order where they are dealt among the hay: places are drawn, not lines shuffled.
    room = num_tokens - count_tokens("".join(piece.text for piece in questions))
    room -= sum(count_tokens(f"{line}\n") for line in lines)
    if room < 0:
        raise ConfigError(
            f"num_tokens={num_tokens} is too short for a needle text of kind {kind!r}: questions and pairs "
            f"alone are {num_tokens - room} tokens"
        )
    hay: list[str] = []
    while (room := room - count_tokens(f"{(line := _sentence(rng))}\n")) >= 0:
        hay.append(line)
    rng.shuffle(lines)
    lines = _ordered(lines, pairs)
    places = set(rng.sample(range(len(hay) + len(lines)), len(lines)))
    needles, straws = iter(lines), iter(hay)
    mixed = [next(needles if i in places else straws) for i in range(len(hay) + len(lines))]
    return NeedleText(kind, (Piece("\n".join(mixed) + "\n", is_answer=False), *questions))


class NeedleTexts:
    """Texts to train on, without end: several kinds, every doubling of the length equally often."""

    def __init__(
        self,
        *,
        seed: int,
        num_tokens: tuple[int, int],
        count_tokens: CountTokens,
        num_keys: int = 16,
        kinds: Sequence[NeedleKind] = KINDS,
    ) -> None:
        """Keep the settings.

        Args:
            seed: another seed gives other texts, and none that :func:`held_out` gives.
            num_tokens: shortest and longest text [tokens].
            count_tokens: under the tokenizer of the model.
            num_keys: as in :func:`needle_text`.
            kinds: take turns.
        """
        self._seed, self._num_tokens = seed, num_tokens
        self._count_tokens, self._num_keys, self._kinds = count_tokens, num_keys, kinds

    def needle(self, index: int) -> NeedleText:
        """Return text number ``index``."""
        seed = f"train/{self._seed}/{index}"
        low, high = map(math.log, self._num_tokens)
        num_tokens = int(math.exp(random.Random(f"length/{seed}").uniform(low, high)))
        kind = self._kinds[index % len(self._kinds)]
        return needle_text(
            kind,
            seed,
            num_tokens=num_tokens,
            count_tokens=self._count_tokens,
            num_keys=self._num_keys,
        )


def held_out(
    kind: NeedleKind,
    *,
    seed: int,
    count: int,
    num_tokens: int,
    count_tokens: CountTokens,
    num_keys: int = 16,
) -> list[NeedleText]:
    """Return texts for evaluation; no ``NeedleTexts`` ever gives one of them."""
    return [
        needle_text(
            kind,
            f"test/{seed}/{num_tokens}/{index}",
            num_tokens=num_tokens,
            count_tokens=count_tokens,
            num_keys=num_keys,
        )
        for index in range(count)
    ]


def _num_questions(kind: NeedleKind, num_tokens: int) -> int:
    num_values = _NUM_VALUES if kind == "multi_value" else 1
    wanted = num_tokens // (_TOKENS_PER_QUESTION * num_values)
    return max(1, min(_MAX_QUESTIONS[kind], wanted))


def _pairs(
    kind: NeedleKind, rng: random.Random, num_tokens: int, num_keys: int
) -> dict[str, list[str]]:
    num_values = _NUM_VALUES if kind == "multi_value" else 1
    most = 1 if kind == "single" else num_tokens // (_TOKENS_PER_PAIR * num_values)
    names = rng.sample(KEYS[:num_keys], max(1, min(num_keys, most)))
    # A word is a token: numbers of several digits are learned by models larger than these.
    return {name: rng.sample(_OTHERS, num_values) for name in names}


def _question(name: str, values: Sequence[str]) -> list[Piece]:
    pieces: list[Piece] = []
    for value in values:
        pieces += [
            Piece(f"{name}=", is_answer=False),
            Piece(value, is_answer=True),
            Piece("\n", is_answer=False),
        ]
    return pieces


def _ordered(lines: list[str], pairs: dict[str, list[str]]) -> list[str]:
    """Put the values of each key into the order in which they are asked for."""
    values = {name: iter(given) for name, given in pairs.items()}
    return [f"{name}={next(values[name])}" for name in (line.split("=")[0] for line in lines)]


def _sentence(rng: random.Random) -> str:
    return f"the {rng.choice(_OTHERS)} {rng.choice(_VERBS)} the {rng.choice(_OTHERS)}"
