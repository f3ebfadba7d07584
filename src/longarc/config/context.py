"""How an agent loop keeps its context within bounds; a setting of task families that have tools."""

from typing import Annotated, Literal, TypeAlias

from pydantic import Field

from longarc.config.settings import Settings


class KeepRecentContext(Settings):
    """Only the newest tool results are shown; older ones are folded, reasoning and calls stay; GLM-5, 4.2.4."""

    policy: Literal["keep_recent"] = "keep_recent"
    """Which policy this is."""
    keep_recent: int = Field(5, ge=0)
    """Newest rounds (a call with its results) whose results are shown [rounds]; GLM-5: 5."""


class HierarchicalContext(Settings):
    """Folds as ``keep_recent`` and, where that is not enough, forgets all tool history; GLM-5, 4.2.4."""

    policy: Literal["hierarchical"] = "hierarchical"
    """Which policy this is."""
    keep_recent: int = Field(5, ge=0)
    """As in ``keep_recent`` [rounds]."""
    discard_above_tokens: int = Field(32_000, ge=1)
    """A longer prompt makes the rollout start again from its task [tokens]; GLM-5: 32k."""


class SummaryContext(Settings):
    """The policy itself writes a summary when room runs out, and goes on from it; CompactionRL."""

    policy: Literal["summary"] = "summary"
    """Which policy this is."""
    below_unused_tokens: int = Field(10_240, ge=1)
    """Less room than this behind the prompt asks for a summary [tokens]; CompactionRL: 10,240."""
    keep_rounds: int = Field(2, ge=0)
    """Newest rounds that stay as they are beside the summary, fewer where they do not fit [rounds]; CompactionRL: 2."""
    max_compactions: int = Field(3, ge=1)
    """Summaries in one rollout; CompactionRL: 3."""
    max_summary_tokens: int | None = Field(None, ge=1)
    """Budget of a summary [tokens]; None leaves it to ``rollout.max_new_tokens``."""
    request: str = Field(
        "The context is nearly full. Write a summary of what was found and done so far and of what is left to do; "
        "only the summary and the last steps will be kept.",
        min_length=1,
    )
    """What the policy is asked; the papers do not print theirs."""
    resumption: str = Field("Summary of the work so far:\n{summary}", pattern=r"\{summary\}")
    """How the summary stands behind the task; ``{summary}`` is replaced."""


ContextConfig: TypeAlias = Annotated[
    KeepRecentContext | HierarchicalContext | SummaryContext, Field(discriminator="policy")
]
"""One of the policies."""
