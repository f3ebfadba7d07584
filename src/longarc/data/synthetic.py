"""Generated text in which the next token can be copied from far before.

Real text teaches copying slowly, because guessing pays there too. In these texts names and numbers are
random, so that nothing but looking them up predicts their second occurrence; a small model then grows
the circuits that every later task (files, recall, tools) builds on within minutes.
"""

import random
from collections.abc import Callable
from typing import Final

from longarc.tokens.words import CODE_WORDS, DIRECTORIES, FILE_IDS, FILE_NAMES, WORDS


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
        pairs = {key: str(rng.randint(10, 99)) for key in rng.sample(WORDS, rng.randint(16, 48))}
        asked = [rng.choice(sorted(pairs)) for _ in range(self._num_questions)]
        questions = [f"Repeat the line of this key:\n{key}\n{key}={pairs[key]}" for key in asked]
        lines = [f"{key}={value}" for key, value in pairs.items()]
        num_tokens = sum(self._count_tokens(f"{line}\n") for line in lines + questions)
        while True:
            line = _sentence(rng)
            num_tokens += self._count_tokens(f"{line}\n")
            if num_tokens > wanted:
                break
            lines.append(line)
        rng.shuffle(lines)
        return "\n".join(lines + questions)


def _path(rng: random.Random) -> str:
    return f"{rng.choice(DIRECTORIES)}/{rng.choice(FILE_NAMES)}"


def _sentence(rng: random.Random) -> str:
    verbs = ("returns", "calls", "has", "contains")
    return f"the {rng.choice(WORDS)} {rng.choice(verbs)} the {rng.choice(WORDS)}"


def _session(rng: random.Random) -> str:
    """Files that name the next one, as a terminal shows them."""
    lines: list[str] = []
    path = _path(rng)
    for _ in range(rng.randint(2, 5)):
        lines.append(f"cat {path}")
        path = _path(rng)
        if rng.random() < 0.3:
            file_id = rng.choice(FILE_IDS)
            lines += [f"find: id={file_id}", f"grep -rl ^id={file_id} *", path]
        else:
            lines.append(f"next: {path}")
    code = "-".join(rng.choice(words) for words in CODE_WORDS)
    return "\n".join([*lines, f"cat {path}", f"code: {code}", f"code: {code}"])


def _listing(rng: random.Random) -> str:
    """A directory and paths into it."""
    directory, names = rng.choice(DIRECTORIES), rng.sample(FILE_NAMES, rng.randint(1, 5))
    reads = rng.sample(names, min(2, len(names)))
    return "\n".join([f"ls {directory}", *sorted(names), *(f"cat {directory}/{n}" for n in reads)])


def _lookups(rng: random.Random) -> str:
    """Pairs, then some of them again by their key."""
    pairs = {key: rng.randint(10, 99) for key in rng.sample(WORDS, rng.randint(2, 10))}
    asked = rng.choices(sorted(pairs), k=4)
    lines = [f"{key}={value}" for key, value in pairs.items()]
    return "\n".join([*lines, *(f"{key}\n{key}={pairs[key]}" for key in asked)])


def _repeat(rng: random.Random) -> str:
    """A run of random words or digits, several times."""
    joiner = rng.choice((" ", ",", "\n", "/"))
    run = joiner.join(rng.sample(WORDS, rng.randint(2, 8)))
    if rng.random() < 0.3:
        run = str(rng.randint(10**5, 10**9))
    return "\n".join([run] * rng.randint(2, 4))


def _reversal(rng: random.Random) -> str:
    """A numbered list, and its words from the last to the first."""
    words = rng.sample(WORDS, rng.randint(2, 6))
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


def _chains(rng: random.Random) -> str:
    """A sum, and its terms taken one by one."""
    terms = [rng.randint(0, 9) for _ in range(rng.randint(2, 4))]
    signs = [rng.choice("+-") for _ in terms[1:]]
    question = " ".join(
        [str(terms[0]), *(f"{s} {t}" for s, t in zip(signs, terms[1:], strict=True))]
    )
    total, lines = terms[0], [f"{question} ="]
    for sign, term in zip(signs, terms[1:], strict=True):
        result = total + term if sign == "+" else total - term
        lines.append(f"{total}{sign}{term}={result}")
        total = result
    return "\n".join([*lines, str(total)])


def _comparisons(rng: random.Random) -> str:
    """Which of two numbers is larger."""
    low, high = rng.choice(((0, 9), (10, 99)))
    pairs = [(rng.randint(low, high), rng.randint(low, high)) for _ in range(rng.randint(2, 6))]
    return "\n".join(f"{a}{'<' if a < b else '>' if a > b else '='}{b}" for a, b in pairs)


_KINDS: Final = (
    *(_session, _session, _listing, _lookups, _repeat),
    *(_reversal, _sums, _sums, _sums, _chains, _chains, _comparisons),
)
