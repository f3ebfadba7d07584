"""The record of one rollout, and the group it is compared in."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from longarc.records.message import Json, Message, ToolSpec
from longarc.records.outcome import Outcome
from longarc.records.segment import Segment
from longarc.records.task import Task
from longarc.records.turn import Turn


@dataclass(frozen=True, slots=True, kw_only=True)
class Reward:
    """What a grader says of an episode."""

    value: float
    """The number that is trained on; finite."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """Named components, for people to read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeResult:
    """What an environment hands to the grader when the rollout is over."""

    outcome: Outcome
    messages: tuple[Message, ...]
    """The whole conversation, opening messages included, as it stood at the end."""
    num_turns: int
    info: Mapping[str, Json] = field(default_factory=dict)
    """Counters and facts of the environment (tool errors, files read); shown in the viewer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """The right to run one rollout; its id becomes the trajectory's."""

    trajectory_id: str
    """Unique in the run: ``stage/group_index/member_index/attempt``."""
    stage: str
    group_id: str
    group_index: int
    """Position of the group in the stage's admission order."""
    member_index: int
    attempt: int
    """0 at first; grows when a rollout is admitted again after a cancellation or a crash."""
    task: Task
    policy_version: int
    """Newest weights [optimizer steps] that the engine had at admission."""
    seed: int
    """Seed of everything random in this rollout's environment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """The record of one rollout."""

    id: str
    stage: str
    group_id: str
    task_id: str
    family: str
    outcome: Outcome
    reward: float | None
    """None where the outcome is not the policy's own doing."""
    reward_parts: Mapping[str, float]
    segments: tuple[Segment, ...]
    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...]
    num_turns: int
    difficulty: float
    started_at_s: float
    """Wall-clock start [seconds since the epoch]."""
    duration_s: float
    error: str | None = None
    """What went wrong, where the outcome is an environment's or a control one."""
    info: Mapping[str, Json] = field(default_factory=dict)
    turns: tuple[Turn, ...] = ()
    """What was said and answered, turn by turn, where the agent owns its context; empty elsewhere."""

    @property
    def num_trained_tokens(self) -> int:
        """Tokens that carry a gradient [tokens]."""
        return sum(segment.num_trained_tokens for segment in self.segments)

    @property
    def num_sampled_tokens(self) -> int:
        """Tokens the policy sampled, each counted once per segment it stands in [tokens]."""
        return sum(sum(segment.is_sampled) for segment in self.segments)

    def lag(self, *, trainer_version: int) -> int:
        """Staleness [optimizer steps] of the oldest sampled token of any segment."""
        return max((s.lag(trainer_version=trainer_version) for s in self.segments), default=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Trajectories of one task that are compared with each other in one step."""

    id: str
    task_id: str
    family: str
    trajectories: tuple[Trajectory, ...]
    """Distinct trajectories, all trainable."""
    multiplicities: tuple[int, ...]
    """How often each trajectory counts (group repair repeats members); at least 1."""
