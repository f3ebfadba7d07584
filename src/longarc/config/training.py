"""Settings of an optimizer step, shared by every stage that trains: its optimizer and its memory."""

from typing import Any, Literal, Self, TypeAlias

from pydantic import Field, field_validator, model_validator

from longarc.config.settings import Settings

LayerChoice: TypeAlias = Literal["none", "all"] | int | tuple[int, ...]
"""Some layers of a model: none, all, every n-th (a number n of at least 2: 0, n, 2n, ...) or a list."""


MuonDtype: TypeAlias = Literal["auto", "float32", "bfloat16"]
"""What the iteration of Muon computes in."""


class OptimizerConfig(Settings):
    """Muon (matrices, split by head and expert) beside AdamW (everything else)."""

    lr: float = Field(2e-3, gt=0)
    """Peak learning rate; Muon updates are scaled to the size of AdamW's, so one rate serves both."""
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    """How the rate falls after the warm-up, down to ``lr * min_lr_frac`` at the last step."""
    min_lr_frac: float = Field(0.1, ge=0, le=1)
    """Rate at the end of the schedule as a fraction of ``lr``; unused when constant."""
    warmup_steps: int = Field(0, ge=0)
    """Linear warm-up [optimizer steps]."""
    weight_decay: float = Field(0.01, ge=0)
    """Decoupled weight decay of matrices; norms, biases and embeddings have none."""
    momentum: float = Field(0.95, ge=0, lt=1)
    """Muon's Nesterov momentum; GLM-4.5."""
    muon_dtype: MuonDtype = "auto"
    """What Muon's iteration computes in: ``auto`` is bfloat16 on a GPU and, on a CPU, the dtype of the weights, which
    is the reference; ``bfloat16`` is several times faster on CPUs that multiply it natively, and slower on others."""
    beta1: float = Field(0.9, ge=0, lt=1)
    """AdamW's first-moment decay."""
    beta2: float = Field(0.95, ge=0, lt=1)
    """AdamW's second-moment decay."""
    grad_clip: float = Field(1.0, gt=0)
    """Largest global gradient norm; larger gradients are scaled down to it."""
    use_muon: bool = True
    """False trains everything with AdamW."""
    embedding_lr_scale: float = Field(1.0, gt=0)
    """Factor on ``lr`` for the embedding and the output projection."""


class ActivationConfig(Settings):
    """What becomes of a layer's activations between forward and backward; memory and time, never results.

    A layer that is both recomputed and offloaded keeps its input alone, and that on disk.
    """

    recomputed_layers: LayerChoice = "none"
    """Layers that keep their input alone and compute the rest again in backward: ``"none"``, ``"all"``, a
    number n for every n-th layer, or a list of layers, counted from 0."""
    offloaded_layers: LayerChoice = "none"
    """Layers whose activations wait in a file, read back one layer ahead of backward; the same words."""
    offload_directory: str | None = None
    """Existing directory of that file, on a disk and not in memory; None is the system's temporary one."""

    @field_validator("recomputed_layers", "offloaded_layers", mode="before")
    @classmethod
    def _names_layers(cls, value: Any) -> Any:
        is_list = isinstance(value, list | tuple) and len(value) > 0
        numbers = value if is_list else [value]
        are_numbers = all(isinstance(n, int) and not isinstance(n, bool) for n in numbers)
        if value in ("none", "all") or (are_numbers and min(numbers) >= (0 if is_list else 2)):
            return value
        raise ValueError(
            f'{value!r} chooses no layers; write "none", "all", a number of at least 2 for every n-th '
            f"layer, or a list of layers, counted from 0"
        )

    @model_validator(mode="after")
    def _directory_is_used(self) -> Self:
        if self.offload_directory is not None and self.offloaded_layers == "none":
            raise ValueError(
                f"offload_directory={self.offload_directory!r} is not used: offloaded_layers is "
                f'"none". Choose layers, or leave the directory out'
            )
        return self


def chosen_layers(choice: LayerChoice, num_layers: int) -> frozenset[int]:
    """Return the layers of a model that a choice means.

    Raises:
        ValueError: a list names a layer that the model does not have.
    """
    if isinstance(choice, tuple):
        beyond = [layer for layer in choice if layer >= num_layers]
        if beyond:
            raise ValueError(
                f"layer {beyond[0]} does not exist: the model has layers 0..{num_layers - 1}"
            )
        return frozenset(choice)
    if choice == "none":
        return frozenset()
    return frozenset(range(0, num_layers, 1 if choice == "all" else choice))
