"""A session: one rollout's conversation with the policy, token-in-token-out.

::

    messages --match--> deepest stored turn --its ids--+--> prompt --engine--> completion
                 \\--rest--> rendered tail ids ---------+                          |
    answer <--parsed--  turn log <-- new node below the matched turn <------------+

Ids that were sampled are carried, never rendered again. A history that the client changed matches less
deep and becomes a new branch with its real prompt.
"""

import asyncio
import hashlib
import time
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Literal

from longarc.errors import ConfigError, ContractError, RolloutError
from longarc.gateway.answers import pieces_of, turn_of, turn_seed
from longarc.gateway.asked import Asked, RecognitionRules, asked
from longarc.gateway.branches import segments_of, turns_of
from longarc.gateway.budget import BudgetMeter, SessionBudget, Stopwatch
from longarc.gateway.completion import Completion, collect
from longarc.gateway.flights import Flights
from longarc.gateway.identity import next_key, without_billing
from longarc.gateway.keychain import KeyChain
from longarc.gateway.openings import Openings
from longarc.gateway.places import places
from longarc.gateway.prompts import Prompt, Prompts
from longarc.gateway.repeats import Repeats, request_digest
from longarc.gateway.stops import cut_at_stop, first_stop
from longarc.gateway.tree import Node, SessionTree, digest_ids
from longarc.gateway.turn_log import TurnLog, decode_turn, encode_turn
from longarc.gateway.turn_options import OnProgress, TurnOptions, TurnStart
from longarc.records.lineage import Lineage
from longarc.records.message import Message, Role, ToolSpec
from longarc.records.ports import AssistantTurn, ContextExhausted, ContextUse, Engine
from longarc.records.sampling import Sampling
from longarc.records.segment import Segment
from longarc.records.turn import Turn
from longarc.tokens.chat_format import ChatFormat

_DEFAULTS: Final = TurnOptions()


