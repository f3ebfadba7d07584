"""What one optimizer step consumes and what it reports."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from longarc.records.metric import Metric
from longarc.records.trajectory import Group


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Groups of one optimizer step."""

    stage: str
    step: int
    """0-based index of the step in its stage."""
    groups: tuple[Group, ...]
    trainer_version: int
    """Version [optimizer steps] of the weights before this step."""
    resets_optimizer: bool = False
    """True where weights were pushed to the engine since the last step, so that Adam moments start anew."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenReport:
    """Per-token results for one segment, kept for the report; aligned with the segment's tokens."""

    trajectory_id: str
    segment_order: int
    policy_logprobs: tuple[float, ...]
    """log pi [nats] at the start of the step; 0.0 where not trained."""
    advantages: tuple[float, ...]
    values: tuple[float, ...] = ()
    """V [reward units] of the critic at the start of the step; 0.0 where not trained, empty without a critic."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """What one optimizer step did."""

    step: int
    policy_version: int
    """Version [optimizer steps] of the weights after the step."""
    weights_sha256: str
    """Digest of the parameters after the step: equal digests mean bit-identical weights."""
    num_trained_tokens: int
    metrics: tuple[Metric, ...]
    token_reports: tuple[TokenReport, ...] = ()
    """A sample of segments, for the viewer; empty in most steps."""
    histograms: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """Named samples of per-token quantities (log-ratios at lag 0, ...) for the report."""
