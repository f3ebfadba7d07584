"""Which layers select keys themselves and which reuse a selection (IndexShare), by the rules of Hugging Face.

::

    layer       0     1     2       3       4       5     6       7
    kind       full  full  full  shared  shared  shared  full  shared     index_topk_freq 4, offset 3
    selection   0     1     2       2       2       2     6       6

A ``full`` layer has an indexer. A ``shared`` one has none, and attends to what the last full layer before it
selected. Source: IndexCache, arXiv:2603.12201; GLM-5.2, config.json; transformers 5.24, ``GlmMoeDsaConfig``.
"""

from collections.abc import Sequence
from typing import Literal, TypeAlias

from longarc.errors import ConfigError

IndexerKind: TypeAlias = Literal["full", "shared"]

_KINDS: dict[str, IndexerKind] = {"F": "full", "S": "shared"}


def indexer_kinds(
    num_layers: int,
    *,
    frequency: int = 1,
    offset: int = 2,
    pattern: str | None = None,
    types: Sequence[IndexerKind] | None = None,
) -> tuple[IndexerKind, ...]:
    """Return the kind of every layer.

    Args:
        num_layers: decoder layers.
        frequency: of ``frequency`` layers one is full; 1 makes all full.
        offset: this many leading layers are full.
        pattern: one letter for each layer, F or S; goes before frequency and offset.
        types: one kind for each layer; goes before everything else.
    """
    if types is not None:
        return tuple(types)
    if pattern is not None:
        return tuple(_KINDS[letter] for letter in pattern)
    return tuple(
        "shared" if max(layer - offset + 1, 0) % frequency else "full"
        for layer in range(num_layers)
    )


def kinds_of(pattern: str) -> tuple[IndexerKind, ...]:
    """Return the kinds that a pattern of letters says.

    Raises:
        ConfigError: it holds other letters than F and S.
    """
    if not pattern or not set(pattern) <= set(_KINDS):
        raise ConfigError(
            f"{pattern!r} is no pattern of layers; write one letter for each, F with an indexer and S without"
        )
    return tuple(_KINDS[letter] for letter in pattern)


def pattern_of(kinds: Sequence[IndexerKind]) -> str:
    """Return the kinds as letters, F or S."""
    return "".join("F" if kind == "full" else "S" for kind in kinds)


def check_kinds(kinds: Sequence[IndexerKind], *, num_layers: int) -> None:
    """Refuse kinds that describe no model of this depth.

    Raises:
        ValueError: there are too few or too many, or the first layer has no selection to reuse.
    """
    if len(kinds) != num_layers:
        raise ValueError(
            f"{pattern_of(kinds)!r} describes {len(kinds)} layers, but num_hidden_layers={num_layers}"
        )
    if kinds[0] == "shared":
        raise ValueError(
            f"layer 0 is shared in {pattern_of(kinds)!r}, but no layer before it selects keys that it could "
            f"reuse; make it full: an F in front, or index_skip_topk_offset of at least 1"
        )


def check_sharing(old: Sequence[IndexerKind], new: Sequence[IndexerKind]) -> None:
    """Refuse kinds that a model cannot be given, because it lacks the weights or they fit no model.

    Raises:
        ValueError: names the layer or the number of layers.
    """
    check_kinds(new, num_layers=len(old))
    for layer, (before, after) in enumerate(zip(old, new, strict=True)):
        if (before, after) == ("shared", "full"):
            raise ValueError(
                f"layer {layer} should have an indexer in {pattern_of(new)!r}, but the model, "
                f"{pattern_of(old)!r}, has no weights for it; leave it shared, or begin with a model that has one"
            )


def layers_served(kinds: Sequence[IndexerKind], layer: int) -> range:
    """Return the layers that attend to the same selection as ``layer``; the first of them makes it.

    A layer behind the last one, for multi-token prediction, has an indexer of its own.
    """
    if layer >= len(kinds):
        return range(layer, layer + 1)
    first = layer
    while kinds[first] == "shared":
        first -= 1
    stop = layer + 1
    while stop < len(kinds) and kinds[stop] == "shared":
        stop += 1
    return range(first, stop)


def check_layer_split(kinds: Sequence[IndexerKind], first_layers: Sequence[int]) -> None:
    """Refuse a division of the layers over pipeline stages in which a stage begins with a shared layer.

    What crosses from one stage to the next is the residual stream; a selection would not be there.

    Args:
        kinds: of all layers.
        first_layers: the first layer of each stage, ascending; the first stage begins at layer 0.

    Raises:
        ConfigError: names the layer, and the nearest ones at which a stage may begin.
    """
    if not first_layers or first_layers[0] != 0 or sorted(set(first_layers)) != [*first_layers]:
        raise ConfigError(
            f"stages that begin at layers {list(first_layers)} do not divide the model; give ascending layers, "
            f"the first of them 0"
        )
    if first_layers[-1] >= len(kinds):
        raise ConfigError(
            f"a stage begins at layer {first_layers[-1]}, but the model has layers 0..{len(kinds) - 1}"
        )
    for layer in first_layers:
        if kinds[layer] == "shared":
            group = layers_served(kinds, layer)
            allowed = [start for start in (group.start, group.stop) if start < len(kinds)]
            raise ConfigError(
                f"a stage begins at layer {layer}, which reuses the selection of layer {group.start} in the stage "
                f"before; begin it at layer {' or '.join(map(str, allowed))}"
            )
