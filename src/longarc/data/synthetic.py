"""Generated text in which the next token can be copied from far before.

Real text teaches copying slowly, because guessing pays there too. In these texts names and numbers are
random, so that nothing but looking them up predicts their second occurrence; a small model then grows
the circuits that every later task (files, recall, tools) builds on within minutes.
"""

import random
from collections.abc import Callable
from typing import Final


class CopyTexts:
    """Short texts of several kinds: sessions, listings, key=value, repeats, sums. A ``TextSource``."""

    def __init__(self, *, seed: int, text_chars: int = 1200) -> None:
        """Keep the settings.

        Args:
            seed: another seed gives other texts.
            text_chars: least length of one text [characters].
        """
        self._seed = seed
        self._text_chars = text_chars

    def text(self, index: int) -> str:
        """Return text number ``index``: pieces of all kinds, one after the other."""
        rng = random.Random(f"copy/{self._seed}/{index}")
        pieces: list[str] = []
        while sum(map(len, pieces)) < self._text_chars:
            pieces.append(rng.choice(_KINDS)(rng))
        return "\n".join(pieces)


class LongRecallTexts:
    """Long key=value documents that end in look-ups of their own lines. A ``TextSource``."""

    def __init__(
        self,
        *,
        seed: int,
        num_tokens: int,
        count_tokens: Callable[[str], int],
        num_questions: int = 8,
    ) -> None:
        """Keep the settings.

        Args:
            seed: another seed gives other texts.
            num_tokens: most tokens of one text; at least half of it is used.
            count_tokens: length of a text under the model's tokenizer [tokens].
            num_questions: look-ups at the end; more of them teach more per document.
        """
        self._seed, self._num_tokens = seed, num_tokens
        self._count_tokens, self._num_questions = count_tokens, num_questions

    def text(self, index: int) -> str:
        """Return text number ``index``."""
        rng = random.Random(f"long-recall/{self._seed}/{index}")
        wanted = rng.randint(self._num_tokens // 2, self._num_tokens - 1)
        pairs: dict[str, str] = {}
        lines: list[str] = []
        num_tokens = 0
        while True:
            is_pair = rng.random() < 0.4 or not pairs
            line = _pair_line(rng, pairs) if is_pair else _sentence(rng)
            # a pair may be asked for later: key, newline, key=value
            length = self._count_tokens(f"{line}\n")
            reserve = self._num_questions * 3 * self._count_tokens("bakofu=1234\n")
            if num_tokens + length + reserve > wanted and len(lines) > 2:
                break
            lines.append(line)
            num_tokens += length
        known = [line.split("=")[0] for line in lines if "=" in line]
        asked = [rng.choice(known) for _ in range(self._num_questions)]
        lines += [f"Repeat the line of this key:\n{key}\n{key}={pairs[key]}" for key in asked]
        return "\n".join(lines)


def _word(rng: random.Random, num_syllables: int = 3) -> str:
    return "".join(rng.choice("bdfgklmnprstvz") + rng.choice("aeiou") for _ in range(num_syllables))


def _path(rng: random.Random) -> str:
    return f"d{rng.randint(0, 9)}/n{rng.randint(10, 99)}"


def _pair_line(rng: random.Random, pairs: dict[str, str]) -> str:
    key = _word(rng)
    pairs.setdefault(key, str(rng.randint(1000, 9999)))
    return f"{key}={pairs[key]}"


def _sentence(rng: random.Random) -> str:
    nouns = ("name", "list", "file", "key", "data", "type", "code", "line", "path", "text", "node")
    verbs = ("reads", "writes", "holds", "opens", "returns", "follows", "needs", "keeps")
    return f"the {rng.choice(nouns)} {rng.choice(verbs)} the {rng.choice(nouns)}"


def _session(rng: random.Random) -> str:
    """Files that name the next one, as a terminal shows them."""
    lines: list[str] = []
    path = _path(rng)
    for _ in range(rng.randint(2, 5)):
        lines.append(f"cat {path}")
        path = _path(rng)
        lines.append(f"next: {path}")
    word = _word(rng)
    return "\n".join([*lines, f"cat {path}", f"code: {word}", f"code: {word}"])


def _listing(rng: random.Random) -> str:
    """A directory and paths into it."""
    directory = f"d{rng.randint(0, 9)}"
    names = sorted({f"n{rng.randint(10, 99)}" for _ in range(rng.randint(1, 5))})
    reads = rng.sample(names, min(2, len(names)))
    return "\n".join([f"ls {directory}", *names, *(f"cat {directory}/{name}" for name in reads)])


def _lookups(rng: random.Random) -> str:
    """Pairs, then some of them again by their key."""
    pairs: dict[str, str] = {}
    lines = [_pair_line(rng, pairs) for _ in range(rng.randint(2, 10))]
    asked = rng.choices(sorted(pairs), k=3)
    return "\n".join([*lines, *(f"{key}\n{key}={pairs[key]}" for key in asked)])


def _repeat(rng: random.Random) -> str:
    """A run of random words, twice."""
    words = " ".join(_word(rng, rng.randint(1, 3)) for _ in range(rng.randint(3, 12)))
    return f"{words}\n{words}"


def _reversal(rng: random.Random) -> str:
    """A numbered list, and its words from the last to the first."""
    words = [_word(rng, rng.randint(1, 2)) for _ in range(rng.randint(2, 6))]
    numbered = [f"{number} {word}" for number, word in enumerate(words, start=1)]
    return "\n".join([*numbered, ", ".join(reversed(words))])


def _sums(rng: random.Random) -> str:
    """Running sums of small numbers."""
    total = rng.randint(0, 9)
    lines: list[str] = []
    for _ in range(rng.randint(2, 6)):
        term, sign = rng.randint(0, 9), rng.choice((1, -1))
        lines.append(f"{total}{'+' if sign > 0 else '-'}{term}={total + sign * term}")
        total += sign * term
    return "\n".join([*lines, str(total)])


def _comparisons(rng: random.Random) -> str:
    """Which of two numbers is larger."""
    pairs = [(rng.randint(10, 99), rng.randint(10, 99)) for _ in range(rng.randint(2, 6))]
    return "\n".join(f"{a}{'<' if a < b else '>' if a > b else '='}{b}" for a, b in pairs)


_KINDS: Final = (_session, _listing, _lookups, _repeat, _reversal, _sums, _comparisons)
