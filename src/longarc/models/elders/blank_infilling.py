"""Texts with blanks, and the blanks' content to generate: GLM's pre-training objective. No torch.

::

    text            a b c d e f g          spans (2, 3) and (4, 6); Part B has them in random order
    Part A          a b M d M g            sees all of Part A
    Part B                      S e f  S c        sees Part A and what is before it in Part B
    targets                     e f E  c E        E is never an input
    positions       0 1 2 3 4 5 4 4 4  2 2        in Part A; a blank's tokens stand at its mask
    block positions 0 0 0 0 0 0 1 2 3  1 2        in the blank; 0 in Part A

    M mask, S start of a piece <sop>, E end of a piece <eop>

Source: GLM, arXiv:2103.10360, section 2.1 (Parts A and B, order, 2-D positions), 2.2 (kinds of blanks).
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise

from longarc.errors import ContractError
from longarc.models.elders.spans import Span, long_suffix, short_spans, whole_sentences


class BlankKind(StrEnum):
    """Which tokens of a text are left out."""

    SHORT = "short"
    """Short spans, each a [MASK]: for understanding."""
    SENTENCE = "sentence"
    """Whole sentences, each an [sMASK]: for generating a sentence or paragraph."""
    SUFFIX = "suffix"
    """The second part of the text, one [gMASK]: for generating long text."""


GLM_130B_SHARES: Mapping[BlankKind, float] = {BlankKind.SHORT: 0.3, BlankKind.SUFFIX: 0.7}
"""How often GLM-130B used which kind. Source: GLM-130B, arXiv:2210.02414, section 2.2."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InfillingIds:
    """Token ids with a role in blank infilling."""

    mask: int
    """[MASK], a short span."""
    sentence_mask: int
    """[sMASK], a sentence."""
    generation_mask: int
    """[gMASK], the rest of the text."""
    start: int
    """<sop>, the input at which a blank's first token is predicted."""
    end: int
    """<eop>, predicted behind a blank's last token."""

    def mask_of(self, kind: BlankKind) -> int:
        """Return the mask that stands for a blank of this kind."""
        match kind:
            case BlankKind.SHORT:
                return self.mask
            case BlankKind.SENTENCE:
                return self.sentence_mask
            case BlankKind.SUFFIX:
                return self.generation_mask


@dataclass(frozen=True, slots=True, kw_only=True)
class InfillingExample:
    """Part A and Part B of one text. All fields but the last have one length L."""

    token_ids: tuple[int, ...]
    """Inputs."""
    target_ids: tuple[int, ...]
    """What is predicted at each input; in Part A, where nothing is, the input itself."""
    train_mask: tuple[bool, ...]
    """True in Part B."""
    positions: tuple[int, ...]
    """Place in Part A; everything of a blank stands at its mask."""
    block_positions: tuple[int, ...]
    """Place in the blank, from 1; 0 in Part A."""
    num_context_tokens: int
    """Length of Part A [tokens]."""


def draw_example(
    token_ids: Sequence[int],
    *,
    ids: InfillingIds,
    shares: Mapping[BlankKind, float],
    rng: random.Random,
    sentence_starts: Sequence[int] = (),
) -> InfillingExample:
    """Leave blanks of a random kind in a text.

    Args:
        token_ids: the text.
        ids: masks and delimiters.
        shares: how often each kind is drawn, relative to the others; ``GLM_130B_SHARES`` for one.
        rng: draws kind, spans and their order.
        sentence_starts: index of the first token of each sentence; needed for blanks of that kind.

    Raises:
        ContractError: the text is too short for the kind that was drawn, or the shares or sentence
            starts are none.
    """
    if min(shares.values(), default=0) < 0 or not sum(shares.values()) > 0:
        raise ContractError(
            f"shares {dict(shares)} say of no kind of blank how often it is drawn; none may be negative, "
            f"one has to be more than 0"
        )
    kind = rng.choices(list(shares), list(shares.values()))[0]
    match kind:
        case BlankKind.SHORT:
            spans = short_spans(len(token_ids), rng=rng)
        case BlankKind.SENTENCE:
            spans = whole_sentences(sentence_starts, len(token_ids), rng=rng)
        case BlankKind.SUFFIX:
            suffix = long_suffix(len(token_ids), rng=rng)
            return suffix_example(token_ids, suffix[0], mask_id=ids.mask_of(kind), ids=ids)
    return blanks_example(token_ids, spans, mask_id=ids.mask_of(kind), ids=ids, rng=rng)


def blanks_example(
    token_ids: Sequence[int],
    spans: Sequence[Span],
    *,
    mask_id: int,
    ids: InfillingIds,
    rng: random.Random,
) -> InfillingExample:
    """Replace each span by one mask, and append the spans in random order, each to be generated.

    Raises:
        ContractError: there are no spans, or they are empty, overlap or leave the text.
    """
    _check_spans(spans, len(token_ids))
    context: list[int] = []
    blanks: list[tuple[int, Sequence[int]]] = []
    visible_from = 0
    for start, end in spans:
        context.extend(token_ids[visible_from:start])
        blanks.append((len(context), token_ids[start:end]))
        context.append(mask_id)
        visible_from = end
    context.extend(token_ids[visible_from:])
    # Random order, so that every blank is generated with and without knowing each of the others.
    rng.shuffle(blanks)
    return _joined(
        context,
        [(place, [ids.start, *content], [*content, ids.end]) for place, content in blanks],
    )


def suffix_example(
    token_ids: Sequence[int], start: int, *, mask_id: int, ids: InfillingIds
) -> InfillingExample:
    """Replace everything from ``start`` by one mask, and append it, to be generated.

    No <eop> is predicted: the text of a training sequence is cut at a length, and does not end there.

    Raises:
        ContractError: ``start`` leaves nothing to generate.
    """
    _check_spans([(start, len(token_ids))], len(token_ids))
    suffix = token_ids[start:]
    context = [*token_ids[:start], mask_id]
    return _joined(context, [(start, [ids.start, *suffix[:-1]], suffix)])


def _joined(
    context: Sequence[int], blanks: Sequence[tuple[int, Sequence[int], Sequence[int]]]
) -> InfillingExample:
    """Join Part A and blanks, each given by the place of its mask, its inputs and its targets."""
    token_ids, target_ids = list(context), list(context)
    positions, block_positions = list(range(len(context))), [0] * len(context)
    for place, inputs, targets in blanks:
        token_ids.extend(inputs)
        target_ids.extend(targets)
        positions.extend([place] * len(inputs))
        block_positions.extend(range(1, len(inputs) + 1))
    return InfillingExample(
        token_ids=tuple(token_ids),
        target_ids=tuple(target_ids),
        train_mask=tuple(index >= len(context) for index in range(len(token_ids))),
        positions=tuple(positions),
        block_positions=tuple(block_positions),
        num_context_tokens=len(context),
    )


def _check_spans(spans: Sequence[Span], num_tokens: int) -> None:
    edges = [0, *(edge for span in spans for edge in span), num_tokens]
    is_empty = not spans or any(start >= end for start, end in spans)
    if is_empty or any(left > right for left, right in pairwise(edges)):
        raise ContractError(
            f"spans {list(spans)} are no blanks of a text of {num_tokens} tokens; each is (start, end) with "
            f"start < end, they ascend without overlap, and there is at least one"
        )
