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
from dataclasses import replace
from typing import Final, Literal

from longarc.errors import ConfigError, ContractError, EngineError
from longarc.gateway.answers import Answer, MadeTurn, pieces_of, turn_of, turn_seed
from longarc.gateway.asked import Asked, asked
from longarc.gateway.branches import segments_of, tools_of, turns_of
from longarc.gateway.budget import BudgetMeter, Stopwatch
from longarc.gateway.completion import Completion, collect
from longarc.gateway.flights import Flights
from longarc.gateway.identity import next_key, without_billing
from longarc.gateway.keychain import KeyChain
from longarc.gateway.openings import Openings
from longarc.gateway.places import places
from longarc.gateway.prompts import Prompt, Prompts
from longarc.gateway.reading import ReadHistory
from longarc.gateway.repeats import Repeats, request_digest
from longarc.gateway.session_settings import SessionClosed, SessionSettings
from longarc.gateway.tree import Node, SessionTree, id_array
from longarc.gateway.turn_log import TurnLog, decode_turn, encode_turn
from longarc.gateway.turn_making import opening_ids, stop_of, turn_message, turn_sampling
from longarc.gateway.turn_options import OnProgress, ToldTokens, TurnOptions, TurnStart
from longarc.records.lineage import Lineage
from longarc.records.message import Message, Role, ToolSpec
from longarc.records.ports import AssistantTurn, ContextExhausted, ContextUse, Engine
from longarc.records.sampling import Sampling
from longarc.records.segment import Segment
from longarc.records.turn import Turn
from longarc.tokens.chat_format import ChatFormat

