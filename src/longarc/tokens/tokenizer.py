"""Tokenizers: text to ids and back, losslessly, with control tokens that text cannot forge.

A thin wrapper around Hugging Face's ``tokenizers`` (BPE in Rust; importing it reaches no network).
Two things are added. ``encode`` treats its argument as data: the string ``<|user|>`` in a file that
an agent reads becomes ordinary tokens, and only a chat format places control ids. And ``decode`` of a
byte-level model joins bytes, so that any sequence of ids has an exact byte string.
"""

import hashlib
import os
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Final

import orjson
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as HfTokenizer

from longarc.errors import CheckpointError, ConfigError, boundary
from longarc.runs.files import write_atomically

GLM_SPECIAL_TOKENS: Final = (
    "<|endoftext|>",
    "[gMASK]",
    "<sop>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|observation|>",
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<arg_key>",
    "</arg_key>",
    "<arg_value>",
    "</arg_value>",
)
"""GLM-5's control tokens, in the order of their ids in a trained tokenizer."""

_NUM_BYTES: Final = 256

_PRE_TOKENS: Final = (
    r"\p{Lu}+(?!\p{Ll})"  # HTTP of HTTPServer
    r"|\p{Lu}?\p{Ll}+"  # Server, lower
    r"|[\p{L}\p{M}]+"  # scripts without case
    r"|\p{N}"  # one digit
    r"|\s+"  # never glued to a word
    r"|([^\p{L}\p{M}\p{N}\s])\1*"  # one punctuation mark, or a run of the same one
)
"""Pre-tokens are merged apart from each other, so the spelling of a name never depends on what stands
before it: ``data/k3f9.txt`` is data / k 3 f 9 . txt after a space, a quote or a newline alike. A small
model can then copy names token by token, without learning which spellings mean the same text."""


_NO_TEXT = "\N{REPLACEMENT CHARACTER}".encode()
"""What an id without a token reads as."""


def _byte_of_char() -> dict[str, int]:
    """Return the byte that each character of the byte-level alphabet stands for.

    Printable Latin-1 characters stand for themselves; the other bytes, ascending, take code points
    from 256 on.
    """
    own = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    shifted = sorted(set(range(_NUM_BYTES)) - set(own))
    return {chr(b): b for b in own} | {
        chr(_NUM_BYTES + position): b for position, b in enumerate(shifted)
    }


_CACHED_TEXTS = 2048
"""Texts whose ids are remembered."""


