"""The tokenizer of a GGUF file as a Hugging Face ``tokenizer.json``.

A GGUF file lists tokens and merges, and names the rule by which text is cut before merging; what the rule is, only
llama.cpp's source says. Source: llama.cpp, ``llama-vocab.cpp``, pre-tokenizer "smollm".
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final

from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as HfTokenizer

from longarc.errors import CheckpointError, boundary
from longarc.tokens.tokenizer import Tokenizer


class TokenType(IntEnum):
    """What llama.cpp takes a token for; those it has besides belong to other tokenizers."""

    NORMAL = 1
    CONTROL = 3
    USER_DEFINED = 4


_MODEL: Final = "gpt2"
"""llama.cpp's name for byte-level BPE."""
_RULE: Final = "smollm"


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufVocabulary:
    """What a GGUF file says of its tokenizer, ``tokenizer.ggml.*``."""

    model: str
    """The kind of tokenizer."""
    rule: str
    """How text is cut before merging, ``tokenizer.ggml.pre``."""
    tokens: Sequence[str]
    """By id, in the byte-level alphabet."""
    types: Sequence[int]
    """A ``TokenType`` for each token."""
    merges: Sequence[str]
    """Two tokens each, first merge first."""


def tokenizer_of(vocabulary: GgufVocabulary) -> Tokenizer:
    """Build the tokenizer.

    Raises:
        CheckpointError: it is of a kind that is not rewritten, or its lists do not fit together.
    """
    if vocabulary.model != _MODEL or vocabulary.rule != _RULE:
        raise CheckpointError(
            f"the GGUF file's tokenizer is {vocabulary.model!r} with rule {vocabulary.rule!r}; only {_MODEL!r} with "
            f"{_RULE!r} is rewritten. Take the tokenizer.json of the checkpoint in Hugging Face format"
        )
    known = set(TokenType)
    unknown = sorted({kind for kind in vocabulary.types if kind not in known})
    if len(vocabulary.tokens) != len(vocabulary.types) or unknown:
        raise CheckpointError(
            f"the GGUF file has {len(vocabulary.tokens)} tokens and {len(vocabulary.types)} types of tokens, of which "
            f"{unknown} are unknown; known are {sorted(map(int, known))}. Copy the file again"
        )
    ids = {token: i for i, token in enumerate(vocabulary.tokens)}
    if len(ids) != len(vocabulary.tokens):
        raise CheckpointError(
            f"the GGUF file lists {len(vocabulary.tokens)} tokens, of which {len(ids)} are different; copy it again"
        )
    with boundary(CheckpointError, "the merges of the GGUF file are not those of its tokens"):
        bpe = models.BPE(vocab=ids, merges=[_pair(merge) for merge in vocabulary.merges])
    inner = HfTokenizer(bpe)
    # Digits stand alone; then GPT-2's rule, in which a word takes the blank before it along.
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    inner.decoder = decoders.ByteLevel()
    for token, kind in zip(vocabulary.tokens, vocabulary.types, strict=True):
        if kind != TokenType.NORMAL:
            special = kind == TokenType.CONTROL
            added = AddedToken(token, normalized=False, special=special)
            inner.add_special_tokens([added]) if special else inner.add_tokens([added])
    return Tokenizer(inner)


def tokenizer_config(
    vocabulary: GgufVocabulary,
    *,
    special_ids: dict[str, int],
    chat_template: str,
    max_tokens: int,
) -> dict[str, Any]:
    """Return the content of ``tokenizer_config.json``, which transformers reads beside the tokenizer.

    Args:
        vocabulary: what the ids mean.
        special_ids: ids by name: ``bos_token``, ``eos_token``, ...
        chat_template: Jinja, as the file has it.
        max_tokens: longest context [tokens].
    """
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{name: vocabulary.tokens[i] for name, i in special_ids.items()},
        "chat_template": chat_template,
        "model_max_length": max_tokens,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
    }


def _pair(merge: str) -> tuple[str, str]:
    left, blank, right = merge.partition(" ")
    if not (left and blank and right):
        raise CheckpointError(
            f"merge {merge!r} of the GGUF file is not two tokens and a blank between them; copy the file again"
        )
    return left, right
