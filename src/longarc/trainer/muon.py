"""Muon: the momentum of a matrix is replaced by the nearest orthogonal one, so that all directions move alike.

Split, it does so per attention head and per expert, so that a strong head does not drown a weak one.
Matrices of one shape are orthogonalised together, whichever parameters they are parts of.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Protocol, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor, nn

from longarc.config.training import MuonDtype
from longarc.trainer.optim_rules import MuonRule

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
"""Coefficients of the quintic iteration; Muon (Jordan et al.), GLM-4.5."""
NUM_ITERATIONS = 5
UPDATE_RMS = 0.2
"""Root mean square of a full-rank update, that of AdamW in practice; Moonlight (arXiv:2502.16982)."""
_CACHED_ELEMENTS = 1 << 17
"""On a CPU, matrices are iterated in chunks that stay in the second-level cache: twice as fast as all at once."""
_CACHED_HALVES = 1 << 19
"""The same in bf16, whose products are so fast that a call for fewer is felt."""
_LAUNCHED_ELEMENTS = 1 << 26
"""On a GPU, chunks only bound the memory of the iteration, here to about half a GiB."""

Run: TypeAlias = Callable[..., Iterable[Tensor]]
"""``map``, or that of a pool; the result is the same."""


def orthogonalise(matrices: Float[Tensor, "n a b"]) -> Float[Tensor, "n a b"]:
    """Return the nearest (semi-)orthogonal matrices, approximately: singular values in [0.7, 1.2].

    Five steps of ``X <- (a I + b G + c G^2) X`` with ``G = X X^T`` on the wide orientation, in
    :func:`iteration_dtype`, which is also the dtype of the result.
    """
    return orthogonal_stacks([matrices], map)[0]


def orthogonal_stacks(
    stacks: Sequence[Float[Tensor, "_n _a _b"]], run: Run, dtype: MuonDtype = "auto"
) -> list[Float[Tensor, "_n _a _b"]]:
    """Orthogonalise each matrix of each stack; those of one shape go together, wide or tall."""
    by_shape: dict[tuple[int, int], list[tuple[int, Tensor]]] = defaultdict(list)
    for index, stack in enumerate(stacks):
        wide = stack.mT if _is_tall(stack) else stack
        by_shape[wide.shape[1], wide.shape[2]].append((index, wide))
    together = [torch.cat([wide for _, wide in members]) for members in by_shape.values()]
    results = list(stacks)
    for members, done in zip(
        by_shape.values(), _iterated_stacks(together, run, dtype), strict=True
    ):
        pieces = torch.split(done, [len(wide) for _, wide in members])
        for (index, _), piece in zip(members, pieces, strict=True):
            results[index] = piece.mT if _is_tall(stacks[index]) else piece
    return results


def update_scale(num_rows: int, num_columns: int) -> float:
    """Return the factor that gives an orthogonal matrix of this shape the RMS of :data:`UPDATE_RMS`."""
    return UPDATE_RMS * math.sqrt(max(num_rows, num_columns))


def iteration_dtype(
    device_type: str, dtype: torch.dtype, chosen: MuonDtype = "auto"
) -> torch.dtype:
    """Return what the iteration of matrices of ``dtype`` computes in.

    By itself: bf16 on a GPU, which suffices, else the dtype given. Most CPUs multiply fp32 faster than bf16, and its
    results are the reference.
    """
    if chosen == "float32":
        return torch.promote_types(dtype, torch.float32)
    return torch.bfloat16 if chosen == "bfloat16" or device_type == "cuda" else dtype


def _is_tall(stack: Tensor) -> bool:
    return stack.shape[1] > stack.shape[2]


def _iterated_stacks(stacks: Sequence[Tensor], run: Run, dtype: MuonDtype) -> list[Tensor]:
    chunks = [_scaled_chunks(stack, dtype) for stack in stacks]
    done = iter(run(_iterated, chain.from_iterable(chunks)))
    return [torch.cat([next(done) for _ in own]) for own in chunks]


def _scaled_chunks(stack: Tensor, dtype: MuonDtype) -> tuple[Tensor, ...]:
    scaled = stack / torch.linalg.matrix_norm(stack, keepdim=True).clamp_min(1e-7)
    scaled = scaled.to(iteration_dtype(stack.device.type, stack.dtype, dtype))
    limit = _CACHED_HALVES if scaled.dtype == torch.bfloat16 else _CACHED_ELEMENTS
    if stack.device.type != "cpu":
        limit = _LAUNCHED_ELEMENTS
    chunks: tuple[Tensor, ...] = scaled.split(max(1, limit // (stack.shape[1] * stack.shape[2])))
    return chunks


def _iterated(chunk: Tensor) -> Tensor:
    a, b, c = NEWTON_SCHULZ
    for _ in range(NUM_ITERATIONS):
        gram = torch.bmm(chunk, chunk.mT)
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        if chunk.dtype == torch.bfloat16:  # a + a small number would lose that number's bits
            chunk = torch.baddbmm(chunk, polynomial, chunk, beta=a)
        else:
            polynomial.diagonal(dim1=1, dim2=2).add_(a)
            chunk = torch.bmm(polynomial, chunk)
    return chunk


class MuonPart(Protocol):
    """What updates the matrices: :class:`Muon` here, or ``OwnedMuon`` with other ranks."""

    def step(self, lr: float) -> None:
        """Update every matrix from its gradient."""
        ...

    def reset(self) -> None:
        """Forget all momenta."""
        ...

    def momenta(self) -> dict[str, Tensor]:
        """Return the momentum of every parameter by its name."""
        ...

    def load_momenta(self, momenta: Mapping[str, Tensor]) -> None:
        """Take what :meth:`momenta` returned."""
        ...


class Muon:
    """Updates all matrices in this process."""

    def __init__(
        self,
        parameters: Mapping[str, tuple[nn.Parameter, MuonRule]],
        *,
        momentum: float,
        weight_decay: float,
        dtype: MuonDtype = "auto",
        run: Run = map,
    ) -> None:
        """Start with zero momenta.

        Args:
            parameters: by name, with the matrices that each consists of.
            momentum: Nesterov momentum, below 1.
            weight_decay: decoupled, times the rate.
            dtype: what the iteration computes in.
            run: how chunks of matrices are iterated.
        """
        self._parameters = [parameter for parameter, _ in parameters.values()]
        self._rules = [rule for _, rule in parameters.values()]
        self._momenta = {name: torch.zeros_like(p) for name, (p, _) in parameters.items()}
        self._momentum, self._weight_decay, self._run = momentum, weight_decay, run
        self._dtype: MuonDtype = dtype

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """Momentum, orthogonalise, decay, add."""
        parameters: list[Tensor] = list(self._parameters)
        grads = [p.grad if p.grad is not None else torch.zeros_like(p) for p in parameters]
        updates = nesterov(grads, list(self._momenta.values()), momentum=self._momentum)
        torch._foreach_mul_(parameters, 1.0 - lr * self._weight_decay)
        targets, sources = (
            [m for t, rule in zip(ts, self._rules, strict=True) for m in _matrices(t, rule)]
            for ts in (parameters, updates)
        )
        for target, update in zip(
            targets, orthogonal_stacks(sources, self._run, self._dtype), strict=True
        ):
            target.add_(update, alpha=-lr * update_scale(target.shape[1], target.shape[2]))

    def reset(self) -> None:
        """Forget all momenta."""
        for momentum in self._momenta.values():
            momentum.zero_()

    def momenta(self) -> dict[str, Tensor]:
        """Return the momentum of every parameter by its name; not copies."""
        return dict(self._momenta)

    def load_momenta(self, momenta: Mapping[str, Tensor]) -> None:
        """Copy what :meth:`momenta` returned."""
        for name, momentum in self._momenta.items():
            momentum.copy_(momenta[name])


def nesterov(grads: list[Tensor], momenta: list[Tensor], *, momentum: float) -> list[Tensor]:
    """Advance the momenta in place, ``M <- mu M + G``, and return ``G + mu M``."""
    torch._foreach_mul_(momenta, momentum)
    torch._foreach_add_(momenta, grads)
    return list(torch._foreach_add(grads, momenta, alpha=momentum))


def _matrices(tensor: Tensor, rule: MuonRule) -> list[Tensor]:
    """Return views [num_blocks, rows, columns], one for each kind of matrix in a block."""
    blocks = tensor.view(rule.num_blocks, sum(rule.rows), tensor.shape[-1])
    return list(torch.split(blocks, list(rule.rows), dim=1))
