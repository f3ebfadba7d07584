"""From summed gradients to one optimizer step: divide, check, clip, update, say how much."""

import hashlib
import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from longarc.algos.schedule import warmup_constant, warmup_cosine, warmup_linear
from longarc.config.training import OptimizerConfig
from longarc.errors import ContractError


def learning_rate(step: int, config: OptimizerConfig, *, num_steps: int) -> float:
    """Return the rate of 0-based ``step`` of a stage of ``num_steps``."""
    final = config.lr * config.min_lr_frac
    match config.schedule:
        case "constant":
            return warmup_constant(step, peak=config.lr, warmup_steps=config.warmup_steps)
        case "cosine":
            return warmup_cosine(
                step,
                peak=config.lr,
                final=final,
                warmup_steps=config.warmup_steps,
                total_steps=num_steps,
            )
        case "linear":
            return warmup_linear(
                step,
                peak=config.lr,
                final=final,
                warmup_steps=config.warmup_steps,
                total_steps=num_steps,
            )


def divide_gradients(parameters: Sequence[nn.Parameter], normaliser: float) -> None:
    """Divide summed gradients once by the global normaliser of the step.

    Raises:
        ContractError: the normaliser is not positive, so that there is nothing to average over.
    """
    if not normaliser > 0:
        raise ContractError(
            f"the step's loss normaliser is {normaliser}: no token of the batch is trained; the batch "
            f"should have been refused before training"
        )
    grads = [p.grad for p in parameters if p.grad is not None]
    if grads:
        torch._foreach_mul_(grads, 1.0 / normaliser)


def clip_gradients(parameters: Sequence[nn.Parameter], *, max_norm: float) -> float:
    """Scale gradients down to a global norm of ``max_norm``; return the norm before.

    The norm may be infinite or NaN; then gradients are left as they are, for the caller to refuse.
    """
    grads = [p.grad for p in parameters if p.grad is not None]
    if not grads:
        return 0.0
    norm = float(torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads))))
    if math.isfinite(norm) and norm > max_norm:
        torch._foreach_mul_(grads, max_norm / norm)
    return norm


def weights_sha256(*models: nn.Module) -> str:
    """Return the digest of all parameters and buffers, model by model in the order of their names."""
    digest = hashlib.sha256()
    for model in models:
        for name, value in sorted(model.state_dict().items()):
            digest.update(name.encode())
            digest.update(_bytes(value))
    return digest.hexdigest()


def _bytes(value: Tensor) -> bytes:
    return value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
