"""Tries the loss of a stage before the first one starts: on two segments of two tokens, sampled by the policy itself.

What a loss refuses for good (bounds that exclude the ratio 1, one advantage for each segment where a teacher gives one
for each token, a result that is no ``TokenLoss``) is then said at once and not after hours of training.
"""

import inspect
import math

import torch

from longarc.algos.protocols import LossInputs, PolicyLoss
from longarc.algos.token_loss import TokenLoss
from longarc.config.load_object import load_object
from longarc.config.stages import DistillConfig, RlConfig
from longarc.errors import ConfigError, boundary


def check_loss(name: str, stage: RlConfig | DistillConfig) -> PolicyLoss:
    """Load the loss of a stage and try it.

    Raises:
        ConfigError: there is none at its path, it does not take its settings, or it fails on the smallest batch.
    """
    config = stage.loss
    loss: PolicyLoss = load_object(config.path, kind=PolicyLoss)
    what = f"stage {name!r}: loss {config.path!r}"
    try:
        signature = inspect.signature(loss)
    except (TypeError, ValueError):
        pass  # compiled code has none; a wrong setting shows in the trial
    else:
        try:
            signature.bind(None, **config.settings)
        except TypeError as error:
            raise ConfigError(
                f"{what} does not take settings {config.settings}: {error}. Its signature is {signature}"
            ) from error
    inputs = trial_inputs(has_teacher=isinstance(stage, DistillConfig))
    said = f"{what} with settings {config.settings} fails on two segments of two on-policy tokens"
    try:
        with boundary(ConfigError, said):
            out = loss(inputs, **config.settings)
            _check_result(out)
            out.loss_sum.backward()  # type: ignore[no-untyped-call]
    except ConfigError as error:
        if str(error).startswith(what):
            raise
        raise ConfigError(f"{what}: {error}") from error
    return loss


def trial_inputs(*, has_teacher: bool) -> LossInputs:
    """Return what a stage would give its loss: advantages that differ in a segment only where a teacher gives them."""
    policy = torch.tensor([-0.5, -1.0, -2.0, -0.25], requires_grad=True)
    constant = policy.detach()
    advantages = [0.5, -0.25, -1.0, 0.75] if has_teacher else [0.5, 0.5, -0.5, -0.5]
    return LossInputs(
        policy_logprobs=policy,
        proximal_logprobs=constant,
        behaviour_logprobs=constant.clone(),
        advantages=torch.tensor(advantages),
        train_mask=torch.ones(4, dtype=torch.bool),
        token_weights=torch.ones(4),
        sequence_ids=torch.tensor([0, 0, 1, 1]),
    )


def _check_result(out: object) -> None:
    if not isinstance(out, TokenLoss):
        raise ConfigError(
            f"it returns a {type(out).__name__}; a loss returns longarc.algos.token_loss.TokenLoss"
        )
    for field in ("loss_sum", "normaliser", "num_rejected"):
        value = getattr(out, field).item()
        if not math.isfinite(value):
            raise ConfigError(f"its {field} is {value} on two segments of two on-policy tokens")
