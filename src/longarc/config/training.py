"""Settings of one optimizer: shared by every stage that trains."""

from typing import Literal

from pydantic import Field

from longarc.config.settings import Settings


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
