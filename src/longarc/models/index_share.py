"""Models whose layers share indexers, made from models that have more of them, and the search for which to share.

Without training, sharing costs a little loss, and how much depends on the layers. The search is greedy::

    FFFFFFFF  ->  FFFFSFFF  ->  FFSFSFFF  ->  ...        each step the layer whose loss is least

Source: IndexCache, arXiv:2603.12201, section 3.1; GLM-5.2, IndexShare.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from longarc.config.index_share import IndexerKind, check_sharing, pattern_of
from longarc.config.model import GlmHybridConfig, GlmMoeDsaConfig
from longarc.errors import ConfigError, ContractError
from longarc.models.decoder import GlmMoeDsa
from longarc.models.decoder_base import Decoder


@dataclass(frozen=True, slots=True, kw_only=True)
class SharingStep:
    """One step of the search."""

    layer: int | None
    """The layer that lost its indexer; None for the model as it was."""
    loss: float
    """Of the model afterwards, as the scorer says."""
    kinds: tuple[IndexerKind, ...]
    """Of all layers afterwards."""


def with_shared_indexers(model: Decoder, kinds: Sequence[IndexerKind]) -> GlmMoeDsa:
    """Return the model with fewer indexers; it shares the weights, in memory, that it keeps.

    Args:
        model: stays as it is.
        kinds: of every layer.

    Raises:
        ConfigError: the model has no indexers, the kinds do not fit its layers, or a layer should have an
            indexer that has none.
    """
    config = _indexed_config(model)
    try:
        check_sharing(config.indexer_kinds, kinds)
    except ValueError as error:
        raise ConfigError(f"indexers cannot be shared like this: {error}") from error
    if tuple(kinds) == config.indexer_kinds:
        assert isinstance(model, GlmMoeDsa)
        return model
    schedule = {
        "index_topk_pattern": pattern_of(kinds),
        "indexer_types": None,
        "index_topk_freq": 1,
    }
    with torch.device("meta"):
        shared = GlmMoeDsa(config.model_copy(update=schedule))
    names = shared.state_dict().keys()
    state = {name: tensor for name, tensor in model.state_dict().items() if name in names}
    shared.load_state_dict(state, assign=True)
    return shared.train(model.training)


def search_shared_layers(
    model: Decoder, loss: Callable[[Decoder], float], *, num_full: int
) -> Iterator[SharingStep]:
    """Take indexers away one at a time, each time the one whose loss grows least, and yield each step.

    The first step is the model as it is. The first layer keeps its indexer; of equal losses the earliest
    layer's counts. N indexers cost N (N - 1) / 2 evaluations at most.

    Args:
        model: stays as it is; where its layers share already, the search goes on from there.
        loss: of a model on calibration data; smaller is better.
        num_full: how many indexers to keep.

    Raises:
        ConfigError: the model has no indexers, or not so many.
        ContractError: a loss is not finite.
    """
    kinds = _indexed_config(model).indexer_kinds
    if not 1 <= num_full <= kinds.count("full"):
        raise ConfigError(
            f"cannot keep {num_full} indexers of the {kinds.count('full')} that the model has; keep 1 to "
            f"{kinds.count('full')}"
        )
    yield SharingStep(layer=None, loss=_finite(loss(model), kinds), kinds=kinds)
    while kinds.count("full") > num_full:
        candidates = []
        for layer in range(1, len(kinds)):
            if kinds[layer] == "full":
                fewer: tuple[IndexerKind, ...] = (*kinds[:layer], "shared", *kinds[layer + 1 :])
                value = _finite(loss(with_shared_indexers(model, fewer)), fewer)
                candidates.append(SharingStep(layer=layer, loss=value, kinds=fewer))
        best = min(candidates, key=lambda step: step.loss)
        kinds = best.kinds
        yield best


def _finite(loss: float, kinds: Sequence[IndexerKind]) -> float:
    if not math.isfinite(loss):
        raise ContractError(
            f"the loss with indexers {pattern_of(kinds)} is {loss}, which compares with nothing; look for "
            f"damaged weights, or calibrate on documents that have trained tokens"
        )
    return loss


def _indexed_config(model: Decoder) -> GlmMoeDsaConfig:
    # A hybrid's config has the fields of this family too, but its layers have no indexers.
    if not isinstance(model.config, GlmMoeDsaConfig) or isinstance(model.config, GlmHybridConfig):
        raise ConfigError(
            f"a {model.config.family} model has no indexers to share; this is for family = 'glm_moe_dsa'"
        )
    return model.config
