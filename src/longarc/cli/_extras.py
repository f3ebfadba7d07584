"""Packages that ``pip install longarc`` leaves out, and the extra that brings each."""

from collections.abc import Mapping
from typing import Final

from longarc.errors import ResourceError

EXTRAS: Final[Mapping[str, str]] = {
    "torch": "train",
    "safetensors": "train",
    "jaxtyping": "train",
    "reasoning_gym": "train",
    "tensorboardX": "train",
    "transformers": "hf",
    "wandb": "wandb",
    "mlflow": "mlflow",
    "triton": "triton",
    "llguidance": "train",
}
"""Extra by the name under which its package is imported."""


def lacking(error: ModuleNotFoundError) -> ResourceError | None:
    """Return what to say of a package that is not installed; None where no extra of LongArc brings it."""
    package = (error.name or "").partition(".")[0]
    extra = EXTRAS.get(package)
    if extra is None:
        return None
    return ResourceError(
        f"this needs the package {package}, which is not installed: pip install 'longarc[{extra}]'"
    )
