"""Log-probabilities among the tokens that a sampler left to draw from; the twin of ``projection.token_logprobs``.

Shape letters: C rows of a chunk, U ids that any of them kept.
"""

from collections.abc import Sequence
from functools import partial
from typing import Protocol, TypeAlias, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from longarc.algos.truncation import kept_logprobs
from longarc.config.model import ComputeDtype
from longarc.errors import ContractError
from longarc.models.layers import check_ids
from longarc.models.projection import chunk_size, project_logits, token_logprobs

KeptIds: TypeAlias = Sequence[Sequence[int]]
"""Of each row, the ids that were left, ascending."""


@runtime_checkable
class _Marked(Protocol):
    """Ids that are known as a mask over the vocabulary, as those that a constraint allows."""

    def mask(self) -> npt.NDArray[np.bool_]:
        """Return whether each id of the vocabulary is one of them."""
        ...


def scored(
    hidden: Float[Tensor, "tokens hidden"],
    weight: Float[Tensor, "vocab hidden"],
    targets: Int[Tensor, " tokens"],
    kept_ids: KeptIds | None,
    *,
    temperature: float,
    with_entropy: bool,
    compute_dtype: ComputeDtype = "float32",
) -> tuple[Float[Tensor, " tokens"], Float[Tensor, " tokens"] | None]:
    """Score each target over the ids it was drawn from, or over the whole vocabulary where its row names none.

    See :func:`kept_token_logprobs` and ``projection.token_logprobs``.
    """
    everything = partial(
        token_logprobs,
        temperature=temperature,
        with_entropy=with_entropy,
        compute_dtype=compute_dtype,
    )
    if kept_ids is None:
        return everything(hidden, weight, targets)
    is_few = torch.tensor([len(ids) > 0 for ids in kept_ids], dtype=torch.bool)
    few, all_ = is_few.nonzero()[:, 0], (~is_few).nonzero()[:, 0]
    logprobs, entropy = everything(hidden[all_], weight, targets[all_])
    few_logprobs, few_entropy = kept_token_logprobs(
        hidden[few],
        weight,
        targets[few],
        [ids for ids in kept_ids if len(ids)],
        temperature=temperature,
        with_entropy=with_entropy,
        compute_dtype=compute_dtype,
    )
    order = torch.cat([all_, few]).argsort()
    joined = torch.cat([logprobs, few_logprobs])[order]
    if entropy is None or few_entropy is None:
        return joined, None
    return joined, torch.cat([entropy, few_entropy])[order]


def kept_token_logprobs(
    hidden: Float[Tensor, "tokens hidden"],
    weight: Float[Tensor, "vocab hidden"],
    targets: Int[Tensor, " tokens"],
    kept_ids: KeptIds,
    *,
    temperature: float = 1.0,
    with_entropy: bool = False,
    compute_dtype: ComputeDtype = "float32",
) -> tuple[Float[Tensor, " tokens"], Float[Tensor, " tokens"] | None]:
    """Return ``log softmax(hidden weight^T / temperature)`` at the targets, over each row's own kept ids.

    Only rows of the weight that someone kept are computed with, a chunk of tokens at a time and again in backward.

    Args:
        hidden: final hidden state before each target; carries gradient.
        weight: output projection; carries gradient.
        targets: the token whose probability is asked for, per row; among its row's ids.
        kept_ids: as many rows, none empty.
        temperature: of the distribution; above 0.
        with_entropy: also return the entropy [nats] of each row's distribution.
        compute_dtype: of the projection; the model's own.

    Returns:
        log-probabilities [nats], and entropies without gradient or None.

    Raises:
        ContractError: an id is outside the vocabulary, or a target is not among its row's ids.
    """
    num_chunk = chunk_size(weight.shape[0], num_tables=4)
    logprobs, entropies = [], []
    for start in range(0, len(targets), num_chunk):
        chunk = slice(start, start + num_chunk)
        ids, is_kept = _table(kept_ids[chunk], start, len(weight))
        aims = _places(targets[chunk], ids, is_kept, start)
        among = partial(_among, temperature=temperature, compute_dtype=compute_dtype)
        chunk_logprobs, entropy = checkpoint(
            among,
            hidden[chunk],
            weight,
            ids,
            is_kept,
            aims,
            use_reentrant=False,
            preserve_rng_state=False,
        )
        logprobs.append(chunk_logprobs)
        entropies.append(entropy)
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    empty = hidden.new_empty(0, dtype=dtype)
    joined = torch.cat([empty, *logprobs])
    return joined, torch.cat([empty, *entropies]) if with_entropy else None


