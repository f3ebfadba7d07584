"""Real text that every CPython brings along: the sources of its standard library and its documentation.

Nothing is downloaded, and two machines with one interpreter read the same bytes in the same order,
which the digest proves. Files, not passages, are held out, so that no held-out passage has its
neighbours in training.
"""

import ast
import hashlib
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from longarc.errors import ConfigError, ResourceError

HELD_OUT_ONE_IN: Final = 20
"""One file in this many is held out."""
_SKIPPED: Final = frozenset(
    # tests repeat themselves, encodings and lib2to3 fixtures are tables; the rest is not the library
    ("test", "tests", "idle_test", "encodings", "site-packages", "dist-packages", "__pycache__")
)
_TOPICS: Final = "pydoc_data/topics.py"
_LEAST_BYTES: Final = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """Texts in a fixed order."""

    names: tuple[str, ...]
    """Where each text is from: a path in the library, or ``topics/NAME`` for documentation."""
    texts: tuple[str, ...]
    digest: str
    """SHA-256 over names and texts: equal digests mean equal corpora."""
    num_bytes: int


def read_corpus(
    *,
    max_bytes: int,
    split: Literal["train", "held_out"] = "train",
    seed: int = 0,
    root: Path | None = None,
) -> Corpus:
    """Read text up to ``max_bytes``, in an order that ``seed`` shuffles.

    Args:
        max_bytes: the first file that would pass this bound ends the reading [bytes].
        split: one file in twenty is ``held_out``, whatever the seed.
        seed: another seed gives another order, and with a small bound other files.
        root: a directory of Python sources; None means the interpreter's library.

    Raises:
        ConfigError: the bound holds no file.
        ResourceError: the interpreter came without its sources.
    """
    base = Path(sysconfig.get_path("stdlib")) if root is None else root
    named = [
        (n, t)
        for n, t in _files(base)
        if t.strip() and (_rank(n) % HELD_OUT_ONE_IN == 0) == (split == "held_out")
    ]
    available = sum(len(text.encode()) for _, text in named)
    if root is None and split == "train" and available < _LEAST_BYTES:
        raise ResourceError(
            f"{base} holds only {available} bytes of Python source; install the interpreter with its "
            "standard library as files (Debian: libpython3-stdlib), or give another corpus"
        )
    named.sort(key=lambda item: hashlib.sha256(f"{seed}/{item[0]}".encode()).digest())

    names: list[str] = []
    texts: list[str] = []
    digest, num_bytes = hashlib.sha256(), 0
    for name, text in named:
        data = text.encode()
        if num_bytes + len(data) > max_bytes:
            break
        names.append(name)
        texts.append(text)
        num_bytes += len(data)
        digest.update(f"{name}\0{len(data)}\0".encode() + data)
    if not texts:
        raise ConfigError(f"max_bytes = {max_bytes} holds no file of the {split} corpus; raise it")
    return Corpus(
        names=tuple(names), texts=tuple(texts), digest=digest.hexdigest(), num_bytes=num_bytes
    )


def passages(corpus: Corpus, *, passage_bytes: int) -> tuple[str, ...]:
    """Cut the texts at line ends into passages of about ``passage_bytes``, which shuffle better."""
    cut: list[str] = []
    for text in corpus.texts:
        lines: list[str] = []
        length = 0
        for line in text.splitlines(keepends=True):
            lines.append(line)
            length += len(line.encode())
            if length >= passage_bytes:
                cut.append("".join(lines))
                lines, length = [], 0
        if lines:
            cut.append("".join(lines))
    return tuple(cut)


def _files(base: Path) -> Iterator[tuple[str, str]]:
    for path in sorted(base.rglob("*.py")):
        relative = path.relative_to(base)
        if _SKIPPED.intersection(relative.parts):
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:  # a few old modules declare another encoding
            continue
        if relative.as_posix() == _TOPICS:
            yield from _topics(text)
        else:
            yield relative.as_posix(), text


def _topics(source: str) -> Iterator[tuple[str, str]]:
    """The language reference that ``help()`` shows: a dict of texts in a generated module."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            for name, text in sorted(ast.literal_eval(node.value).items()):
                yield f"topics/{name}", str(text)


def _rank(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4])
