"""Muon with one owner per matrix: no rank computes or stores what another one does (zero redundancy).

::

    who holds a part                 the owner                     who holds a part
      its part of the gradient --->    momentum, orthogonalise --->  decay, add the own part

* Matrices travel in buckets, in the same order on every rank: while one is orthogonalised, the
  gradients of the next come in and the updates of the one before go out.
* A parameter is whole on every rank, and then only updates travel; or it is a DTensor, sharded in any way.
* The updates are those of one process: bit for bit where a product of matrices does not depend on what
  else is in its batch (MKL on the CPUs tried), else within the rounding of the iteration's dtype.

Source: GLM-5 (arXiv:2602.15763) section 2.4.1, zero-redundant communication for the Muon optimizer.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

# The only place that knows the layout of uneven and strided shards; torchtitan uses it too.
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from longarc.config.training import MuonDtype
from longarc.errors import ContractError
from longarc.trainer.muon import Run, iteration_dtype, nesterov, orthogonal_stacks, update_scale
from longarc.trainer.optim_rules import MuonRule
from longarc.trainer.ownership import Box, OwnedMatrix, plan_ownership, three_dimensional

BUCKET_ELEMENTS = 1 << 24
"""Numbers of the matrices that travel together, if those are a matrix for every rank; else there are as many
matrices as ranks, whatever their size. What is under way on a rank are the matrices of a bucket that it owns,
about one of them, and the updates of what it holds: of the whole bucket where parameters are whole on every
rank, so that memory grows with the number of ranks there."""


class OwnedMuon:
    """Updates matrices together with the other ranks of a process group."""

    def __init__(
        self,
        parameters: Mapping[str, tuple[nn.Parameter, MuonRule]],
        *,
        momentum: float,
        weight_decay: float,
        process_group: ProcessGroup,
        dtype: MuonDtype = "auto",
        run: Run = map,
    ) -> None:
        """Agree on the owners; all ranks must call this together.

        Args:
            parameters: by name, with the matrices that each consists of; the same on every rank.
            momentum: Nesterov momentum, below 1.
            weight_decay: decoupled, times the rate.
            process_group: the ranks that hold the parameters.
            dtype: what the iteration computes in.
            run: how chunks of matrices are iterated.

        Raises:
            ContractError: the ranks have different parameters, of different dtypes or split differently,
                or together not all of one. Every rank raises it.
        """
        self._parameters = {name: parameter for name, (parameter, _) in parameters.items()}
        self._process_group = process_group
        self._momentum, self._weight_decay, self._run = momentum, weight_decay, run
        self._held = {name: _held(parameter) for name, parameter in self._parameters.items()}
        planned = plan_ownership(
            {name: rule for name, (_, rule) in parameters.items()},
            {name: tuple(parameter.shape) for name, parameter in self._parameters.items()},
            _all_holdings(
                {
                    name: _Holding(
                        self._held[name], tuple(parameter.shape), str(parameter.dtype), rule
                    )
                    for name, (parameter, rule) in parameters.items()
                },
                process_group,
            ),
        )
        self._buckets = [
            _Bucket(matrices, self._parameters[matrices[0].name], process_group, dtype)
            for matrices in _in_buckets(planned, self._parameters, process_group.size())
        ]

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """Momentum and orthogonalisation where a matrix is owned, decay and addition where it is held."""
        parts = {name: _local(parameter) for name, parameter in self._parameters.items()}
        grads = {name: _local_gradient(p) for name, p in self._parameters.items()}
        torch._foreach_mul_(list(parts.values()), 1.0 - lr * self._weight_decay)

        def add(updates: Iterable[tuple[_Parcel, Tensor]]) -> None:
            for parcel, update in updates:
                target = self._view(parts, parcel)
                target.add_(update, alpha=-lr * update_scale(*parcel.matrix.shape))

        coming = self._buckets[0].to_owners.start(partial(self._view, grads))
        going: Iterator[tuple[_Parcel, Tensor]] = iter(())
        for index, bucket in enumerate(self._buckets):
            arrived = coming
            if index + 1 < len(self._buckets):
                coming = self._buckets[index + 1].to_owners.start(partial(self._view, grads))
            update_of = bucket.updates(arrived, momentum=self._momentum, run=self._run)
            gone, going = going, bucket.to_holders.start(update_of)
            add(gone)
        add(going)

    def reset(self) -> None:
        """Forget all momenta."""
        for bucket in self._buckets:
            for stack in bucket.momenta:
                stack.zero_()

    def momenta(self) -> dict[str, Tensor]:
        """Return the whole momentum of every parameter on the first rank, and nothing on the others.

        All ranks must call this together.
        """
        is_first = self._process_group.rank() == 0
        whole = {
            name: _local(parameter).new_zeros(three_dimensional(parameter.shape))
            for name, parameter in (self._parameters.items() if is_first else ())
        }
        for bucket in self._buckets:
            for parcel, momentum in bucket.gather_momenta():
                parcel.box.of(whole[parcel.matrix.name]).copy_(momentum)
        return {name: value.view(self._parameters[name].shape) for name, value in whole.items()}

    def load_momenta(self, momenta: Mapping[str, Tensor]) -> None:
        """Take the own part of what :meth:`momenta` returned, on this or another number of ranks."""
        for bucket in self._buckets:
            for matrix in bucket.owned:
                whole = momenta[matrix.name]
                whole = whole.view(three_dimensional(whole.shape))
                bucket.momentum_of(matrix).copy_(matrix.box.of(whole))

    def _view(self, parts: Mapping[str, Tensor], parcel: "_Parcel") -> Tensor:
        name = parcel.matrix.name
        return parcel.box.of(parts[name], origin=self._held[name].start)


@dataclass(frozen=True, slots=True)
class _Parcel:
    """A part of a matrix on its way from one rank to another, or to itself."""

    matrix: OwnedMatrix
    box: Box
    source: int
    destination: int


class _Exchange:
    """One all-to-all of parcels that every rank knows."""

    def __init__(
        self,
        parcels: Iterable[_Parcel],
        *,
        dtype: torch.dtype,
        device: torch.device,
        process_group: ProcessGroup,
    ) -> None:
        rank, num_ranks = process_group.rank(), process_group.size()
        self._dtype, self._device, self._process_group = dtype, device, process_group
        self._kept, travelling = [], []
        for parcel in parcels:
            if parcel.source != parcel.destination:
                travelling.append(parcel)
            elif parcel.source == rank:
                self._kept.append(parcel)
        # Sorting is stable, so both ends have the parcels between them in the same order.
        travelling.sort(key=lambda parcel: (parcel.source, parcel.destination))
        self._sent = [parcel for parcel in travelling if parcel.source == rank]
        self._received = [parcel for parcel in travelling if parcel.destination == rank]
        self._num_sent, self._num_received = [0] * num_ranks, [0] * num_ranks
        for parcel in self._sent:
            self._num_sent[parcel.destination] += parcel.box.numel
        for parcel in self._received:
            self._num_received[parcel.source] += parcel.box.numel
        self._is_needed = bool(travelling)

    def start(self, read: Callable[[_Parcel], Tensor]) -> Iterator[tuple[_Parcel, Tensor]]:
        """Send ``read`` of each parcel; the iterator waits for what comes here."""
        kept = [(parcel, read(parcel)) for parcel in self._kept]
        if not self._is_needed:
            return iter(kept)
        sent = torch.empty(sum(self._num_sent), dtype=self._dtype, device=self._device)
        for place, parcel in zip(_split(sent, self._sent), self._sent, strict=True):
            place.copy_(read(parcel))
        received = torch.empty(sum(self._num_received), dtype=self._dtype, device=self._device)
        work = dist.all_to_all_single(
            received,
            sent,
            self._num_received,
            self._num_sent,
            group=self._process_group,
            async_op=True,
        )

        def arrivals() -> Iterator[tuple[_Parcel, Tensor]]:
            yield from kept
            work.wait()
            yield from zip(self._received, _split(received, self._received), strict=True)

        return arrivals()


class _Bucket:
    """Matrices that travel together, and the momenta of those that this rank owns."""

    def __init__(
        self,
        matrices: Sequence[OwnedMatrix],
        like: Tensor,
        process_group: ProcessGroup,
        dtype: MuonDtype,
    ) -> None:
        self._dtype: MuonDtype = dtype
        rank = process_group.rank()
        by_shape: dict[tuple[int, int], list[OwnedMatrix]] = defaultdict(list)
        for matrix in matrices:
            if matrix.owner == rank:
                by_shape[matrix.shape].append(matrix)
        self.owned = [matrix for members in by_shape.values() for matrix in members]
        """What this rank owns, by shape."""
        device = _local(like).device
        self.momenta = [
            torch.zeros(len(members), *shape, dtype=like.dtype, device=device)
            for shape, members in by_shape.items()
        ]
        """One stack [matrices, rows, columns] for each shape."""
        self._places = {
            matrix: (stack_index, index)
            for stack_index, members in enumerate(by_shape.values())
            for index, matrix in enumerate(members)
        }

        def exchange(parcels: Iterable[_Parcel], dtype: torch.dtype) -> _Exchange:
            return _Exchange(parcels, dtype=dtype, device=device, process_group=process_group)

        self.to_owners = exchange(
            (_Parcel(m, box, rank, m.owner) for m in matrices for rank, box in m.sources),
            like.dtype,
        )
        """Gradients."""
        self.to_holders = exchange(
            (_Parcel(m, box, m.owner, rank) for m in matrices for rank, box in m.holders),
            iteration_dtype(device.type, like.dtype, dtype),
        )
        """Updates, in the dtype that they are computed in."""
        self._to_first = exchange((_Parcel(m, m.box, m.owner, 0) for m in matrices), like.dtype)

    def updates(
        self, grads: Iterable[tuple[_Parcel, Tensor]], *, momentum: float, run: Run
    ) -> Callable[[_Parcel], Tensor]:
        """Advance the momenta by the gradients that arrive; return what finds the update of a parcel."""
        stacks = [torch.empty_like(stack) for stack in self.momenta]
        for parcel, part in grads:
            self._part(stacks, parcel).copy_(part)
        if not stacks:
            return partial(self._part, stacks)
        updates = orthogonal_stacks(
            nesterov(stacks, self.momenta, momentum=momentum), run, self._dtype
        )
        return partial(self._part, updates)

    def gather_momenta(self) -> Iterator[tuple[_Parcel, Tensor]]:
        """Send the momenta of all owners to the first rank; yield there whole matrices."""
        return self._to_first.start(lambda parcel: self.momentum_of(parcel.matrix))

    def momentum_of(self, matrix: OwnedMatrix) -> Tensor:
        """Return the momentum of an owned matrix, [1, rows, columns]; a view."""
        stack_index, index = self._places[matrix]
        return self.momenta[stack_index][index : index + 1]

    def _part(self, stacks: Sequence[Tensor], parcel: _Parcel) -> Tensor:
        """Return the view of a parcel in stacks of the shapes of the momenta."""
        stack_index, index = self._places[parcel.matrix]
        return parcel.box.of(stacks[stack_index][index : index + 1], origin=parcel.matrix.box.start)


def _in_buckets(
    matrices: Sequence[OwnedMatrix], parameters: Mapping[str, nn.Parameter], num_ranks: int
) -> Iterator[list[OwnedMatrix]]:
    """Cut the plan into buckets of one dtype, each with work for about every rank."""
    by_dtype: dict[torch.dtype, list[OwnedMatrix]] = defaultdict(list)
    for matrix in matrices:
        by_dtype[parameters[matrix.name].dtype].append(matrix)
    for members in by_dtype.values():
        bucket: list[OwnedMatrix] = []
        num_elements = 0
        for matrix in members:
            num_elements += matrix.box.numel
            if len(bucket) >= num_ranks and num_elements > BUCKET_ELEMENTS:
                yield bucket
                bucket, num_elements = [], matrix.box.numel
            bucket.append(matrix)
        yield bucket


def _split(flat: Tensor, parcels: Sequence[_Parcel]) -> list[Tensor]:
    pieces = torch.split(flat, [parcel.box.numel for parcel in parcels])
    return [p.view(parcel.box.shape) for p, parcel in zip(pieces, parcels, strict=True)]


def _held(parameter: nn.Parameter) -> Box:
    """Return what this rank holds."""
    shape: Sequence[int] = parameter.shape
    offset: Sequence[int] = [0] * len(shape)
    if isinstance(parameter, DTensor):
        shape, offset = compute_local_shape_and_global_offset(
            parameter.shape, parameter.device_mesh, parameter.placements
        )
    return Box.at((0, *offset)[-3:], three_dimensional(shape))


@dataclass(frozen=True, slots=True)
class _Holding:
    """What one rank says of a parameter; all but the box must be the same on every rank."""

    box: Box
    shape: tuple[int, ...]
    """Of the whole parameter."""
    dtype: str
    rule: MuonRule

    def agrees_with(self, other: "_Holding") -> bool:
        return replace(self, box=other.box) == other

    def __str__(self) -> str:
        return f"{list(self.shape)} of {self.dtype} in {self.rule.num_blocks} blocks of {self.rule.rows} rows"


def _all_holdings(held: dict[str, _Holding], process_group: ProcessGroup) -> list[dict[str, Box]]:
    """Return what each rank holds.

    Raises:
        ContractError: the ranks do not have the same parameters. All ranks compare all, so that none goes on
            to wait for one that has stopped.
    """
    gathered: list[dict[str, _Holding]] = [{} for _ in range(process_group.size())]
    dist.all_gather_object(gathered, held, group=process_group)
    first = gathered[0]
    for rank, other in enumerate(gathered):
        if other.keys() != first.keys():
            differing = sorted(other.keys() ^ first.keys())
            raise ContractError(
                f"rank 0 trains {len(first)} matrices and rank {rank} {len(other)}; {differing[:3]} are "
                f"not on both. Give the optimizer only ranks that hold the same layers, with the same "
                f"parameters frozen"
            )
        for name, holding in other.items():
            if not holding.agrees_with(first[name]):
                raise ContractError(
                    f"parameter {name} is {first[name]} on rank 0 and {holding} on rank {rank}; build "
                    f"the model of all ranks from the same config, in the same dtype"
                )
    return [{name: holding.box for name, holding in each.items()} for each in gathered]


def _local(tensor: Tensor) -> Tensor:
    """Return this rank's part as [planes, rows, columns]; a view, contiguous or not."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local if local.ndim == 3 else local[None]


def _local_gradient(parameter: nn.Parameter) -> Tensor:
    """Return the gradient of this rank's part of a parameter; zeros where there is none."""
    grad = parameter.grad
    if grad is None:
        return torch.zeros_like(_local(parameter))
    if isinstance(parameter, DTensor) and isinstance(grad, DTensor):
        grad = grad.redistribute(placements=parameter.placements)  # nothing to do as a rule
    return _local(grad)
