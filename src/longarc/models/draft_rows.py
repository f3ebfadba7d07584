"""Which rows of a packed layout each depth of multi-token prediction computes, and what they attend to.

A draft of depth d reads d tokens behind position i and predicts the one after them. Its place is the row of
the last token that it reads::

    position        i        i+1        ...      i+d            i+d+1
    row             first    of depth 1          of depth d     predicted
    main model      h_i                          decides on the draft: it predicts the same token

Seen so, every token but the first of a sequence has exactly one draft of depth 1, also where sequences share
a beginning and go on differently; and a draft predicts what the main model's state of its own row predicts.
So the targets of the main loss are those of every depth, and none can cross the end of a document.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from longarc.models.layout import Layout, Span
from longarc.models.plan import AttentionPlan, QueryRun


@dataclass(frozen=True, slots=True)
class DraftRows:
    """The drafts of one depth, in packed order."""

    rows: Int[Tensor, " drafts"]
    """Row of the last token that each reads."""
    before: Int[Tensor, " drafts"]
    """Row of the token before that one: there lies what this depth goes on from."""
    first: Int[Tensor, " drafts"]
    """Which draft of depth 1 each goes back to: its own keys and those before it are attended to."""
    positions: Int[Tensor, " drafts"]
    """Position i of the main model's state that each goes back to."""
    plan: AttentionPlan
    """Attention to the drafts of depth 1, which are the rows of the table."""


def draft_rows(layout: Layout, *, num_depths: int, device: torch.device) -> list[DraftRows]:
    """Return the drafts of each depth; the list ends where no sequence is long enough for another one."""
    position_N, before_N = layout.position_ids(), _rows_before(layout)
    place_N = (position_N >= 1).cumsum(0) - 1  # of a row among the drafts of depth 1
    keys = _layout_of_first_drafts(layout)
    if keys is None:
        return []
    first_runs = AttentionPlan.of_layout(keys, device).runs
    depths: list[DraftRows] = []
    start_N = torch.arange(len(position_N))  # row of the draft of depth 1, from that of depth d
    for depth in range(1, num_depths + 1):
        rows = (position_N >= depth).nonzero()[:, 0]
        if len(rows) == 0:
            break
        depths.append(
            DraftRows(
                rows=rows.to(device),
                before=before_N[rows].to(device),
                first=place_N[start_N[rows]].to(device),
                positions=(position_N[rows] - depth).to(device),
                plan=AttentionPlan(_runs(first_runs, depth)),
            )
        )
        start_N = before_N[start_N]
    return depths


def _rows_before(layout: Layout) -> Tensor:
    """Return the row of the token before each; that of a first token is its own."""
    offsets = layout.offsets()
    before_N = torch.arange(layout.num_tokens) - 1
    for span, offset in zip(layout.spans, offsets, strict=True):
        before_N[offset] = (
            offset
            if span.parent is None
            else offsets[span.parent] + layout.spans[span.parent].length - 1
        )
    return before_N


def _layout_of_first_drafts(layout: Layout) -> Layout | None:
    """Return the same forest without the first token of each sequence; None where nothing is left."""
    spans: list[Span] = []
    place: list[int | None] = []
    for span in layout.spans:
        parent = None if span.parent is None else place[span.parent]
        length = span.length - (span.parent is None)
        if length:
            place.append(len(spans))
            spans.append(Span(length, parent))
        else:
            place.append(None)  # a prompt of one token: what continues it starts the table
    return Layout(tuple(spans)) if spans else None


def _runs(first: tuple[QueryRun, ...], depth: int) -> tuple[QueryRun, ...]:
    """Return the runs of a depth: each query sees the keys up to the draft of depth 1 it goes back to."""
    runs: list[QueryRun] = []
    num_queries = 0
    for run in first:
        # The tokens of the run lie one position behind its queries'; those before `depth` have no draft.
        missing = max(0, depth - 1 - run.first_position)
        if run.num_queries <= missing:
            continue
        count, position = run.num_queries - missing, run.first_position + missing - (depth - 1)
        keys = run.key_rows
        num_keys = position + count
        runs.append(
            QueryRun(
                num_queries,
                count,
                position,
                slice(keys.start, keys.start + num_keys)
                if isinstance(keys, slice)
                else keys[:num_keys],
            )
        )
        num_queries += count
    return tuple(runs)
