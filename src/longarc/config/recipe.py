"""A recipe: the model, its tokenizer, the task families and the stages that are run in order."""

from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from longarc.config.cache_rounding import check_can_round_cache
from longarc.config.coherence import (
    check_engine_fits,
    check_keys_are_selected,
    check_model_fits,
    check_names,
)
from longarc.config.drafts import check_can_draft
from longarc.config.engine import EngineConfig
from longarc.config.engine_clients import AnyEngineConfig
from longarc.config.harness import HarnessConfig
from longarc.config.model import ComputeDtype, GlmMoeDsaConfig, ModelConfig
from longarc.config.settings import Settings
from longarc.config.stages import DistillConfig, EvalConfig, RlConfig, SftConfig, StageConfig
from longarc.config.tokenizer import TokenizerConfig
from longarc.config.transformers_model import model_key

INITIAL = "initial"
"""What the weights that a recipe starts from are called, where they stand beside its stages."""


class TaskFamilyConfig(Settings):
    """One task family by import path."""

    path: str
    """``package.module:Class`` of a TaskFamily; called with ``settings`` as keywords."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """Keyword settings of the family, which stages may override."""
    harness: HarnessConfig | None = None
    """The program that works on the tasks in RL, distillation and evaluation, a name or a table; None leaves them to the
    family's own agent loop. Demonstrations are always the family's own."""

    @field_validator("harness", mode="before")
    @classmethod
    def _a_name_is_enough(cls, harness: object) -> object:
        return {"kind": harness} if isinstance(harness, str) else harness


class InitialCheckpoint(Settings):
    """Start from existing weights instead of random ones."""

    path: str
    """A Hugging Face directory (config.json and model.safetensors); it decides the shape of the model."""
    is_sparse: bool = False
    """Whether the weights were trained with sparse attention; False attends densely until a dsa stage."""
    compute_dtype: ComputeDtype | None = None
    """What matrix products are computed in from here on, as ``model.compute_dtype`` of a Llama-type model; None takes
    what config.json says, or float32 where that says nothing."""


class Recipe(Settings):
    """Everything that decides what a run does."""

    name: str = Field(min_length=1, pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]*$")
    """Name of the run's directory under ``runs/`` when none is given."""
    seed: int = Field(0, ge=0, lt=2**63)
    """Seed of everything random."""
    model: ModelConfig = GlmMoeDsaConfig()
    """Shape of the model."""
    initial: InitialCheckpoint | None = None
    """Existing weights to start from; None starts from random ones, which needs a pretrain stage."""
    tokenizer: TokenizerConfig = TokenizerConfig()
    """Where text becomes ids."""
    engine: AnyEngineConfig = EngineConfig()
    """How completions are sampled."""
    sinks: tuple[Literal["tensorboard", "wandb", "mlflow"], ...] = ("tensorboard",)
    """Where metrics go besides ``metrics.jsonl``."""
    trainer_threads: int = Field(1, ge=1)
    """Compute threads of a trainer while sampling goes on, beside the engine's ``engine.num_threads``."""
    threads: int = Field(2, ge=1)
    """Cores of whatever computes alone: as many processes of one thread for gradients, as many threads
    for an engine with which the trainer takes turns; at most the cores there are."""
    tasks: dict[str, TaskFamilyConfig] = Field(default_factory=dict)
    """Task families by the name that stages use."""
    stages: dict[str, StageConfig] = Field(min_length=1)
    """The stages by name, run in the order they are written."""

    @model_validator(mode="after")
    def _stage_order_works(self) -> Self:
        trained: list[str] = []
        has_weights = self.initial is not None
        for name, stage in self.stages.items():
            if stage.kind == "pretrain" and has_weights:
                raise ValueError(
                    f"stage {name!r} is a pretrain but weights already exist before it "
                    f"(from {trained or 'initial'}); move it to the front or remove it"
                )
            if stage.kind == "pretrain":
                has_weights = True
            if not has_weights:
                raise ValueError(
                    f"stage {name!r} ({stage.kind}) has no weights to start from: put a pretrain stage "
                    f"before it or set initial.path"
                )
            self._check_tasks(name, stage)
            self._check_references(name, stage, trained)
            if stage.kind != "eval":
                trained.append(name)
        if self.tokenizer.path is None and self.initial is not None:
            raise ValueError(
                "initial.path needs tokenizer.path: the tokenizer must be the one of the weights"
            )
        return self

    @model_validator(mode="after")
    def _parts_fit(self) -> Self:
        check_names("stage", self.stages)
        check_names("task family", self.tasks)
        own = self.model if self.initial is None else None
        check_engine_fits(self.engine, self.stages, model=own)
        check_keys_are_selected(
            self.stages, is_sparse=self.initial is not None and self.initial.is_sparse
        )
        if self.initial is not None:
            return (
                self  # the weights bring the shape of the model, which is checked when it is known
            )
        check_model_fits(self.model, self.stages)
        check_can_draft(self.engine, self.model, self.stages)
        check_can_round_cache(self.engine, self.model, self.stages)
        if self.tokenizer.path is None and self.tokenizer.vocab_size > self.model.vocab_size:
            key = model_key(self.model, "vocab_size")
            raise ValueError(
                f"tokenizer.vocab_size={self.tokenizer.vocab_size} exceeds {key}={self.model.vocab_size}: ids "
                f"above would have no embedding. Raise {key} or lower tokenizer.vocab_size"
            )
        return self

    def _check_tasks(self, name: str, stage: StageConfig) -> None:
        used: set[str] = set()
        if isinstance(stage, SftConfig | RlConfig | DistillConfig | EvalConfig):
            used = set(stage.tasks)
        elif stage.demonstrations is not None:
            used = set(stage.demonstrations.tasks)
        if used:
            unknown = sorted(used - set(self.tasks))
            if unknown:
                raise ValueError(
                    f"stage {name!r} uses task families {unknown}, but the recipe's [tasks] has {sorted(self.tasks)}"
                )

    def _check_references(self, name: str, stage: StageConfig, trained: list[str]) -> None:
        if isinstance(stage, DistillConfig):
            referenced, what = sorted(set(stage.teachers.values())), "teachers"
        elif isinstance(stage, EvalConfig):
            referenced, what = stage.stages, "stages"
        else:
            return
        available = [*([] if self.initial is None else [INITIAL]), *trained]
        unknown = sorted(set(referenced) - set(available))
        if unknown:
            raise ValueError(
                f"stage {name!r}: {what} {unknown} are not training stages before it; available: {available}"
            )