_DEFAULTS: Final = TurnOptions()


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
        self.history = ReadHistory()
        """For the codecs of wire formats."""
        self._stopwatch = Stopwatch(clock)
        self._meter = BudgetMeter(settings.session_id, settings.budget, self._stopwatch)
        self._flights = Flights[Answer]()
        self._repeats = Repeats(settings.repeat_window_s, self._stopwatch)
        self._scopes: set[asyncio.Timeout] = set()
        self._is_closed = False
        self.last_failure: EngineError | ContextExhausted | None = None
        """Why the last request that ended got no answer; None where it got one."""
        self.last_refusal: str | None = None
        """Why a door refused the last request before it was asked here; None where it did not."""
        self.num_requests = 0
        """Requests that came, answered or not."""
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
        return ContextUse(
            num_tokens=self.num_prompt_tokens(messages, tools=tools),
            max_tokens=self._settings.max_context_tokens,
        )

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
        self.num_requests += 1
        self.last_refusal = None
        try:
            answer = await self._answer(messages, tools, options)
        except (EngineError, ContextExhausted) as error:
            self.last_failure = error
            raise
        finally:
            self._on_used(self)
        self.last_failure = None
        return answer

    async def _answer(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec], options: TurnOptions
    ) -> Answer:
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
            check=lambda body: self._repeats.check_body(body, options),
            body=options.body_digest,
        )

    def num_prompt_tokens(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[ToolSpec] = (),
        thinking: bool | None = None,
    ) -> int:
        """Return how many tokens the prompt of a conversation would have; nothing is sampled or recorded.

        Raises:
            SessionClosed: the session was closed.
            ContractError: stored ids are not what the engine saw.
            ConfigError: there is no message.
        """
        self._check_open()
        messages = without_billing(messages)
        if not messages:
            raise ConfigError("a conversation needs at least one message, got none")
        thinks = self._settings.thinking if thinking is None else thinking
        return len(self._built(messages, tools, thinking=thinks)[0].ids)

    def segments(self) -> tuple[Segment, ...]:
        """Everything the engine saw and sampled, one segment per branch; also after closing."""
        return segments_of(self._tree, places(self._tree.nodes, self._settings.rules))

    def turns(self) -> tuple[Turn, ...]:
        """What was said and answered, turn by turn, where clients own their contexts; also after closing."""
        return turns_of(self._tree, places(self._tree.nodes, self._settings.rules))

    def limit_requests(self, max_requests: int) -> None:
        """Answer so many requests at most from the opening on, beside what the session's budget says."""
        self._meter.limit_requests(max_requests)

    def tools(self) -> tuple[ToolSpec, ...]:
        """The tools of the main agent's newest conversation, where clients own their contexts."""
        return tools_of(self._tree, places(self._tree.nodes, self._settings.rules))

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
            self.history.forget()

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
        serial = self._next_serial
        self._next_serial += 1
        try:
            made = await self._made(messages, tools, options, on_progress, serial)
            if self._turn_log is not None:
                # Nothing may be awaited between a turn's index and this.
                node = made.answer.node
                self._turn_log(self._settings.session_id, node.index, encode_turn(node))
        except BaseException:
            if self._next_serial == serial + 1:
                # Nothing of it was recorded and nothing came behind it: asked again, it is the same request.
                self._next_serial = serial
            raise
        self._record(made)
        return made.answer

    async def _made(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSpec],
        options: TurnOptions,
        on_progress: OnProgress | None,
        serial: int,
    ) -> MadeTurn:
        """Sample an answer and make a turn of it, which is not part of the session yet."""
        thinks = self._thinks(options)
        built, keys = self._built(messages, tools, thinking=thinks)
        parent, prompt = built.parent, built.ids
        opening = opening_ids(self._format, options, thinking=thinks)
        if opening:
            # A new array: the prompt of an opening is shared.
            prompt = prompt + id_array(opening)
        wanted = turn_sampling(self._settings, self._format, options, num_prompt_tokens=len(prompt))
        if self._settings.sampling.returns_routing_from is not None:
            # What the parent has is of the passes that drew its tokens; of its last one it has nothing.
            wanted = replace(wanted, returns_routing_from=max(0, built.num_stored - 1))
        granted = self._meter.hold(wanted.max_new_tokens)
        told = ToldTokens(on_progress)
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
                opening_ids=opening,
            )
            completion = await self._collected(prompt, wanted, start, told)
            told.num = 0  # they are counted with their turn
        finally:
            self._meter.settle(granted, num_told=told.num)
        message, stop = turn_message(
            self._settings, self._format, completion, tools, options, start
        )
        context_ids = prompt[built.num_stored :]
        digest = built.stored_digest
        digest.update(context_ids)
        digest.update(completion.sampled_ids)
        node = Node(
            index=self.num_turns,
            parent=None if parent is None else parent.index,
            key=self._chain.add(keys[-1], message),
            num_messages=len(messages) + 1,
            context_ids=context_ids,
            sampled_ids=completion.sampled_ids,
            logprobs=completion.logprobs,
            version_runs=completion.version_runs,
            finish_reason=completion.finish_reason,
            message=message,
            ids_digest=digest.digest(),
            kept_ids=completion.kept_ids,
            routing=completion.routing,
            serial=serial,
            request=request_digest(options, body=False) or b"",
            body=options.body_digest or b"",
            asked=self._asked(messages[built.num_matched :], tools, options, parent),
        )
        answer = Answer(turn=turn_of(node, num_prompt_tokens=len(prompt)), node=node, stop=stop)
        return MadeTurn(answer, digest)

    def _built(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec], *, thinking: bool
    ) -> tuple[Prompt, Sequence[bytes]]:
        """Return the prompt of a conversation and the identities of its messages."""
        keys = self._chain.keys(messages, tuple(tools), thinking=thinking)
        parent, num_matched = self._tree.match(messages, keys)
        if self._forgets(messages[num_matched:], parent):
            parent, num_matched = None, 0
        matched = (parent, num_matched)
        return self._prompts.build(messages, keys, tools, matched, thinking=thinking), keys

    def _record(self, made: MadeTurn) -> None:
        """Make a turn that is in the log part of the session."""
        node = made.answer.node
        self._tree.add(node, made.digest)
        self._meter.add_turn(len(node.sampled_ids))
        self._repeats.add(node)

    def _repeated(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec], options: TurnOptions
    ) -> Node | None:
        """Return the turn that answered this very request before, if one did."""
        found = self._repeats.find(options)
        if found is not None:
            node = self._tree.nodes[found]
            self._repeats.check_body(node.body, options)
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
        thinks = self._thinks(options)
        if options.on_progress is not None:
            options.on_progress(
                TurnStart(
                    num_prompt_tokens=num_prompt_tokens,
                    call_id_prefix=f"{self._call_id_prefix}_{node.serial}",
                    thinking=thinks,
                    opening_ids=opening_ids(self._format, options, thinking=thinks),
                )
            )
            for piece in pieces_of(node):
                options.on_progress(piece)
        return Answer(
            turn=turn_of(node, num_prompt_tokens=num_prompt_tokens),
            node=node,
            stop=stop_of(
                self._settings, self._format, node.sampled_ids, node.finish_reason, options
            ),
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
        tell: OnProgress,
    ) -> Completion:
        """Sample until the engine, the session or its time ends."""
        scope = asyncio.timeout(self._meter.left_s())
        try:
            async with scope:
                self._scopes.add(scope)
                tell(start)
                completion = await collect(
                    self._engine,
                    prompt,
                    sampling,
                    session_id=self._settings.session_id,
                    check=self._check_running,
                    on_piece=tell,
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
