"""Who orthogonalises which matrix when several ranks hold a model, and which parts travel for it.

Pure functions of shapes and of what each rank holds, so that every rank comes to the same plan without
asking. A parameter is read as [planes, rows, columns]: stacked experts are planes, a matrix is one plane.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from longarc.errors import ContractError
from longarc.trainer.optim_rules import MuonRule


@dataclass(frozen=True, slots=True)
class Box:
    """A part of a parameter: half-open ranges of planes, rows and columns."""

    start: tuple[int, int, int]
    stop: tuple[int, int, int]

    @classmethod
    def at(cls, start: Iterable[int], shape: Iterable[int]) -> "Box":
        """Return the box of this shape that begins there."""
        first = _three(start)
        return cls(first, _three(a + size for a, size in zip(first, shape, strict=True)))

    @property
    def shape(self) -> tuple[int, int, int]:
        """Planes, rows and columns; a negative range counts as empty."""
        planes, rows, columns = (max(0, b - a) for a, b in zip(self.start, self.stop, strict=True))
        return planes, rows, columns

    @property
    def numel(self) -> int:
        """Elements."""
        planes, rows, columns = self.shape
        return planes * rows * columns

    def overlap(self, other: "Box") -> "Box":
        """Return the common part, which may be empty."""
        return Box(
            _three(max(a, b) for a, b in zip(self.start, other.start, strict=True)),
            _three(min(a, b) for a, b in zip(self.stop, other.stop, strict=True)),
        )

    def of(self, tensor: Tensor, *, origin: tuple[int, int, int] = (0, 0, 0)) -> Tensor:
        """Return the view of this box in a tensor [planes, rows, columns] that begins at ``origin``."""
        ranges = zip(self.start, self.stop, origin, strict=True)
        return tensor[tuple(slice(a - first, b - first) for a, b, first in ranges)]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)  # by identity: hashed in every step
class OwnedMatrix:
    """One matrix that is orthogonalised by itself: a head, an expert or a whole parameter."""

    name: str
    """Of its parameter."""
    box: Box
    """Where it is in the parameter; one plane, all columns."""
    owner: int
    """Rank that holds its momentum."""
    sources: tuple[tuple[int, Box], ...]
    """The parts of its gradient, each from one rank; together the matrix."""
    holders: tuple[tuple[int, Box], ...]
    """Every part of it that some rank holds, and must update."""

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        return self.box.shape[1:]


def plan_ownership(
    rules: Mapping[str, MuonRule],
    shapes: Mapping[str, tuple[int, ...]],
    holdings: Sequence[Mapping[str, Box]],
) -> list[OwnedMatrix]:
    """Give each matrix one owner, so that all ranks work for about the same time.

    A rank owns what it alone holds whole, up to its fair share: shards of whole heads or experts do not
    travel. Everything else goes, the largest cost ``a * b * min(a, b)`` first, to the least busy rank.

    Args:
        rules: which matrices each parameter consists of.
        shapes: of the whole parameters.
        holdings: what each rank holds of each parameter.

    Returns:
        All matrices, in the order in which ranks that start together would begin with them.

    Raises:
        ContractError: the ranks do not hold each parameter exactly, in equal or in disjoint parts.
    """
    parts: list[_Parts] = []
    for name, rule in rules.items():
        held = [holding[name] for holding in holdings]
        _check_held(name, shapes[name], held)
        for box in _matrix_boxes(shapes[name], rule):
            parts.append(_Parts(name, box, tuple(box.overlap(other) for other in held)))
    parts.sort(key=lambda each: -_cost(each.box))  # stable: equal costs keep their order

    loads = [0] * len(holdings)
    fair_share = sum(_cost(each.box) for each in parts) / len(loads)
    started: list[tuple[int, OwnedMatrix]] = []
    contested = []
    for each in parts:
        home = each.only_holder()
        if home is not None and loads[home] + _cost(each.box) <= fair_share:
            started.append((loads[home], each.owned_by(home)))
            loads[home] += _cost(each.box)
        else:
            contested.append(each)
    for each in contested:
        owner = loads.index(min(loads))
        started.append((loads[owner], each.owned_by(owner)))
        loads[owner] += _cost(each.box)
    return [matrix for _, matrix in sorted(started, key=lambda start: start[0])]


@dataclass(frozen=True, slots=True)
class _Parts:
    """What each rank holds of a matrix, before it has an owner."""

    name: str
    box: Box
    held: tuple[Box, ...]
    """By rank; may be empty."""

    def only_holder(self) -> int | None:
        holders = [rank for rank, part in enumerate(self.held) if part.numel]
        return holders[0] if len(holders) == 1 else None

    def owned_by(self, owner: int) -> OwnedMatrix:
        holders = tuple((rank, part) for rank, part in enumerate(self.held) if part.numel)
        # Each distinct part comes from one rank: the owner if it has it.
        sources: dict[Box, int] = {}
        for rank, part in sorted(holders, key=lambda holder: holder[0] != owner):
            sources.setdefault(part, rank)
        return OwnedMatrix(
            name=self.name,
            box=self.box,
            owner=owner,
            sources=tuple((rank, part) for part, rank in sources.items()),
            holders=holders,
        )


def three_dimensional(shape: Sequence[int]) -> tuple[int, int, int]:
    """Return a shape of two or three dimensions as planes, rows and columns."""
    return _three([1, *shape][-3:])


def _matrix_boxes(shape: tuple[int, ...], rule: MuonRule) -> list[Box]:
    planes, _, columns = three_dimensional(shape)
    boxes = []
    for block in range(rule.num_blocks):
        # A stack has a block per plane; the blocks of a matrix lie below each other.
        plane, row = (block, 0) if planes > 1 else (0, block * sum(rule.rows))
        for num_rows in rule.rows:
            boxes.append(Box((plane, row, 0), (plane + 1, row + num_rows, columns)))
            row += num_rows
    return boxes


def _cost(box: Box) -> int:
    _, rows, columns = box.shape
    return rows * columns * min(rows, columns)


def _check_held(name: str, shape: tuple[int, ...], held: Sequence[Box]) -> None:
    distinct = [box for box in set(held) if box.numel]
    are_apart = all(a.overlap(b).numel == 0 for i, a in enumerate(distinct) for b in distinct[:i])
    planes, rows, columns = three_dimensional(shape)
    if not are_apart or sum(box.numel for box in distinct) != planes * rows * columns:
        raise ContractError(
            f"parameter {name} of shape {tuple(shape)} is held in the parts {sorted(map(repr, held))}, "
            f"which do not make it up; give the optimizer the process group of all ranks that hold "
            f"the model, and no others"
        )


def _three(numbers: Iterable[int]) -> tuple[int, int, int]:
    a, b, c = numbers
    return a, b, c
