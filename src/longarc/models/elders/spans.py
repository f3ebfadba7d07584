"""Which tokens of a text become blanks. No torch: data preparation uses it.

A span is ``(start, end)``, end exclusive. Spans of one text are in order and do not overlap.

Source: GLM, arXiv:2103.10360, sections 2.1 and 2.2; the placing of short spans is that of its published code.
"""

import math
import random
from collections.abc import Sequence
from itertools import pairwise
from typing import TypeAlias

from longarc.errors import ContractError

Span: TypeAlias = tuple[int, int]

MAX_SPAN_TOKENS = 39
"""The published code draws lengths of 1 to 39; Poisson(3) gives more with a probability below 1e-30."""


def short_spans(
    num_tokens: int, *, rng: random.Random, masked_frac: float = 0.15, mean_length: float = 3.0
) -> list[Span]:
    """Draw short spans until they hold ``masked_frac`` of the tokens, at least one token in all.

    Lengths follow a Poisson distribution without zero. Between two spans there is at least one visible
    token, and at least one token of the text stays visible: where the text is too short for more spans,
    fewer are drawn.

    Args:
        num_tokens: length of the text [tokens], at least 2.
        rng: draws lengths and places.
        masked_frac: share of the tokens to reach, in (0, 1); 0.15 in GLM.
        mean_length: mean of the Poisson distribution [tokens]; 3 in GLM.

    Raises:
        ContractError: a number is out of range.
    """
    if num_tokens < 2:
        raise ContractError(
            f"a text of {num_tokens} tokens cannot have a blank and a visible token; it needs at least 2"
        )
    _check_open_frac("masked_frac", masked_frac)
    if not 0 < mean_length < math.inf:
        raise ContractError(f"mean_length = {mean_length} is not a length; choose more than 0")
    target = max(1, int(masked_frac * num_tokens))
    lengths: list[int] = []
    while (masked := sum(lengths)) < target:
        # Visible tokens have to remain for the gaps between all spans, this one included.
        room = num_tokens - masked - max(1, len(lengths))
        if room < 1:
            break
        lengths.append(_positive_poisson(mean_length, min(room, MAX_SPAN_TOKENS), rng))
    return _placed(lengths, num_tokens, rng)


def whole_sentences(
    sentence_starts: Sequence[int],
    num_tokens: int,
    *,
    rng: random.Random,
    masked_frac: float = 0.15,
) -> list[Span]:
    """Draw sentences until they hold ``masked_frac`` of the tokens; each becomes a blank of its own.

    At least one sentence stays visible.

    Args:
        sentence_starts: index of the first token of each sentence, ascending from 0; at least 2.
        num_tokens: length of the text [tokens].
        rng: draws the sentences.
        masked_frac: share of the tokens to reach, in (0, 1).

    Raises:
        ContractError: the starts are not those of at least two sentences, or a number is out of range.
    """
    _check_open_frac("masked_frac", masked_frac)
    sentences = list(pairwise([*sentence_starts, num_tokens]))
    if len(sentences) < 2 or sentences[0][0] != 0 or any(end <= start for start, end in sentences):
        raise ContractError(
            f"sentence starts {list(sentence_starts)} do not divide a text of {num_tokens} tokens; they "
            f"ascend from 0, stay below the length, and are at least two"
        )
    chosen: list[Span] = []
    order = rng.sample(sentences, len(sentences))
    while order[1:] and sum(end - start for start, end in chosen) < masked_frac * num_tokens:
        chosen.append(order.pop(0))
    return sorted(chosen)


def long_suffix(num_tokens: int, *, rng: random.Random, min_frac: float = 0.5) -> Span:
    """Draw the end of the text, to be generated from its beginning.

    Its length is uniform from ``min_frac`` of the text to all of it but two tokens, so that the example,
    which adds a mask and loses none of the text, has a context.

    Args:
        num_tokens: length of the text [tokens], at least 3.
        rng: draws the length.
        min_frac: shortest suffix as a share of the text, in (0, 1); 0.5 in GLM.

    Raises:
        ContractError: the text is too short, or ``min_frac`` is out of range.
    """
    if num_tokens < 3:
        raise ContractError(
            f"a text of {num_tokens} tokens has no beginning to generate from; it needs at least 3"
        )
    _check_open_frac("min_frac", min_frac)
    longest = num_tokens - 2
    shortest = min(max(1, int(min_frac * num_tokens)), longest)
    return num_tokens - rng.randint(shortest, longest), num_tokens


def _positive_poisson(mean: float, longest: int, rng: random.Random) -> int:
    """Draw from a Poisson distribution restricted to 1..longest."""
    lengths = range(1, longest + 1)
    log_weights = [k * math.log(mean) - math.lgamma(k + 1) for k in lengths]
    highest = max(log_weights)
    return rng.choices(lengths, [math.exp(weight - highest) for weight in log_weights])[0]


def _placed(lengths: list[int], num_tokens: int, rng: random.Random) -> list[Span]:
    """Place spans in random order at random, with a visible token between neighbours."""
    rng.shuffle(lengths)
    num_gaps = num_tokens - sum(lengths) - len(lengths) + 1
    offsets = sorted(rng.randint(0, num_gaps) for _ in lengths)
    spans, shift = [], 0
    for offset, length in zip(offsets, lengths, strict=True):
        spans.append((offset + shift, offset + shift + length))
        shift += length + 1
    return spans


def _check_open_frac(name: str, value: float) -> None:
    if not 0 < value < 1:
        raise ContractError(f"{name} = {value} is not a share; choose more than 0 and less than 1")
