"""Drafts for sequences that are being sampled: what speculative decoding asks of the MTP layer.

::

    main model:  ... t_{i-1}  t_i  ->  h_i  ->  samples t_{i+1}
    draft        keys of depth 1 up to i go into the cache;  t_{i+2}, t_{i+3}, ... are drafted from h_i

The same layer and the same arithmetic as in training. Only depth 1 writes to the cache, from states of the main
model: what was drafted and not accepted leaves nothing behind.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from longarc.errors import ContractError
from longarc.models.cache import CacheShape, PagedCache
from longarc.models.decoder import GlmMoeDsa
from longarc.models.decoder_base import Attention
from longarc.models.layers import check_ids
from longarc.models.mtp import MultiTokenPredictor
from longarc.models.plan import AttentionPlan, QueryRun
from longarc.models.projection import project_logits

Choose = Callable[[Float[Tensor, "sequences vocab"]], Int[Tensor, " sequences"]]
"""Draws one token for each sequence from its logits."""


@dataclass(frozen=True, slots=True)
class Drafted:
    """What was drafted for each sequence."""

    token_ids: Int[Tensor, "sequences steps"]
    logits: Float[Tensor, "sequences steps vocab"]
    """What each token was drawn from; rejection sampling compares it with the main model's."""


def new_draft_cache(model: GlmMoeDsa, *, num_slots: int, max_length: int) -> PagedCache:
    """Return the cache of the MTP layer for as many sequences, beside the main model's cache."""
    weight = model.output_weight
    return PagedCache(
        model.cache_widths(),
        CacheShape(num_slots=num_slots, max_length=max_length),
        num_layers=1,
        dtype=weight.dtype,
        device=weight.device,
    )


@torch.no_grad()
def draft(
    model: GlmMoeDsa,
    hidden: Float[Tensor, "new hidden"],
    next_ids: Int[Tensor, " new"],
    slots: Sequence[int],
    starts: Sequence[int],
    counts: Sequence[int],
    cache: PagedCache,
    *,
    num_steps: int,
    choose: Choose,
    attention: Attention = "sparse",
) -> Drafted:
    """Take in the main model's new states and draft ``num_steps`` tokens behind the last of each sequence.

    Args:
        model: has an MTP layer.
        hidden: the main model's states of positions it has just computed, sequence after sequence.
        next_ids: the token behind each of these positions; the last one of a sequence has been sampled from
            its last state, and is what the drafts go on from.
        slots: slot of each sequence in ``cache``.
        starts: position of each sequence's first new state; earlier ones have been given before.
        counts: how many of the new states belong to each sequence.
        cache: of :func:`new_draft_cache`; is written.
        num_steps: tokens to draft; may be more than the depths that were trained.
        choose: draws a token for each sequence.
        attention: as in the main model.

    Raises:
        ContractError: the model has no MTP layer, there is no sequence, the numbers disagree or do not fit the
            cache, or an id, given or chosen, is not in the vocabulary.
    """
    predictor = _predictor_of(model)
    if not len(hidden) == len(next_ids) == sum(counts) or num_steps < 1:
        raise ContractError(
            f"{len(hidden)} states, {len(next_ids)} tokens behind them and counts that sum to {sum(counts)} "
            f"have to be as many, and num_steps={num_steps} at least 1"
        )
    if not counts:
        raise ContractError("there is no sequence to draft for; call it with at least one")
    check_ids(next_ids, model.config.vocab_size)
    cache.check(list(slots), list(starts), list(counts))
    sequences = _Sequences(slots, starts, counts, cache, hidden.device)
    embedding = model.model.embed_tokens.weight
    positions, last = sequences.positions, sequences.last
    output = predictor.depth(
        predictor.embedded(next_ids, embedding, positions, 1),
        hidden,
        replace(
            predictor.step_of(1, positions, sequences.plan, model.rotation, attention),
            cache=cache,
            cache_rows=sequences.rows,
        ),
        None,
    )
    keys = output.keys.at(last)
    state, fed = output.hidden[last], output.fed[last]
    logits = [project_logits(state, model.output_weight)]
    token_ids = [_chosen(choose, logits[0])]
    plan = sequences.plan_of_last()
    for depth in range(2, num_steps + 1):
        output = predictor.depth(
            predictor.embedded(token_ids[-1], embedding, positions[last], depth),
            fed,
            predictor.step_of(depth, positions[last], plan, model.rotation, attention),
            keys,
        )
        fed = output.fed
        logits.append(project_logits(output.hidden, model.output_weight))
        token_ids.append(_chosen(choose, logits[-1]))
    return Drafted(torch.stack(token_ids, dim=1), torch.stack(logits, dim=1))


def _chosen(choose: Choose, logits: Tensor) -> Tensor:
    token_ids = choose(logits)
    if token_ids.shape != logits.shape[:1]:
        raise ContractError(
            f"choose returned ids of shape {list(token_ids.shape)} for logits of {len(logits)} sequences; it "
            f"draws one token for each"
        )
    check_ids(token_ids, logits.shape[1])
    return token_ids


def _predictor_of(model: GlmMoeDsa) -> MultiTokenPredictor:
    if model.mtp is None:
        raise ContractError(
            "the model has no MTP layer (num_nextn_predict_layers=0), so it cannot draft; add one with an "
            "mtp stage"
        )
    return model.mtp


class _Sequences:
    """Where the new states stand, in their sequences and in the cache."""

    def __init__(
        self,
        slots: Sequence[int],
        starts: Sequence[int],
        counts: Sequence[int],
        cache: PagedCache,
        device: torch.device,
    ) -> None:
        self.last = torch.tensor(counts, device=device).cumsum(0) - 1
        """The last new state of each sequence."""
        runs: list[QueryRun] = []
        positions: list[int] = []
        for slot, start, count in zip(slots, starts, counts, strict=True):
            keys = cache.rows_of(slot, start + count)
            keys = keys if isinstance(keys, slice) else keys.to(device)
            runs.append(QueryRun(len(positions), count, start, keys))
            positions += range(start, start + count)
        self.plan = AttentionPlan(tuple(runs))
        self.positions = torch.tensor(positions, device=device)
        self.rows = self.plan.own_rows(device)

    def plan_of_last(self) -> AttentionPlan:
        """Return the attention of one query behind each sequence, to the keys up to its last state."""
        return AttentionPlan(
            tuple(
                QueryRun(index, 1, run.num_keys - 1, run.key_rows)
                for index, run in enumerate(self.plan.runs)
            )
        )
