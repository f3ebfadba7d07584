"""What every stage of a run shares: its directory, tokenizer, checkpoints, sinks and the wish to stop."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

from pydantic import TypeAdapter, ValidationError

from longarc.config.load_object import load_object
from longarc.config.model import ModelConfig
from longarc.config.recipe import INITIAL, Recipe
from longarc.config.settings import problems_of
from longarc.config.stages import TaskShare
from longarc.config.transformers_model import model_key
from longarc.errors import CheckpointError, ConfigError, boundary
from longarc.models.build import build_model
from longarc.models.decoder_base import Decoder
from longarc.models.hf_weights import load_pretrained_dir, load_weights, save_weights
from longarc.pipeline.harness import played_by
from longarc.records.metric import Metric, combine
from longarc.records.ports import MetricSink, Progress, TaskFamily
from longarc.runs.checkpoint import Manifest, read_manifest, verify
from longarc.runs.directory import RunDirectory
from longarc.runs.ledger import Ledger
from longarc.tokens.chat_format import ChatFormat
from longarc.tokens.formats import make_chat_format
from longarc.tokens.template_source import TemplateSource
from longarc.tokens.tokenizer import Tokenizer
from longarc.trainer.data_parallel import GradientPool

Attention = Literal["dense", "sparse"]

TOKENIZER_FILE = "tokenizer.json"
"""Name of the run's tokenizer in the run directory."""
_TEMPLATE_FILE = "chat_template.json"
"""Name of the run's copy of the chat template, where it uses one."""

_MODEL_CONFIG: TypeAdapter[ModelConfig] = TypeAdapter(ModelConfig)


class Interrupted(KeyboardInterrupt):
    """The user asked to stop; everything is saved and the run can be resumed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A checkpoint in memory."""

    model: Decoder
    manifest: Manifest
    path: Path

    @property
    def attention(self) -> Attention:
        """How the model attends: sparse once the dsa stage is behind it."""
        return "sparse" if self.manifest.info.get("attention") == "sparse" else "dense"


@dataclass(frozen=True, slots=True, kw_only=True)
class Workspace:
    """One run while it goes."""

    recipe: Recipe
    run: RunDirectory
    ledger: Ledger
    sink: MetricSink
    progress: Progress
    gradients: GradientPool
    """Processes that share the gradients of a step."""
    stop: asyncio.Event

    @property
    def tokenizer_path(self) -> Path:
        """Where the run's tokenizer is."""
        return self.run.path / TOKENIZER_FILE

    def tokenizer(self) -> Tokenizer:
        """Load the run's tokenizer, copying the recipe's into the run first where it names one."""
        if not self.tokenizer_path.exists():
            source = self.recipe.tokenizer.path
            if source is None:
                raise ConfigError(
                    f"{self.tokenizer_path} does not exist yet: the pretrain stage trains it; run that first"
                )
            Tokenizer.load(Path(source)).save(self.tokenizer_path)
        tokenizer = Tokenizer.load(self.tokenizer_path)
        if self.recipe.initial is None:
            check_fits(tokenizer, self.recipe.model)
        return tokenizer

    def chat_format(self) -> ChatFormat:
        """Return the run's chat format over its tokenizer."""
        name = self.recipe.tokenizer.chat_format
        template = self._template() if name == "template" else None
        return make_chat_format(name, self.tokenizer(), template=template)

    def _template(self) -> TemplateSource:
        """Return the run's chat template, copying the recipe's into the run first."""
        path = self.run.path / _TEMPLATE_FILE
        if not path.exists():
            config = self.recipe.tokenizer
            beside = "." if config.path is None else Path(config.path).parent
            TemplateSource.read(
                Path(config.template or beside),
                values=config.template_values,
                date=config.template_date,
            ).save(path)
        return TemplateSource.load(path)

    def input_checkpoint(self, stage: str) -> Path:
        """Return the final checkpoint of the training stage before ``stage``."""
        previous: str | None = None
        for name, config in self.recipe.stages.items():
            if name == stage:
                break
            if config.kind != "eval":
                previous = name
        return self._initial() if previous is None else self.final(previous)

    def _initial(self) -> Path:
        """Import the recipe's Hugging Face weights as a checkpoint, once."""
        if self.recipe.initial is None:
            raise ConfigError(
                "the first stage needs weights: put a pretrain stage before it or set initial.path"
            )
        directory = self.run.stage(INITIAL)
        done = directory.final()
        if done is not None:
            return done
        initial = self.recipe.initial
        model = load_pretrained_dir(initial.path, compute_dtype=initial.compute_dtype)
        check_fits(self.tokenizer(), model.config, is_given=True)
        fields = self.manifest_fields(
            stage=INITIAL,
            step=0,
            policy_version=0,
            model=model,
            attention="sparse" if self.recipe.initial.is_sparse else "dense",
        )
        path = directory.writer(keep_last=1).write(
            lambda p: save_weights(model, p / "model.safetensors"),
            **fields,  # type: ignore[arg-type]
        )
        directory.set_final(path)
        return path

    def final(self, stage: str) -> Path:
        """Return the final checkpoint of a finished stage, or what the recipe starts from."""
        if stage == INITIAL:
            return self._initial()
        path = self.run.stage(stage).final()
        if path is None:
            raise CheckpointError(
                f"stage {stage!r} of {self.run.path} is not finished: it has no final checkpoint. "
                f"Resume the run first."
            )
        return path

    def load(self, checkpoint: Path) -> Loaded:
        """Build the model of a checkpoint and load its weights, after verifying every file."""
        return load_checkpoint(checkpoint, tokenizer_sha256=self._tokenizer_sha256())

    def manifest_fields(
        self, *, stage: str, step: int, policy_version: int, model: Decoder, attention: Attention
    ) -> dict[str, object]:
        """Return what a checkpoint of this run says of itself."""
        return {
            "kind": "policy",
            "stage": stage,
            "step": step,
            "policy_version": policy_version,
            "model": model.config.model_dump(mode="json"),
            "tokenizer_sha256": self._tokenizer_sha256(),
            "info": {"attention": attention, "chat_format": self.recipe.tokenizer.chat_format},
        }

    def families(self, shares: Mapping[str, TaskShare]) -> dict[str, TaskFamily]:
        """Build the task families of a stage's rollouts; see :func:`rollout_family`."""
        return {name: rollout_family(self.recipe, name, share) for name, share in shares.items()}

    def record(self, stage: str, step: int, num_steps: int, metrics: Sequence[Metric]) -> None:
        """Write the metrics of 1-based ``step`` and show them."""
        self.sink.write(stage=stage, step=step, values=combine(metrics))
        self.progress.update(stage=stage, step=step, num_steps=num_steps, metrics=metrics)

    def check_stop(self) -> None:
        """Raise where the user asked to stop."""
        if self.stop.is_set():
            raise Interrupted

    def _tokenizer_sha256(self) -> str | None:
        if not self.tokenizer_path.exists():
            return None
        return _tokenizer_digest(self.tokenizer_path, self.tokenizer_path.stat().st_mtime_ns)


