"""The tensor-typed extension points: what a policy loss and an advantage estimator look like.

A recipe names one by import path (``"longarc.algos.losses:icepop"``, ``"my_pkg.my_loss:loss"``).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from jaxtyping import Bool, Float, Int
from torch import Tensor

from longarc.algos.token_loss import TokenLoss


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInputs:
    """What a policy loss sees of one micro-batch: one entry per predicted token."""

    policy_logprobs: Float[Tensor, " tokens"]
    """log pi [nats] under the weights being trained; the only field with a gradient."""
    proximal_logprobs: Float[Tensor, " tokens"]
    """log pi [nats] under the weights at the start of the step."""
    behaviour_logprobs: Float[Tensor, " tokens"]
    """log mu [nats] that the engine recorded while sampling."""
    advantages: Float[Tensor, " tokens"]
    """A, constant."""
    train_mask: Bool[Tensor, " tokens"]
    """True where the token contributes to the loss."""
    token_weights: Float[Tensor, " tokens"]
    """Weight of each token in sum and normaliser: multiplicity, or multiplicity / |y| of its trajectory."""
    sequence_ids: Int[Tensor, " tokens"]
    """Which segment the token belongs to, numbered from 0. All trained tokens of a segment are in one micro-batch."""


@runtime_checkable
class PolicyLoss(Protocol):
    """``loss(inputs, **settings) -> TokenLoss``; the settings are floats from the recipe.

    Several processes may share a step: they find the loss by its name in its module, and it keeps nothing
    from one call to the next.
    """

    # Any on both stars is how the type system spells "whatever keyword settings you declare".
    def __call__(self, inputs: LossInputs, *args: Any, **settings: Any) -> TokenLoss:
        """Return sum and normaliser of one micro-batch."""
        ...


@runtime_checkable
class AdvantageFn(Protocol):
    """``advantages(rewards) -> tensor``: from the rewards of one group to one advantage per member."""

    def __call__(
        self, rewards: Sequence[float] | Float[Tensor, " members"]
    ) -> Float[Tensor, " members"]:
        """Return one advantage per member, in float64."""
        ...
