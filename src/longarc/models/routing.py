"""What each token of a pass was routed to: experts by layer, keys by indexer; recorded by one pass, replayed by another.

Two implementations of one model choose differently where scores are close, and then compute with other experts or
keys: a difference in log-probability that has nothing to do with the policy. A pass that is given the other's choice has only
rounding left. The router's weights of the given experts are computed anew, so gradients reach the router.

Source: routing replay (R3), arXiv:2510.11370. Shape letters: L layers with experts, I indexers, N tokens, k experts
of a token, S keys of a token.
"""

from dataclasses import dataclass, field

import torch
from jaxtyping import Int
from torch import Tensor

from longarc.algos.selection import NO_KEY
from longarc.config.model import GlmHybridConfig, GlmMoeDsaConfig, ModelConfig
from longarc.errors import ContractError


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """The choices of one pass."""

    experts: Int[Tensor, "L N k"] | None = None
    """Of each layer with experts, in their order, best first; None where the router chooses."""
    keys: Int[Tensor, "I N S"] | None = None
    """Of each indexer, in the order of its layers: positions in the token's own sequence, ascending, NO_KEY last; None
    where the indexer chooses, or attention is dense."""


@dataclass(slots=True)
class RoutingRecord:
    """Collects the choices of a pass, layer by layer; a layer that is computed twice says the same twice."""

    experts: dict[int, Tensor] = field(default_factory=dict)
    keys: dict[int, Tensor] = field(default_factory=dict)

    def routing(self) -> Routing:
        """Return what the pass chose."""
        experts = [chosen for _, chosen in sorted(self.experts.items())]
        keys = [positions for _, positions in sorted(self.keys.items())]
        return Routing(
            experts=torch.stack(experts).long() if experts else None,
            keys=torch.stack(keys) if keys else None,
        )


@dataclass(frozen=True, slots=True)
class Replay:
    """A given routing, by layer of the model."""

    experts: dict[int, Tensor]
    """[N, k] by layer; empty where the routers choose."""
    keys: dict[int, Tensor]
    """Positions [N, S] by layer; empty where the indexers choose."""

    @classmethod
    def of(cls, routing: Routing, config: ModelConfig, position_ids: Int[Tensor, " N"]) -> "Replay":
        """Check a routing against the model and the tokens of the pass.

        Raises:
            ContractError: it is of another model or of other tokens, or names what cannot have been chosen.
        """
        check_routes(config)
        assert isinstance(config, GlmMoeDsaConfig)
        layers = range(config.first_k_dense_replace, config.num_hidden_layers)
        num_tokens = len(position_ids)
        experts, keys = routing.experts, routing.keys
        if experts is not None:
            _check_shape("experts", experts, (len(layers), num_tokens, config.num_experts_per_tok))
            _check_experts(experts, config.n_routed_experts)
        if keys is not None:
            indexers = config.indexed_layers
            _check_shape("keys", keys, (len(indexers), num_tokens, config.num_selected))
            _check_keys(keys, position_ids)
        return cls(
            {} if experts is None else dict(zip(layers, experts, strict=True)),
            {} if keys is None else dict(zip(config.indexed_layers, keys, strict=True)),
        )


def routes(config: ModelConfig) -> bool:
    """Whether the routing of a model can be recorded and replayed: it has some, and in layers of its own."""
    return isinstance(config, GlmMoeDsaConfig) and not isinstance(config, GlmHybridConfig)


def check_routes(config: ModelConfig) -> None:
    """Refuse a model whose routing is neither recorded nor replayed.

    Raises:
        ContractError: the model has none, or it is inside layers of another library.
    """
    if not routes(config):
        raise ContractError(
            f"the routing of a {config.family} model cannot be recorded or replayed, only that of glm_moe_dsa; "
            f"leave it out"
        )


def _check_shape(name: str, given: Tensor, expected: tuple[int, ...]) -> None:
    if tuple(given.shape) != expected:
        raise ContractError(
            f"routing.{name} has shape {list(given.shape)}, the pass needs {list(expected)}: layers, tokens, choices "
            f"of a token; give what was recorded for these tokens by this model"
        )


def _check_experts(experts: Tensor, num_experts: int) -> None:
    lowest, highest = int(experts.min()), int(experts.max())
    if lowest < 0 or highest >= num_experts:
        raise ContractError(
            f"routing.experts span {lowest}..{highest}, but the model has experts 0..{num_experts - 1}"
        )
    ordered = experts.sort(dim=-1).values
    if bool((ordered[..., 1:] == ordered[..., :-1]).any()):
        raise ContractError("routing.experts name an expert twice for one token of a layer")


def _check_keys(keys: Tensor, position_ids: Tensor) -> None:
    is_key = keys != NO_KEY
    is_possible = (keys >= 0) & (keys <= position_ids[:, None])
    is_first = is_key[..., :1].all()
    follows = (keys[..., 1:] > keys[..., :-1]) | ~is_key[..., 1:]
    is_packed = is_key[..., :-1] | ~is_key[..., 1:]
    if not bool((is_possible | ~is_key).all() & is_first & follows.all() & is_packed.all()):
        raise ContractError(
            "routing.keys hold something else than ascending positions up to each token's own, at least one, and "
            f"{NO_KEY} behind the last"
        )