@lru_cache(maxsize=8)
def _tokenizer_digest(path: Path, modified_ns: int) -> str:
    """Digest of a tokenizer's file; its time of change is part of the key."""
    return Tokenizer.load(path).digest


def rollout_family(recipe: Recipe, name: str, share: TaskShare) -> TaskFamily:
    """Build one task family of a stage whose tasks are worked on: by the recipe's harness where it names one.

    Raises:
        ConfigError: as ``task_family``, or the harness is wrong or not installed.
    """
    family, harness = task_family(recipe, name, share), recipe.tasks[name].harness
    if harness is None:
        return family
    return played_by(harness, family, where=f"tasks.{name}.harness")


def task_family(recipe: Recipe, name: str, share: TaskShare) -> TaskFamily:
    """Build one task family of a stage that samples, as it is without a harness.

    Raises:
        ConfigError: the import path is wrong, the family refuses its settings, or it has no tasks.
    """
    family = family_object(recipe, name, share)
    if not isinstance(family, TaskFamily):
        raise ConfigError(
            f"tasks.{name}: {recipe.tasks[name].path} is not a TaskFamily: it needs name, thinking, tasks(), open() "
            f"and grade() (longarc.records.ports). What only has demonstration() is for sft"
        )
    return family


def family_object(recipe: Recipe, name: str, share: TaskShare) -> object:
    """Build what a recipe names as a task family: the recipe's settings under the stage's own.

    Raises:
        ConfigError: the import path is wrong, or the family refuses its settings.
    """
    config = recipe.tasks[name]
    settings = {**config.settings, **share.settings}
    factory = load_object(config.path, kind=type)
    with boundary(ConfigError, f"tasks.{name}: {config.path} with settings {settings}"):
        return factory(**settings)


def load_checkpoint(checkpoint: Path, *, tokenizer_sha256: str | None = None) -> Loaded:
    """Build the model of a checkpoint and load its weights.

    Raises:
        CheckpointError: it is damaged, or belongs to another tokenizer.
    """
    manifest = verify(checkpoint)
    if tokenizer_sha256 and manifest.tokenizer_sha256 not in (None, tokenizer_sha256):
        raise CheckpointError(
            f"{checkpoint} was trained with tokenizer {str(manifest.tokenizer_sha256)[:12]}, but this run's is "
            f"{tokenizer_sha256[:12]}: ids would mean other text. Use the tokenizer.json of the run it comes from."
        )
    model = build_model(model_config(manifest.model), seed=0)
    load_weights(model, str(checkpoint / "model.safetensors"))
    return Loaded(model=model, manifest=read_manifest(checkpoint), path=checkpoint)


def model_config(raw: Mapping[str, object]) -> ModelConfig:
    """Return the model config that a manifest holds.

    Raises:
        CheckpointError: this version builds no such model.
    """
    try:
        return _MODEL_CONFIG.validate_python(raw)
    except ValidationError as error:
        raise CheckpointError(
            f"the manifest describes a model that this LongArc does not build: {problems_of(error)}. Use the "
            f"LongArc that wrote the checkpoint"
        ) from error


def check_fits(tokenizer: Tokenizer, model: ModelConfig, *, is_given: bool = False) -> None:
    """Refuse a tokenizer with ids that the model has no embedding for; see ``check_model_fits``."""
    if tokenizer.vocab_size > model.vocab_size:
        key = "the given model's vocab_size" if is_given else model_key(model, "vocab_size")
        raise ConfigError(
            f"the tokenizer has {tokenizer.vocab_size} ids but {key}={model.vocab_size}: ids above "
            f"would have no embedding. {'Use' if is_given else f'Raise {key} or use'} the model's own tokenizer."
        )