class Tokenizer:
    """A tokenizer whose control tokens can only be placed on purpose."""

    def __init__(self, inner: HfTokenizer) -> None:
        state = orjson.loads(inner.to_str())
        self._digest = hashlib.sha256(_canonical(state)).hexdigest()
        self._inner = inner
        self._plain = _without_control_tokens(state)
        self._special: dict[str, int] = {
            token["content"]: token["id"] for token in state["added_tokens"] if not _is_text(token)
        }
        self._special_ids = frozenset(self._special.values())
        vocabulary = inner.get_vocab(with_added_tokens=True)
        self._vocab_size = max(vocabulary.values()) + 1
        added = {token["content"] for token in state["added_tokens"]}
        # Rollouts say the same again and again: one system prompt, a group's one question.
        self._encoded = lru_cache(maxsize=_CACHED_TEXTS)(self._encode)
        self._bytes = _byte_table(vocabulary, added, self._vocab_size, state)

    @classmethod
    def train(
        cls,
        texts: Iterable[str],
        *,
        vocab_size: int,
        special_tokens: Sequence[str] = GLM_SPECIAL_TOKENS,
    ) -> "Tokenizer":
        """Train a byte-level BPE of exactly ``vocab_size`` ids; equal texts give an equal tokenizer.

        All 256 bytes are tokens, so any text has a spelling. Control tokens take the last ids.

        Args:
            texts: the corpus, in pieces of any size.
            vocab_size: size of the vocabulary, control tokens included [tokens].
            special_tokens: the control tokens, in the order of their ids.

        Raises:
            ConfigError: ``vocab_size`` has no room for bytes and control tokens, or the texts are
                too short to fill it.
        """
        least = _NUM_BYTES + len(special_tokens)
        if vocab_size < least:
            raise ConfigError(
                f"vocab_size={vocab_size} is too small: 256 bytes and {len(special_tokens)} control "
                f"tokens need at least {least}"
            )
        inner = HfTokenizer(models.BPE())
        inner.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(_PRE_TOKENS), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        inner.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size - len(special_tokens),
            initial_alphabet=sorted(_byte_of_char()),
            special_tokens=[],
            show_progress=False,
        )
        inner.train_from_iterator((_unicode(text) for text in texts), trainer=trainer)
        num_learned = inner.get_vocab_size() + len(special_tokens)
        if num_learned != vocab_size:
            raise ConfigError(
                f"vocab_size={vocab_size} cannot be filled: these texts yield {num_learned} tokens. "
                f"Give more text or set vocab_size={num_learned} or less"
            )
        inner.add_special_tokens(
            [AddedToken(token, normalized=False, special=True) for token in special_tokens]
        )
        return cls(inner)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Tokenizer":
        """Read a ``tokenizer.json``, or the one in a directory.

        Raises:
            CheckpointError: it is missing, truncated or not a tokenizer.
        """
        file = Path(path)
        if file.is_dir():
            file = file / "tokenizer.json"
        if not file.is_file():
            raise CheckpointError(
                f"no tokenizer at {file}: give a tokenizer.json or a directory that holds one"
            )
        with boundary(CheckpointError, f"{file} is not a readable tokenizer.json"):
            return cls(HfTokenizer.from_str(file.read_text(encoding="utf-8")))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the tokenizer as a Hugging Face ``tokenizer.json``, all or nothing.

        Raises:
            ResourceError: the disk is full or the place is not writable.
        """
        write_atomically(Path(path), self._inner.to_str(pretty=True).encode())

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, which never hold a control token whatever the text says.

        A lone surrogate, which is not text, counts as U+FFFD.
        """
        return list(self._encoded(text))

    def encode_with_control(self, text: str) -> list[int]:
        """Return the ids of a text in which spellings of control tokens are control tokens.

        For text that a program wrote, never for what people, models or tools say.
        """
        ids: list[int] = self._inner.encode(_unicode(text), add_special_tokens=False).ids
        return ids

    def _encode(self, text: str) -> tuple[int, ...]:
        ids: list[int] = self._plain.encode(_unicode(text), add_special_tokens=False).ids
        if not self._special_ids.isdisjoint(ids):
            # Only a vocabulary that lists its control tokens twice gets here; single characters cannot match one.
            return tuple(i for char in _unicode(text) for i in self._plain.encode(char).ids)
        return tuple(ids)

    def decode(self, token_ids: Sequence[int], *, keep_special: bool = False) -> str:
        """Return the text of some ids; bytes that are not UTF-8 become U+FFFD.

        Args:
            token_ids: any ids of the vocabulary, cut anywhere.
            keep_special: whether control tokens appear as text or are left out.
        """
        if self._bytes is None:
            text: str = self._inner.decode(list(token_ids), skip_special_tokens=not keep_special)
            return text
        if not keep_special:
            token_ids = [i for i in token_ids if i not in self._special_ids]
        return self.decode_bytes(token_ids).decode("utf-8", errors="replace")

    def decode_bytes(self, token_ids: Sequence[int]) -> bytes:
        """Return the exact bytes of some ids, control tokens as their text.

        Many models have more rows in their embedding than their tokenizer has ids, and can sample one of those:
        such an id reads as U+FFFD, which is the policy's mistake and no reason to stop.

        Raises:
            ConfigError: the tokenizer is not byte-level.
        """
        if self._bytes is None:
            raise ConfigError("this tokenizer is not byte-level; use decode")
        try:
            return b"".join([self._bytes[i] for i in token_ids])
        except IndexError:
            known = self._bytes
            return b"".join([known[i] if i < len(known) else _NO_TEXT for i in token_ids])

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of one id, a control token as its text."""
        if self._bytes is None:
            return self.decode([token_id], keep_special=True).encode()
        return self.decode_bytes((token_id,))

    def special_id(self, token: str) -> int:
        """Return the id of a control token.

        Raises:
            CheckpointError: the vocabulary has no such token.
        """
        if token not in self._special:
            raise CheckpointError(
                f"the tokenizer has no control token {token!r}; it has {sorted(self._special)}. "
                f"Choose the chat format that belongs to this tokenizer"
            )
        return self._special[token]

    @property
    def special_tokens(self) -> dict[str, int]:
        """The control tokens and their ids."""
        return dict(self._special)

    @property
    def is_byte_level(self) -> bool:
        """Whether each id has bytes of its own, so that text can be decoded id by id."""
        return self._bytes is not None

    @property
    def vocab_size(self) -> int:
        """Largest id plus one [tokens]."""
        return self._vocab_size

    @property
    def digest(self) -> str:
        """SHA-256 of the canonical JSON: equal digests mean equal ids for every text."""
        return self._digest


def _canonical(state: object) -> bytes:
    return orjson.dumps(state, option=orjson.OPT_SORT_KEYS)


def _unicode(text: str) -> str:
    return (
        text
        if text.isascii()
        else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    )


def _is_text(added_token: dict[str, object]) -> bool:
    """Some vocabularies keep runs of blanks as added tokens; they are text, not control."""
    return not added_token["special"] and str(added_token["content"]).isspace()


def _without_control_tokens(state: dict[str, object]) -> HfTokenizer:
    """Return the same tokenizer as if no text could spell a control token."""
    added = state["added_tokens"]
    assert isinstance(added, list)
    plain = state | {"added_tokens": [t for t in added if _is_text(t)], "post_processor": None}
    return HfTokenizer.from_str(orjson.dumps(plain).decode())


def _byte_table(
    vocabulary: dict[str, int], added: set[str], vocab_size: int, state: dict[str, object]
) -> list[bytes] | None:
    """Return the bytes of every id, or None where the model does not work on bytes."""
    if b"ByteLevel" not in orjson.dumps(state["decoder"]):
        return None
    byte_of_char = _byte_of_char()
    table = [b""] * vocab_size
    for token, token_id in vocabulary.items():
        if token in added or any(char not in byte_of_char for char in token):
            table[token_id] = token.encode()
        else:
            table[token_id] = bytes(byte_of_char[char] for char in token)
    return table