def _table(kept_ids: KeptIds, first: int, vocab_size: int) -> tuple[Tensor, Tensor]:
    """Return all ids of a chunk, ascending [U], and which of them each row kept [C, U]."""
    counts = [len(ids) for ids in kept_ids]
    if 0 in counts:
        raise ContractError(f"token {first + counts.index(0)} was drawn from no id at all")
    if sum(counts) >= vocab_size:
        return _marked(kept_ids, vocab_size)
    flat = np.concatenate([np.asarray(ids, dtype=np.int64) for ids in kept_ids])
    ids, columns = np.unique(flat, return_inverse=True)
    found = torch.from_numpy(ids)
    check_ids(found, vocab_size)
    is_kept = torch.zeros(len(counts), len(ids), dtype=torch.bool)
    rows = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    is_kept[rows, torch.from_numpy(columns.reshape(-1))] = True
    return found, is_kept


def _marked(kept_ids: KeptIds, vocab_size: int) -> tuple[Tensor, Tensor]:
    """Return the table of rows that keep most of the vocabulary: to mark it is cheaper than to sort it."""
    is_kept = np.zeros((len(kept_ids), vocab_size), dtype=bool)
    for row, ids in zip(is_kept, kept_ids, strict=True):
        if isinstance(ids, _Marked):
            row[:] = ids.mask()
        else:
            some = torch.from_numpy(np.asarray(ids, dtype=np.int64))
            check_ids(some, vocab_size)
            row[some.numpy()] = True
    found = np.flatnonzero(is_kept.any(axis=0))
    table = is_kept if len(found) == vocab_size else is_kept[:, found]
    return torch.from_numpy(found), torch.from_numpy(table)


def _places(targets: Tensor, ids: Tensor, is_kept: Tensor, first: int) -> Int[Tensor, " C"]:
    """Return the column of each target."""
    columns = torch.searchsorted(ids, targets).clamp(max=len(ids) - 1)
    is_right = (ids[columns] == targets) & is_kept.gather(1, columns[:, None])[:, 0]
    if not bool(is_right.all()):
        row = int((~is_right).nonzero()[0])
        raise ContractError(
            f"target {int(targets[row])} of token {first + row} is not among the "
            f"{int(is_kept[row].sum())} ids it is said to be drawn from"
        )
    return columns


def _among(
    hidden: Float[Tensor, "C hidden"],
    weight: Float[Tensor, "vocab hidden"],
    ids: Int[Tensor, " U"],
    is_kept: Tensor,
    aims: Int[Tensor, " C"],
    *,
    temperature: float,
    compute_dtype: ComputeDtype,
) -> tuple[Tensor, Tensor]:
    logits_CU = project_logits(hidden, weight[ids], compute_dtype=compute_dtype) / temperature
    logprobs_CU = kept_logprobs(logits_CU, is_kept)
    with torch.no_grad():
        # A token that was left out has p = 0 and adds nothing.
        entropy = -(logprobs_CU.exp() * logprobs_CU.masked_fill(~is_kept, 0.0)).sum(dim=1)
    chosen = logprobs_CU.gather(1, aims[:, None])[:, 0]
    return chosen.to(logits_CU.dtype), entropy.to(logits_CU.dtype)
