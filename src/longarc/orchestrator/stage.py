"""What a stage is given and what it gives back."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from longarc.orchestrator.mixture import FamilyShare
from longarc.records.batch import StepReport
from longarc.records.ports import (
    Engine,
    MetricSink,
    Progress,
    SandboxBackend,
    SessionFactory,
    Trainer,
)
from longarc.records.sampling import Sampling
from longarc.runs.ledger import Ledger

OnStep = Callable[[StepReport], Awaitable[None]]
"""Awaited when a step is recorded and its weights are handed over (checkpoints)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workers:
    """Everybody the loop works with."""

    trainer: Trainer
    engine: Engine
    sessions: SessionFactory
    sandboxes: SandboxBackend
    ledger: Ledger
    sinks: Sequence[MetricSink] = ()
    """Where the metrics of each step go."""
    progress: Progress | None = None
    """Told about each step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSpec:
    """What is sampled in a stage."""

    stage: str
    """Name of the stage in the run."""
    families: Sequence[FamilyShare]
    sampling: Sampling
    """The distribution and the budget of one turn."""
    max_context_tokens: int
    """Budget of a whole rollout [tokens]."""
    run_seed: int
    """Seed from which every rollout's own is derived."""
    split: str = "train"
    """Which tasks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageResult:
    """How a stage ended."""

    num_steps: int
    """Steps that are recorded [optimizer steps]."""
    policy_version: int
    """Version [optimizer steps] of the trainer's weights."""
    is_complete: bool
    """False where the stage was stopped; starting it again continues it."""


def now_s() -> float:
    """Return the event loop's time [seconds], which deadlines and durations are measured in."""
    return asyncio.get_running_loop().time()
