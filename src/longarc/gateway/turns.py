"""From a request of any dialect to the session's answers: the one core behind the codecs."""

import asyncio
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from longarc.errors import ConfigError, ContractError
from longarc.gateway.answers import Answer
from longarc.gateway.dialect import ChatRequest, Exchange, NamedTool
from longarc.gateway.lineage import read_lineage
from longarc.gateway.session import GatewaySession
from longarc.gateway.sse import Events
from longarc.gateway.streaming import TurnStream
from longarc.gateway.turn_options import OnProgress, TurnOptions, TurnStart
from longarc.gateway.wire import WireError, as_wire
from longarc.records.lineage import Lineage
from longarc.records.ports import ContextExhausted
from longarc.records.sampling import MAX_SEED, SampledTokens, Sampling
from longarc.tokens.chat_format import ChatFormat

_RETRIES: Final = "x-stainless-retry-count"
"""In which the SDKs count how often they sent a request before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asking:
    """A request on its way to a session."""

    session: GatewaySession
    request: ChatRequest
    headers: Mapping[str, str]
    """Names in lower case."""
    body_digest: bytes
    honours_sampling: bool
    """Whether the request's temperature, seed and the like count, or the session's own."""

    def options(self, choice: int, on_progress: OnProgress | None) -> TurnOptions:
        """Return how one of the answers is to be made.

        Raises:
            WireError: 400, a value that no engine can sample with, or a header that means nothing.
        """
        request = self.request
        key = self.headers.get("idempotency-key")
        if request.json_schema is not None:
            raise WireError(
                400,
                "output that follows a JSON schema is not supported by this gateway: no engine behind it masks tokens. "
                "Send the schema as the parameters of a tool and force its call with tool_choice, or ask for plain "
                "text",
                param="response_format",
                code="unsupported_value",
            )
        forced = self._forced_call()
        try:
            lineage = read_lineage(self.headers)
            sampling = self._sampling(choice)
        except (ConfigError, ContractError) as error:
            raise WireError(400, str(error)) from error
        return TurnOptions(
            max_new_tokens=request.max_new_tokens,
            tool_choice="none" if request.tool_choice == "none" else "auto",
            forced_call=forced,
            one_call=request.one_call,
            sampling=sampling,
            thinking=request.thinking if self.honours_sampling else None,
            stop=request.stop,
            lineage=lineage,
            # The answers to one request are different ones, whatever makes a request known again.
            idempotency_key=None if key is None else f"{key}/{choice}" if choice else key,
            body_digest=_digest_of(self.body_digest, choice, lineage),
            is_retry=self.headers.get(_RETRIES, "0") != "0" and request.num_choices == 1,
            on_progress=on_progress,
        )

    def _forced_call(self) -> str | None:
        """Return the tool that has to be called, "" for any and None for none."""
        choice, names = self.request.tool_choice, [tool.name for tool in self.request.tools]
        if choice in ("auto", "none"):
            return None
        name = choice.name if isinstance(choice, NamedTool) else ""
        if not names or (name and name not in names):
            raise WireError(
                400,
                f"tool_choice asks for a call of {repr(name) if name else 'a tool'}, but the request's tools are "
                f"{names}; send the tool, or tool_choice 'auto'",
                param="tool_choice",
            )
        return name

    def _sampling(self, choice: int) -> Sampling | None:
        if not self.honours_sampling:
            return None
        own, asked = self.session.settings.sampling, self.request
        return replace(
            own,
            temperature=own.temperature if asked.temperature is None else asked.temperature,
            top_p=own.top_p if asked.top_p is None else asked.top_p,
            top_k=own.top_k if asked.top_k is None else asked.top_k,
            seed=None if asked.seed is None else (asked.seed + choice) % (MAX_SEED + 1),
        )


async def answers_to(
    asking: Asking, on_progress: Callable[[int], OnProgress] | None = None
) -> list[Answer]:
    """Return as many answers as were asked for.

    Args:
        asking: the request.
        on_progress: gives where the progress of each answer goes.

    Raises:
        WireError: an option cannot be had, or there is no room or budget for an answer.
        LongArcError: what ``GatewaySession.answer`` raises; no answer is returned then, whatever others there are.
    """
    request = asking.request

    async def answer(choice: int) -> Answer:
        told = None if on_progress is None else on_progress(choice)
        options = asking.options(choice, told)
        try:
            return await asking.session.answer(
                request.messages, tools=request.tools, options=options
            )
        except ContextExhausted as error:
            raise as_wire(error) from error

    if request.num_choices == 1:
        return [await answer(0)]
    try:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(answer(i)) for i in range(request.num_choices)]
    except ExceptionGroup as group:
        raise group.exceptions[0] from group
    return [task.result() for task in running]


class StreamedTurn:
    """Turns the progress of answers into a dialect's events."""

    def __init__(self, asking: Asking, exchange: Exchange, chat_format: ChatFormat) -> None:
        self._asking = asking
        self._exchange = exchange
        self._format = chat_format
        self._streams: dict[int, TurnStream] = {}
        self._start: TurnStart | None = None
        self._is_open = False

    async def run(self, events: Events) -> Sequence[Answer]:
        """Answer, telling what is sampled while it is sampled; the last events follow when all is recorded.

        Raises:
            LongArcError: as ``answers_to``.
        """
        answers = await answers_to(self._asking, lambda choice: self._teller(choice, events))
        events.put(self._opened())
        for choice, answer in enumerate(answers):
            for delta in self._streams[choice].finish(answer.turn.message):
                events.put(self._exchange.delta(choice, delta))
        events.put(self._exchange.closing(answers))
        return answers

    def ping(self) -> bytes:
        """Return what a silent stream says."""
        if self._start is None:
            return b": ping\n\n"
        return self._opened() or self._exchange.ping()

    def failure(self, error: WireError) -> bytes:
        """Return the last events of a stream that failed."""
        return self._opened() + self._exchange.failure(error)

    def _teller(self, choice: int, events: Events) -> OnProgress:
        def tell(progress: TurnStart | SampledTokens) -> None:
            if isinstance(progress, TurnStart):
                self._begin(choice, progress)
            elif progress.finish_reason is None:
                # The last piece waits until the turn is recorded, and is told with the rest.
                events.put(self._opened())
                for delta in self._streams[choice].feed(progress.token_ids):
                    events.put(self._exchange.delta(choice, delta))

        return tell

    def _begin(self, choice: int, start: TurnStart) -> None:
        request = self._asking.request
        self._start = start
        self._streams[choice] = TurnStream(
            self._format,
            request.tools,
            thinking=start.thinking,
            keeps_calls=request.tool_choice != "none",
            stop=(*self._asking.session.settings.sampling.stop_strings, *request.stop),
            call_id_prefix=start.call_id_prefix,
        )
        for delta in self._streams[choice].feed(start.opening_ids):
            raise AssertionError(f"the beginning of a call was told: {delta}")

    def _opened(self) -> bytes:
        """Return the opening once."""
        if self._is_open or self._start is None:
            return b""
        self._is_open = True
        return self._exchange.opening(self._start)


def _digest_of(body: bytes, choice: int, lineage: Lineage | None) -> bytes:
    """Return what identifies a request: two agents may say the same at once, and each wants its own answer."""
    own = b"" if lineage in (None, Lineage()) else repr(lineage).encode("utf-8", "surrogatepass")
    if choice or own:
        return hashlib.sha256(body + choice.to_bytes(2, "big") + own).digest()[:16]
    return body
