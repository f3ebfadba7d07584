"""Keeps the context of one rollout within bounds, before each answer of the policy.

The tool loop owns the conversation; a manager says what of it the next request shows, and may replace it. Each
request carries its lineage, so that the session's segments know windows and summaries.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

from longarc.config.context import (
    ContextConfig,
    HierarchicalContext,
    KeepRecentContext,
    SummaryContext,
)
from longarc.envs.context import folded, must_discard, must_summarise, resumed, rounds
from longarc.errors import ConfigError
from longarc.records.lineage import Lineage
from longarc.records.message import Message, Role, ToolSpec
from longarc.records.ports import PolicyClient
from longarc.records.segment import SegmentKind


class ContextManager(Protocol):
    """One policy of context management at work in one rollout."""

    async def fit(self, messages: list[Message], policy: PolicyClient) -> tuple[Message, ...]:
        """Return what the next request shows of a conversation, which may be shortened for good.

        Args:
            messages: the conversation; changed in place where history is given up.
            policy: tells how full the context is, and may be asked for a summary.

        Raises:
            ContextExhausted: there is no room for what the policy has to be asked.
        """
        ...

    @property
    def lineage(self) -> Lineage | None:
        """What the next request says of itself."""
        ...

    @property
    def counts(self) -> Mapping[str, int]:
        """What was done so far, for the episode's ``info``."""
        ...


class WholeContext:
    """Shows everything."""

    lineage: Lineage | None = None
    counts: Mapping[str, int] = {}

    async def fit(self, messages: list[Message], policy: PolicyClient) -> tuple[Message, ...]:
        """Return the whole conversation."""
        return tuple(messages)


class FoldingContext:
    """Folds old results; above a bound it discards the whole tool history."""

    def __init__(
        self,
        *,
        num_opening: int,
        tools: Sequence[ToolSpec],
        keep_recent: int,
        discard_above_tokens: int | None,
    ) -> None:
        """Start a rollout.

        Args:
            num_opening: messages of the task.
            tools: the tools of every request.
            keep_recent: rounds that show their results.
            discard_above_tokens: bound of a prompt [tokens]; None never discards.
        """
        self._num_opening = num_opening
        self._tools = tools
        self._keep_recent = keep_recent
        self._discard_above_tokens = discard_above_tokens
        self._num_discards = 0
        self._num_folded = 0

    @property
    def lineage(self) -> Lineage:
        """A window for each time that history was discarded."""
        return Lineage(kind=SegmentKind.EXEC, window=self._num_discards)

    @property
    def counts(self) -> Mapping[str, int]:
        """Folded rounds and discarded histories."""
        counts = {"num_folded_rounds": self._num_folded}
        if self._discard_above_tokens is not None:
            counts["num_discards"] = self._num_discards
        return counts

    async def fit(self, messages: list[Message], policy: PolicyClient) -> tuple[Message, ...]:
        """Return the conversation with old results folded, or the bare task where that is too long."""
        shown = self._folded(messages)
        bound = self._discard_above_tokens
        if bound is not None:
            use = policy.context_use(shown, tools=self._tools)
            if bound >= use.max_tokens:
                raise ConfigError(
                    f"context.discard_above_tokens={bound} is never reached: the session's context has "
                    f"{use.max_tokens} tokens (rollout.max_context_tokens). Lower it, or raise that"
                )
            has_history = len(messages) > self._num_opening
            if has_history and must_discard(use.num_tokens, above_tokens=bound):
                del messages[self._num_opening :]
                self._num_discards += 1
                return tuple(messages)
        num_rounds = len(rounds(messages, num_opening=self._num_opening))
        if num_rounds > self._keep_recent:
            self._num_folded += 1
        return shown

    def _folded(self, messages: Sequence[Message]) -> tuple[Message, ...]:
        return folded(messages, num_opening=self._num_opening, keep_recent=self._keep_recent)


class SummarisingContext:
    """Has the policy sum up when room runs out."""

    def __init__(
        self, config: SummaryContext, *, opening: Sequence[Message], tools: Sequence[ToolSpec]
    ) -> None:
        """Start a rollout.

        Args:
            config: when and how.
            opening: the task.
            tools: the tools of every request, summaries included: without them the prompt's first tokens would
                change, and every stored turn with them.
        """
        self._config = config
        self._opening = tuple(opening)
        self._num_opening = len(opening)
        self._tools = tools
        self._num_compactions = 0

    @property
    def lineage(self) -> Lineage:
        """A window behind each summary."""
        return Lineage(kind=SegmentKind.EXEC, window=self._num_compactions)

    @property
    def counts(self) -> Mapping[str, int]:
        """Summaries."""
        return {"num_compactions": self._num_compactions}

    async def fit(self, messages: list[Message], policy: PolicyClient) -> tuple[Message, ...]:
        """Return the conversation, which begins anew with a summary where room has run out."""
        config = self._config
        done = rounds(messages, num_opening=self._num_opening)
        use = policy.context_use(messages, tools=self._tools)
        if config.below_unused_tokens >= use.max_tokens:
            raise ConfigError(
                f"context.below_unused_tokens={config.below_unused_tokens} is always reached: the session's context "
                f"has {use.max_tokens} tokens (rollout.max_context_tokens). Lower it, or raise that"
            )
        if not done or not must_summarise(
            use.num_unused_tokens,
            below_tokens=config.below_unused_tokens,
            num_compactions=self._num_compactions,
            max_compactions=config.max_compactions,
        ):
            return tuple(messages)
        turn = await policy.chat(
            [*messages, Message(role=Role.USER, content=config.request)],
            tools=self._tools,
            max_new_tokens=config.max_summary_tokens,
            tool_choice="none",
            lineage=Lineage(kind=SegmentKind.SUMMARY, window=self._num_compactions),
        )
        self._num_compactions += 1
        text = config.resumption.replace("{summary}", turn.message.content)
        messages[:] = self._shortest(text, done, policy)
        return tuple(messages)

    def _shortest(
        self, text: str, done: Sequence[Sequence[Message]], policy: PolicyClient
    ) -> tuple[Message, ...]:
        """Return the conversation behind a summary, with as many of the newest rounds as leave room."""
        most = min(self._config.keep_rounds, len(done))
        for num_kept in range(most, -1, -1):
            messages = resumed(self._opening, text, done[len(done) - num_kept :])
            use = policy.context_use(messages, tools=self._tools)
            if use.num_unused_tokens >= self._config.below_unused_tokens:
                break
        return messages


def make_context(
    config: ContextConfig | None, *, opening: Sequence[Message], tools: Sequence[ToolSpec]
) -> ContextManager:
    """Return the manager of one rollout.

    Args:
        config: which policy; None shows everything.
        opening: the task.
        tools: the tools of every request.
    """
    match config:
        case None:
            return WholeContext()
        case KeepRecentContext():
            return FoldingContext(
                num_opening=len(opening),
                tools=tools,
                keep_recent=config.keep_recent,
                discard_above_tokens=None,
            )
        case HierarchicalContext():
            return FoldingContext(
                num_opening=len(opening),
                tools=tools,
                keep_recent=config.keep_recent,
                discard_above_tokens=config.discard_above_tokens,
            )
        case SummaryContext():
            return SummarisingContext(config, opening=opening, tools=tools)
