"""Sessions of rollouts, with both doors: in this process, and over HTTP for the programs of a box.

::

    env --chat--------------------------------> GatewaySession --> engine
    env --serve(listener)--> HTTP door --key--^
                                 ^
    program in the box ----------+  any of the dialects

All rollouts share one HTTP application. A rollout has a key of its own, which is revoked when its door closes.
"""

import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from starlette.applications import Starlette

from longarc.errors import EngineError
from longarc.gateway.access import RolloutAccess
from longarc.gateway.budget import BudgetExhausted
from longarc.gateway.core import Gateway
from longarc.gateway.http import build_app
from longarc.gateway.recorded import last_conversation, newest_work
from longarc.gateway.server import serving
from longarc.gateway.session import GatewaySession
from longarc.records.lineage import Lineage
from longarc.records.message import Message, ToolSpec
from longarc.records.outcome import Outcome
from longarc.records.ports import AssistantTurn, ContextExhausted, ContextUse
from longarc.records.sampling import Sampling
from longarc.records.segment import Segment
from longarc.records.turn import Turn


class RolloutSessions:
    """Opens the sessions of rollouts; satisfies ``SessionFactory``."""

    def __init__(self, gateway: Gateway) -> None:
        self.gateway = gateway
        self.access = RolloutAccess()

    @cached_property
    def app(self) -> Starlette:
        """The HTTP door; most runs have no program that needs it."""
        return build_app(self.gateway, self.access)

    def open(
        self, session_id: str, *, sampling: Sampling, thinking: bool, max_context_tokens: int
    ) -> "RolloutSession":
        """Open the session of one rollout; see ``Gateway.open``."""
        session = self.gateway.open(
            session_id,
            sampling=sampling,
            thinking=thinking,
            max_context_tokens=max_context_tokens,
        )
        return RolloutSession(self, session)


@dataclass(slots=True)
class RolloutSession:
    """The session of one rollout; satisfies ``PolicySession``."""

    sessions: RolloutSessions
    session: GatewaySession

    async def chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[ToolSpec] = (),
        max_new_tokens: int | None = None,
        tool_choice: Literal["auto", "none"] = "auto",
        lineage: Lineage | None = None,
    ) -> AssistantTurn:
        """Send the whole conversation, get the policy's next message; see ``PolicyClient.chat``."""
        return await self.session.chat(
            messages,
            tools=tools,
            max_new_tokens=max_new_tokens,
            tool_choice=tool_choice,
            lineage=lineage,
        )

    def context_use(
        self, messages: Sequence[Message], *, tools: Sequence[ToolSpec] = ()
    ) -> ContextUse:
        """Say how full the context would be; see ``PolicyClient.context_use``."""
        return self.session.context_use(messages, tools=tools)

    @asynccontextmanager
    async def serve(
        self, listener: socket.socket, *, max_requests: int
    ) -> AsyncIterator["ServedSession"]:
        """Answer programs; see ``ServablePolicy.serve``."""
        self.session.limit_requests(max_requests)
        key = self.sessions.access.admit(self.session)
        try:
            # At the end the program is gone; what it left behind is not waited for long.
            async with serving(self.sessions.app, listener, grace_s=1) as url:
                yield ServedSession(self.session, base_url=f"{url}/s/{key}", key=key)
        finally:
            self.sessions.access.revoke(key)

    def segments(self) -> tuple[Segment, ...]:
        """Everything the engine saw and sampled, one segment per branch; also after closing."""
        return self.session.segments()

    def turns(self) -> tuple[Turn, ...]:
        """What was said and answered turn by turn, where a program asked; also after closing."""
        return self.session.turns()

    def tools(self) -> tuple[ToolSpec, ...]:
        """The tools of the main agent's newest conversation, where a program asked."""
        return self.session.tools()

    async def close(self) -> None:
        """Revoke the session; closing twice is allowed."""
        await self.session.close()


@dataclass(frozen=True, slots=True)
class ServedSession:
    """A session that is served; satisfies ``ServedPolicy``."""

    session: GatewaySession
    base_url: str
    key: str

    @property
    def max_context_tokens(self) -> int:
        """Prompt and answer together [tokens]."""
        return self.session.settings.max_context_tokens

    @property
    def max_new_tokens(self) -> int:
        """Of one answer [tokens]."""
        return self.session.settings.sampling.max_new_tokens

    @property
    def num_requests(self) -> int:
        """Requests that came, answered or not."""
        return self.session.num_requests

    @property
    def num_turns(self) -> int:
        """Requests that were answered."""
        return self.session.num_turns

    @property
    def exhausted(self) -> Outcome | None:
        """How the rollout ended where there was no room, no budget, or the main agent's newest answer was cut."""
        failure = self.session.last_failure
        if isinstance(failure, BudgetExhausted) and failure.what == "requests":
            return Outcome.TRUNCATED_TURNS
        newest = newest_work(self.session)
        is_cut = newest is not None and self.session.turns()[newest].finish_reason == "length"
        is_full = isinstance(failure, ContextExhausted)
        return Outcome.TRUNCATED_TOKENS if is_full or is_cut else None

    @property
    def engine_error(self) -> EngineError | None:
        """What the last request failed of, if the engine failed it."""
        failure = self.session.last_failure
        return failure if isinstance(failure, EngineError) else None

    @property
    def refusal(self) -> str | None:
        """Why the last request was refused, where it asked for something that is not done here."""
        return self.session.last_refusal

    def conversation(self) -> tuple[Message, ...]:
        """Return the main agent's conversation up to its newest answer."""
        return last_conversation(self.session)