class SessionClosed(RolloutError):  # noqa: N818 - a state of the session
    """The session was closed, or never opened."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionSettings:
    """What a session was opened with."""

    session_id: str
    sampling: Sampling
    thinking: bool
    max_context_tokens: int
    """Prompt and completion together [tokens]."""
    min_new_tokens: int
    """A turn with room for fewer than this ends the rollout [tokens]."""
    clear_thinking: bool = False
    """Whether a user message makes the model forget its earlier reasoning, which rewrites the history."""
    budget: SessionBudget = field(default_factory=SessionBudget)
    """How much the session may use."""
    repeat_window_s: float | None = None
    """How long after its answer a request with an equal body counts as that request sent again, unless the
    conversation went on [seconds]; 0 only while it runs, None never."""
    rules: RecognitionRules = field(default_factory=RecognitionRules)
    """How agents, windows, summaries and side requests are told apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One turn as the doors see it: the parsed answer and the tokens behind it."""

    turn: AssistantTurn
    node: Node
    stop: str | None = None
    """The stop text that ended it, if one did."""


class GatewaySession:
    """One rollout's session; satisfies ``PolicySession``."""

    def __init__(
        self,
        settings: SessionSettings,
        *,
        engine: Engine,
        chat_format: ChatFormat,
        openings: Openings,
        turn_log: TurnLog | None,
        on_close: Callable[[str], None],
        on_used: Callable[["GatewaySession"], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._engine = engine
        self._format = chat_format
        self._turn_log = turn_log
        self._on_close = on_close
        self._on_used = on_used
        self._tree = SessionTree(settings.session_id)
        self._chain = KeyChain(openings)
        self._prompts = Prompts(
            chat_format, openings, self._tree, clear_thinking=settings.clear_thinking
        )
        self._stopwatch = Stopwatch(clock)
        self._meter = BudgetMeter(settings.session_id, settings.budget, self._stopwatch)
        self._flights = Flights[Answer]()
        self._repeats = Repeats(settings.repeat_window_s, self._stopwatch)
        self._scopes: set[asyncio.Timeout] = set()
        self._is_closed = False
        self._next_serial = 0
        self._call_id_prefix = (
            f"call_{hashlib.blake2b(settings.session_id.encode(), digest_size=6).hexdigest()}"
        )

    @property
    def settings(self) -> SessionSettings:
        """What the session was opened with."""
        return self._settings

    @property
    def num_turns(self) -> int:
        """Turns answered so far."""
        return self._tree.num_nodes

    @property
    def is_closed(self) -> bool:
        """Whether the session was closed."""
        return self._is_closed

    @property
    def is_running(self) -> bool:
        """Whether a request is being sampled."""
        return bool(self._scopes)

    @property
    def num_bytes(self) -> int:
        """Memory that the session holds, about; little while it rests [bytes]."""
        return self._tree.num_bytes + self._chain.num_chars

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
        options = TurnOptions(
            max_new_tokens=max_new_tokens, tool_choice=tool_choice, lineage=lineage
        )
        answer = await self.answer(messages, tools=tools, options=options)
        return answer.turn

    def context_use(
        self, messages: Sequence[Message], *, tools: Sequence[ToolSpec] = ()
    ) -> ContextUse:
        """Say how full the context would be; see ``PolicyClient.context_use``."""
        built, _ = self._built(without_billing(messages), tools, self._settings.thinking)
        return ContextUse(num_tokens=len(built.ids), max_tokens=self._settings.max_context_tokens)

    async def answer(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[ToolSpec] = (),
        options: TurnOptions = _DEFAULTS,
    ) -> Answer:
        """Answer a conversation.

        Args:
            messages: the whole conversation.
            tools: the tools of the prompt.
            options: how this turn differs from the session's others.

        Raises:
            ContextExhausted: there is no room for another turn, or (``BudgetExhausted``) no budget.
            SessionClosed: the session was closed, perhaps while the engine was sampling.
            EngineError: the engine failed; nothing was recorded.
            ContractError: stored ids are not what the engine saw.
            ConfigError: there is no message, or the budget of the turn is not positive.
        """
        self._check_open()
        messages = without_billing(messages)
        if not messages:
            raise ConfigError("a conversation needs at least one message, got none")
        if (node := self._repeated(messages, tools, options)) is not None:
            return self._told_again(node, options)
        key = request_digest(options)
        if key is None:
            return await self._sampled(messages, tools, options, options.on_progress)
        return await self._flights.answer(
            key,
            lambda on_progress: self._sampled(messages, tools, options, on_progress),
            on_progress=options.on_progress,
            joins=self._repeats.joins(options),
        )

    def segments(self) -> tuple[Segment, ...]:
        """Everything the engine saw and sampled, one segment per branch; also after closing."""
        return segments_of(self._tree, places(self._tree.nodes, self._settings.rules))

    def turns(self) -> tuple[Turn, ...]:
        """What was said and answered, turn by turn, where clients own their contexts; also after closing."""
        return turns_of(self._tree, places(self._tree.nodes, self._settings.rules))

    def payloads(self) -> tuple[bytes, ...]:
        """The turn log of the session, as it was or would have been written."""
        return tuple(encode_turn(node) for node in self._tree.nodes)

    def restore(self, payloads: Iterable[bytes]) -> None:
        """Rebuild the tree of a session that has answered nothing yet from its turn log.

        Raises:
            ContractError: a payload is damaged, missing or out of order.
        """
        if self.num_turns:
            raise ContractError(
                f"session {self._settings.session_id} already has {self.num_turns} turns; restore a "
                f"session right after opening it"
            )
        for payload in payloads:
            node = decode_turn(payload)
            self._tree.add(node)
            self._tree.ids(node)
            self._meter.add_turn(len(node.sampled_ids))
            self._next_serial = max(self._next_serial, node.serial, node.index) + 1
            if node.asked is not None:
                self._stopwatch.advance_to(node.asked.elapsed_s)
            self._repeats.add(node)

    def rest(self) -> None:
        """Give back most of the memory; the next request takes it again, and some milliseconds."""
        if not self.is_running:
            self._tree.rest()
            self._chain.forget()

    async def close(self) -> None:
        """Revoke the session; running and later calls raise ``SessionClosed``. Closing twice is allowed."""
        if not self._is_closed:
            self._is_closed = True
            for scope in self._scopes:
                if not scope.expired():
                    scope.reschedule(asyncio.get_running_loop().time())
            self._on_close(self._settings.session_id)

    def _check_open(self) -> None:
        if self._is_closed:
            raise SessionClosed(
                f"session {self._settings.session_id} is closed; its rollout is over, so this call "
                f"came too late"
            )

    def _check_running(self) -> None:
        self._check_open()
        self._meter.check_time()

    async def _sampled(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSpec],
        options: TurnOptions,
        on_progress: OnProgress | None,
    ) -> Answer:
        """Sample the answer to a conversation and record it."""
        thinks = self._thinks(options)
        built, keys = self._built(messages, tools, thinks)
        parent, prompt = built.parent, built.ids
        wanted = self._turn_sampling(options, num_prompt_tokens=len(prompt))
        granted = self._meter.hold(wanted.max_new_tokens)
        serial = self._next_serial
        self._next_serial += 1
        try:
            wanted = replace(
                wanted,
                max_new_tokens=granted,
                seed=turn_seed(self._settings.sampling, options, wanted, serial),
            )
            start = TurnStart(
                num_prompt_tokens=len(prompt),
                call_id_prefix=f"{self._call_id_prefix}_{serial}",
                thinking=thinks,
            )
            completion = await self._collected(prompt, wanted, start, on_progress)
        except BaseException:
            if self._next_serial == serial + 1:
                # Nothing of it was recorded and nothing came behind it: asked again, it is the same request.
                self._next_serial = serial
            raise
        finally:
            self._meter.settle(granted)
        message, stop = self._message(completion, tools, options, start)
        node = Node(
            index=self.num_turns,
            parent=None if parent is None else parent.index,
            key=self._chain.add(keys[-1], message),
            num_messages=len(messages) + 1,
            context_ids=prompt[built.num_stored :],
            sampled_ids=completion.sampled_ids,
            logprobs=completion.logprobs,
            version_runs=completion.version_runs,
            finish_reason=completion.finish_reason,
            message=message,
            ids_digest=digest_ids(prompt + completion.sampled_ids),
            kept_ids=completion.kept_ids,
            serial=serial,
            request=request_digest(options, body=False) or b"",
            body=options.body_digest or b"",
            asked=self._asked(messages[built.num_matched :], tools, options, parent),
        )
        self._record(node)
        return Answer(turn=turn_of(node, num_prompt_tokens=len(prompt)), node=node, stop=stop)

    def _built(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec], thinking: bool
    ) -> tuple[Prompt, Sequence[bytes]]:
        """Return the prompt of a conversation and the identities of its messages."""
        keys = self._chain.keys(messages, tuple(tools), thinking=thinking)
        parent, num_matched = self._tree.match(messages, keys)
        if self._forgets(messages[num_matched:], parent):
            parent, num_matched = None, 0
        matched = (parent, num_matched)
        return self._prompts.build(messages, keys, tools, matched, thinking=thinking), keys

    def _record(self, node: Node) -> None:
        """Make a turn durable, then part of the session; nothing may be awaited between its index and this."""
        if self._turn_log is not None:
            self._turn_log(self._settings.session_id, node.index, encode_turn(node))
        self._tree.add(node)
        self._meter.add_turn(len(node.sampled_ids))
        self._repeats.add(node)
        self._on_used(self)

    def _repeated(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec], options: TurnOptions
    ) -> Node | None:
        """Return the turn that answered this very request before, if one did."""
        found = self._repeats.find(options)
        if found is not None:
            node = self._tree.nodes[found]
            self._repeats.check_same(node, options)
            was_continued = any(later.parent == found for later in self._tree.nodes[found + 1 :])
            if options.is_retry or options.idempotency_key is not None or not was_continued:
                return node
        if not options.is_retry or not self.num_turns:
            return None
        node = self._tree.nodes[-1]
        if node.num_messages != len(messages) + 1:
            return None
        keys = self._chain.keys(messages, tuple(tools), thinking=self._thinks(options))
        return node if node.key == next_key(keys[-1], node.message) else None

    def _told_again(self, node: Node, options: TurnOptions) -> Answer:
        num_prompt_tokens = len(self._tree.ids(node)) - len(node.sampled_ids)
        if options.on_progress is not None:
            options.on_progress(
                TurnStart(
                    num_prompt_tokens=num_prompt_tokens,
                    call_id_prefix=f"{self._call_id_prefix}_{node.serial}",
                    thinking=self._thinks(options),
                )
            )
            for piece in pieces_of(node):
                options.on_progress(piece)
        return Answer(
            turn=turn_of(node, num_prompt_tokens=num_prompt_tokens),
            node=node,
            stop=self._stop_of(node.sampled_ids, node.finish_reason, options),
        )

    def _thinks(self, options: TurnOptions) -> bool:
        return self._settings.thinking if options.thinking is None else options.thinking

    def _forgets(self, unmatched: Sequence[Message], parent: Node | None) -> bool:
        """Whether the stored ids hold reasoning that a new user message clears."""
        return (
            self._settings.clear_thinking
            and any(message.role is Role.USER for message in unmatched)
            and self._tree.has_reasoning(parent)
        )

    async def _collected(
        self,
        prompt: "array[int]",
        sampling: Sampling,
        start: TurnStart,
        on_progress: OnProgress | None,
    ) -> Completion:
        """Sample until the engine, the session or its time ends."""
        scope = asyncio.timeout(self._meter.left_s())
        try:
            async with scope:
                self._scopes.add(scope)
                if on_progress is not None:
                    on_progress(start)
                completion = await collect(
                    self._engine,
                    prompt,
                    sampling,
                    session_id=self._settings.session_id,
                    check=self._check_running,
                    on_piece=on_progress,
                )
        except TimeoutError:
            self._check_open()
            if scope.expired():
                raise self._meter.time_is_over() from None
            raise
        finally:
            self._scopes.discard(scope)
        self._check_open()
        return completion

    def _turn_sampling(self, options: TurnOptions, *, num_prompt_tokens: int) -> Sampling:
        """Return this turn's distribution and budget: what was asked for, as far as the context goes."""
        sampling = options.sampling or self._settings.sampling
        if options.max_new_tokens is not None and options.max_new_tokens < 1:
            raise ConfigError(
                f"max_new_tokens={options.max_new_tokens} must be at least 1, or None"
            )
        wanted = min(sampling.max_new_tokens, options.max_new_tokens or sampling.max_new_tokens)
        room = self._settings.max_context_tokens - num_prompt_tokens
        least = min(wanted, self._settings.min_new_tokens)
        if room < least:
            raise ContextExhausted(
                f"session {self._settings.session_id}: the prompt has {num_prompt_tokens} of "
                f"{self._settings.max_context_tokens} tokens, which leaves {room} for the answer; a "
                f"turn needs at least {least}"
            )
        interval = sampling.stream_interval_tokens
        return replace(
            sampling,
            max_new_tokens=min(wanted, room),
            stop_ids=tuple(dict.fromkeys((*self._format.stop_ids, *sampling.stop_ids))),
            stop_strings=tuple(dict.fromkeys((*sampling.stop_strings, *options.stop))),
            stream_interval_tokens=options.stream_interval_tokens
            if options.on_progress
            else interval,
        )

    def _message(
        self,
        completion: Completion,
        tools: Sequence[ToolSpec],
        options: TurnOptions,
        start: TurnStart,
    ) -> tuple[Message, str | None]:
        """Return the answer as the client gets it, and the stop text that ended it."""
        message = self._format.parse(
            completion.sampled_ids,
            tools,
            thinking=start.thinking,
            call_id_prefix=start.call_id_prefix,
        ).message
        if options.tool_choice == "none":
            message = replace(message, tool_calls=())
        stop = self._stop_of(completion.sampled_ids, completion.finish_reason, options)
        return (message if stop is None else cut_at_stop(message, stop)), stop

    def _stop_of(
        self, sampled_ids: Sequence[int], finish_reason: str, options: TurnOptions
    ) -> str | None:
        sampling = options.sampling or self._settings.sampling
        stops = (*sampling.stop_strings, *options.stop)
        if not stops or finish_reason != "stop" or sampled_ids[-1] in self._format.stop_ids:
            return None
        return first_stop(self._format.tokenizer.decode(list(sampled_ids)), stops)

    def _asked(
        self,
        said: Sequence[Message],
        tools: Sequence[ToolSpec],
        options: TurnOptions,
        parent: Node | None,
    ) -> Asked | None:
        if options.lineage is None:
            return None
        return asked(
            options.lineage,
            said,
            tools,
            turns=self._tree.nodes,
            is_new=parent is None,
            max_new_tokens=options.max_new_tokens,
            rules=self._settings.rules,
            elapsed_s=self._stopwatch.elapsed_s(),
        )
