"""Which parameters a stage trains."""

from collections.abc import Callable

from torch import nn


def is_indexer(name: str) -> bool:
    """Say whether a parameter belongs to a lightning indexer."""
    return "indexer" in name.split(".")


def is_mtp(name: str) -> bool:
    """Say whether a parameter belongs to the layer for multi-token prediction, its indexer included."""
    return name.split(".", 1)[0] == "mtp"


def is_feed_forward(name: str) -> bool:
    """Say whether a parameter is a projection of a feed-forward layer: of an expert, routed or shared, or a dense one.

    A router is none: it chooses among the projections.
    """
    parts = name.split(".")
    return "mlp" in parts and parts[-2:] != ["gate", "weight"]


def train_only(model: nn.Module, is_trained: Callable[[str], bool]) -> None:
    """Set every parameter's ``requires_grad`` by its name."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(is_trained(name))
