"""Sparse attention: each query attends to rows of a table that were selected for it.

One entry point, and three back-ends that compute the same numbers:

::

    reference   a mask over the whole table, in plain torch: says what the others must compute
    cpu         gathers the selected rows, block of queries by block: native kernels for fp32 on the CPU,
                plain torch for every other dtype and device
    triton      one program per query and block of heads: on a GPU, or under Triton's interpreter

`backend_for` chooses. Shape letters: N queries, n heads, S selected keys, R rows of the table, d key width,
v value width (a value is the first v numbers of its key).
"""

import os
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Literal, TypeAlias, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor

from longarc.errors import ConfigError, ResourceError
from longarc.models.gathered_attention import gathered_attention
from longarc.models.kernels import attention as native_attention
from longarc.models.kernels.attention import FlatRuns
from longarc.models.kernels.native import native_for

Backend: TypeAlias = Literal["reference", "cpu", "triton"]

VARIABLE = "LONGARC_ATTENTION"
"""Environment variable that names the back-end of sparse attention and key selection for a whole process."""


def backend_for(x: Tensor, asked: str | None = None) -> Backend:
    """Return the back-end for tensors like ``x``.

    Args:
        x: says dtype and device.
        asked: a back-end by name; None takes ``LONGARC_ATTENTION`` from the environment, and without that
            triton on a GPU where it is installed, else cpu. In fp64, where wide keys do not fit on a GPU's
            processors, it is cpu too.

    Raises:
        ConfigError: there is no back-end of that name.
        ResourceError: triton was asked for and cannot run here.
    """
    name = asked or os.environ.get(VARIABLE)
    if name is None:
        is_narrow = x.is_cuda and x.dtype != torch.float64
        return "triton" if is_narrow and find_spec("triton") is not None else "cpu"
    for backend in get_args(Backend):
        if name == backend:
            if backend == "triton":
                _check_triton(x)
            return backend  # type: ignore[no-any-return]
    raise ConfigError(
        f"there is no attention back-end {name!r}: it is one of {', '.join(get_args(Backend))}. Without "
        f"{VARIABLE} in the environment the fastest for the device is taken"
    )


def _check_triton(x: Tensor) -> None:
    if find_spec("triton") is None:
        raise ResourceError(
            "the attention back-end 'triton' was asked for, but triton is not installed; pip install "
            "triton, or choose 'cpu', whose plain torch runs on every device"
        )
    if x.is_cuda:
        return
    from triton import knobs

    if not knobs.runtime.interpret:
        raise ResourceError(
            f"the attention back-end 'triton' was asked for, but the tensors are on {x.device}; move the "
            f"model to a GPU, choose 'cpu', or set TRITON_INTERPRET=1 before Python starts to have the "
            f"kernels interpreted, slowly"
        )
    if x.dtype == torch.bfloat16:
        # Triton 3.9 multiplies the bit patterns: it holds bf16 as whole numbers, and its product forgets that.
        raise ResourceError(
            "the attention back-end 'triton' was asked for, but Triton's interpreter computes nonsense with "
            "torch.bfloat16; choose 'cpu', or a model in torch.float32"
        )


def sparse_attention(
    query_Nnd: Float[Tensor, "N n d"],
    table_Rd: Float[Tensor, "R d"],
    rows_NS: Int[Tensor, "N S"],
    *,
    value_width: int,
    scale: float,
    backend: Backend | None = None,
    flat_runs: FlatRuns | None = None,
    with_mass: bool = False,
) -> tuple[Float[Tensor, "N n v"], Float[Tensor, "N S"] | None]:
    """Attend from each query to its own S rows of the table.

    ``o[q, h] = sum_s softmax_s(scale q[q, h] . k_s) v_s`` over the rows s of query q. Every query has the
    same shapes whatever else is in the call, and its keys are added up in the order in which they are
    listed: in native and Triton kernels its bits do not depend on how it was batched.

    Args:
        query_Nnd: queries.
        table_Rd: keys; a row that no query lists may hold anything, NaN included.
        rows_NS: different rows of the table, at least one, then -1 where there are fewer than S.
        value_width: v, the leading numbers of a key that are its value.
        scale: factor on the scores.
        backend: None chooses, see `backend_for`.
        flat_runs: which queries belong together, for the native kernels to share work between threads;
            without it they are not used.
        with_mass: also return the probabilities summed over heads, which the indexer's loss needs.

    Returns:
        The attended values, and where asked for the probabilities of each listed row summed over heads
        (detached).
    """
    backend = backend or backend_for(query_Nnd)
    attend: Callable[..., tuple[Tensor, Tensor | None]] = gathered_attention
    if backend == "reference":
        attend = reference_attention
    elif backend == "triton":
        from longarc.models.kernels.triton.attention import triton_attention

        attend = triton_attention
    elif flat_runs is not None and native_for(query_Nnd, table_Rd):
        attend = partial(native_attention.sparse_attention, flat_runs)
    return attend(
        query_Nnd, table_Rd, rows_NS, value_width=value_width, scale=scale, with_mass=with_mass
    )


def reference_attention(
    query_Nnd: Float[Tensor, "N n d"],
    table_Rd: Float[Tensor, "R d"],
    rows_NS: Int[Tensor, "N S"],
    *,
    value_width: int,
    scale: float,
    with_mass: bool = False,
) -> tuple[Float[Tensor, "N n v"], Float[Tensor, "N S"] | None]:
    """Attend densely under a mask: `sparse_attention` as one would write it down, for short sequences."""
    num_rows = len(table_Rd)
    is_listed_NR = rows_NS.new_zeros((len(rows_NS), num_rows + 1), dtype=torch.bool)
    is_listed_NR.scatter_(1, rows_NS.where(rows_NS >= 0, num_rows), True)
    is_listed_NR = is_listed_NR[:, :num_rows]
    # NaN times a probability of zero is NaN.
    table_Rd = table_Rd.masked_fill(~is_listed_NR.any(dim=0)[:, None], 0.0)
    score_NnR = torch.einsum("qnd,rd->qnr", query_Nnd, table_Rd) * scale
    probability_NnR = score_NnR.masked_fill(~is_listed_NR[:, None], float("-inf")).softmax(dim=-1)
    attended_Nnv = torch.einsum("qnr,rv->qnv", probability_NnR, table_Rd[:, :value_width])
    if not with_mass:
        return attended_Nnv, None
    mass_NS = probability_NnR.detach().sum(dim=1).gather(1, rows_NS.clamp_min(0))
    return attended_Nnv, mass_NS.masked_fill(rows_NS < 0, 0.0)
