"""Answers that a later request may go on from by their id (``previous_response_id`` of Responses)."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from typing import Final
from weakref import WeakKeyDictionary

from longarc.gateway.answers import Answer
from longarc.gateway.dialect import ChatRequest
from longarc.gateway.session import GatewaySession
from longarc.gateway.turns import Asking
from longarc.gateway.wire import WireError
from longarc.records.message import Message

_MAX_STORED: Final = 64
"""Newest answers of a session that are kept; conversations share their messages."""


class StoredAnswers:
    """The newest answers of each session, with the conversations that led to them."""

    def __init__(self) -> None:
        self._by_session: WeakKeyDictionary[
            GatewaySession, OrderedDict[str, tuple[Message, ...]]
        ] = WeakKeyDictionary()

    def keep(self, asking: Asking, response_id: str, answers: Sequence[Answer]) -> None:
        """Remember an answer, if its request allows it."""
        request = asking.request
        if not request.stores:
            return
        stored = self._by_session.setdefault(asking.session, OrderedDict())
        # Instructions are those of one request; the next one brings its own.
        said = request.messages[request.num_instructions :]
        stored[response_id] = (*said, answers[0].turn.message)
        while len(stored) > _MAX_STORED:
            stored.popitem(last=False)

    def whole(self, session: GatewaySession, request: ChatRequest) -> ChatRequest:
        """Return a request with the whole conversation, where it sends only what is new.

        Raises:
            WireError: 400, it goes on from an answer that is not stored.
        """
        if request.previous_id is None:
            return request
        before = self._by_session.get(session, OrderedDict()).get(request.previous_id)
        if before is None:
            raise WireError(
                400,
                f"previous_response_id={request.previous_id[:80]!r} is none of the newest {_MAX_STORED} answers that "
                f"this session stored since the gateway started; send the whole conversation as input",
                param="previous_response_id",
                code="previous_response_not_found",
            )
        opening = request.messages[: request.num_instructions]
        new = request.messages[request.num_instructions :]
        return replace(request, messages=(*opening, *before, *new))
