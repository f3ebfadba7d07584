"""The gateway's core: sessions over one engine, behind whatever door a policy is reached through.

In-process environments hold a session and call ``chat``; ``http`` translates a wire format to the same
call. There is one way from messages to tokens.
"""

import time
from collections.abc import Callable, Iterable

from longarc.errors import ConfigError, ContractError
from longarc.gateway.asked import RecognitionRules
from longarc.gateway.budget import SessionBudget
from longarc.gateway.openings import Openings
from longarc.gateway.session import GatewaySession
from longarc.gateway.session_settings import SessionClosed, SessionSettings
from longarc.gateway.turn_log import TurnLog
from longarc.records.ports import Engine
from longarc.records.sampling import Sampling
from longarc.tokens.chat_format import ChatFormat


class Gateway:
    """Opens sessions over one engine and one chat format; satisfies ``SessionFactory``."""

    def __init__(
        self,
        engine: Engine,
        chat_format: ChatFormat,
        *,
        min_new_tokens: int = 8,
        clear_thinking: bool = False,
        turn_log: TurnLog | None = None,
        repeat_window_s: float | None = None,
        rules: RecognitionRules | None = None,
        max_warm_bytes: int = 16 << 20,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Bind engine and format.

        Args:
            engine: who samples.
            chat_format: how conversations become ids; it brings the tokenizer.
            min_new_tokens: a turn with room for fewer than this (and than it asked for) raises
                ``ContextExhausted`` [tokens].
            clear_thinking: False keeps reasoning in the context (preserved thinking), so that a
                conversation only grows; True forgets it at each user message (interleaved thinking),
                which opens a new segment there.
            turn_log: called with every turn before its answer is returned.
            repeat_window_s: how long after its answer a request with an equal body counts as that request sent
                again [seconds]; 0 only while it runs, None never (``SessionSettings``).
            rules: how agents, windows, summaries and side requests are told apart.
            max_warm_bytes: memory of sessions that are ready to go on [bytes]; those used longest ago rest
                beyond it, which packs their turns.
            clock: for the time that sessions take [seconds]; it may jump.
        """
        self._engine = engine
        self._format = chat_format
        self._min_new_tokens = min_new_tokens
        self._clear_thinking = clear_thinking
        self._turn_log = turn_log
        self._repeat_window_s = repeat_window_s
        self._rules = rules or RecognitionRules()
        self._max_warm_bytes = max_warm_bytes
        self._clock = clock
        self._sessions: dict[str, GatewaySession] = {}
        self._warm: dict[str, int] = {}
        self._num_warm_bytes = 0
        self._openings = Openings(chat_format, clear_thinking=clear_thinking)

    @property
    def engine(self) -> Engine:
        """The engine behind every session."""
        return self._engine

    @property
    def chat_format(self) -> ChatFormat:
        """The chat format of every session."""
        return self._format

    def open(
        self,
        session_id: str,
        *,
        sampling: Sampling,
        thinking: bool,
        max_context_tokens: int,
        budget: SessionBudget | None = None,
    ) -> GatewaySession:
        """Open the session of one rollout.

        Args:
            session_id: unique among open sessions.
            sampling: the distribution and the largest budget of a turn.
            thinking: whether answers begin with reasoning.
            max_context_tokens: most tokens of prompt and completion together.
            budget: how much the session may use; None for no bound.

        Raises:
            ContractError: a session of this id is open.
            ConfigError: the context cannot hold a turn.
        """
        if session_id in self._sessions:
            raise ContractError(
                f"session {session_id!r} is already open; close it before the rollout starts again"
            )
        if max_context_tokens <= self._min_new_tokens:
            raise ConfigError(
                f"max_context_tokens={max_context_tokens} leaves no room for a prompt beside an answer "
                f"of {self._min_new_tokens} tokens"
            )
        session = GatewaySession(
            SessionSettings(
                session_id=session_id,
                sampling=sampling,
                thinking=thinking,
                max_context_tokens=max_context_tokens,
                min_new_tokens=self._min_new_tokens,
                clear_thinking=self._clear_thinking,
                budget=budget or SessionBudget(),
                repeat_window_s=self._repeat_window_s,
                rules=self._rules,
            ),
            engine=self._engine,
            chat_format=self._format,
            openings=self._openings,
            turn_log=self._turn_log,
            on_close=self._forget,
            on_used=self._use,
            clock=self._clock,
        )
        self._sessions[session_id] = session
        return session

    def restore(
        self,
        session_id: str,
        payloads: Iterable[bytes],
        *,
        sampling: Sampling,
        thinking: bool,
        max_context_tokens: int,
        budget: SessionBudget | None = None,
    ) -> GatewaySession:
        """Open a session again with the tree that its turn log describes.

        Raises:
            ContractError: the log is damaged, or the session is open.
        """
        session = self.open(
            session_id,
            sampling=sampling,
            thinking=thinking,
            max_context_tokens=max_context_tokens,
            budget=budget,
        )
        try:
            session.restore(payloads)
        except ContractError:
            self._forget(session_id)
            raise
        return session

    def session(self, session_id: str) -> GatewaySession:
        """Return an open session.

        Raises:
            SessionClosed: none of that id is open.
        """
        session = self._sessions.get(session_id)
        if session is None:
            raise SessionClosed(f"session {session_id!r} is closed or was never opened")
        return session

    def find(self, session_id: str) -> GatewaySession | None:
        """Return an open session, or None."""
        return self._sessions.get(session_id)

    def drop(self, session: GatewaySession) -> None:
        """Forget a session without closing it: it can be restored from its turn log."""
        self._forget(session.settings.session_id)

    @property
    def num_open_sessions(self) -> int:
        """Sessions that were opened and not closed."""
        return len(self._sessions)

    def _forget(self, session_id: str) -> None:
        self._sessions.pop(session_id, None)
        self._num_warm_bytes -= self._warm.pop(session_id, 0)

    def _use(self, session: GatewaySession) -> None:
        """Note that a session was used, and let those rest for which there is no room."""
        session_id = session.settings.session_id
        if session.is_closed:
            return
        self._num_warm_bytes += session.num_bytes - self._warm.pop(session_id, 0)
        self._warm[session_id] = session.num_bytes
        for oldest in list(self._warm):
            if self._num_warm_bytes <= self._max_warm_bytes or oldest == session_id:
                return
            self._num_warm_bytes -= self._warm.pop(oldest)
            self._sessions[oldest].rest()
