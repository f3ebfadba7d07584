"""A session: one rollout's conversation with the policy, token-in-token-out.

::

    messages --match--> deepest stored turn --its ids--+--> prompt --engine--> completion
                 \\--rest--> rendered tail ids ---------+                          |
    answer <--parsed--  turn log <-- new node below the matched turn <------------+

Ids that were sampled are carried, never rendered again. A history that the client changed matches less
deep and becomes a new branch with its real prompt.
"""

import hashlib
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

from longarc.errors import ConfigError, ContractError, RolloutError
from longarc.gateway.completion import Completion, collect
from longarc.gateway.identity import next_key
from longarc.gateway.openings import Openings
from longarc.gateway.tree import Node, SessionTree, digest_ids, id_array
from longarc.gateway.turn_log import TurnLog, decode_turn, encode_turn
from longarc.gateway.turn_options import OnPiece, TurnOptions
from longarc.records.message import Message, Role, ToolSpec
from longarc.records.ports import AssistantTurn, ContextExhausted, Engine
from longarc.records.sampling import Sampling
from longarc.records.segment import Segment
from longarc.tokens.chat_format import ChatFormat, StoredTurn

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One turn as the doors see it: the parsed answer and the tokens behind it."""

    turn: AssistantTurn
    node: Node


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
    ) -> None:
        self._settings = settings
        self._engine = engine
        self._format = chat_format
        self._openings = openings
        self._turn_log = turn_log
        self._on_close = on_close
        self._tree = SessionTree(settings.session_id)
        self._is_closed = False
        self._num_running = 0
        self._call_id_prefix = (
            f"call_{hashlib.blake2b(settings.session_id.encode(), digest_size=6).hexdigest()}"
        )
        self._opening: tuple[tuple[ToolSpec, ...], bool, bytes] | None = None
        self._last: tuple[bytes, list[Message], list[bytes]] = (b"", [], [])
        self._newest: tuple[bytes, Message, bytes] | None = None

    @property
    def settings(self) -> SessionSettings:
        """What the session was opened with."""
        return self._settings

    @property
    def num_turns(self) -> int:
        """Turns answered so far."""
        return len(self._tree.nodes)

    @property
    def is_closed(self) -> bool:
        """Whether the session was closed."""
        return self._is_closed

    async def chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[ToolSpec] = (),
        max_new_tokens: int | None = None,
    ) -> AssistantTurn:
        """Send the whole conversation, get the policy's next message; see ``PolicyClient.chat``."""
        options = TurnOptions(max_new_tokens=max_new_tokens)
        answer = await self.answer(messages, tools=tools, options=options)
        return answer.turn

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
        if not messages:
            raise ConfigError("a conversation needs at least one message, got none")
        thinks = self._settings.thinking if options.thinking is None else options.thinking
        keys = self._keys(messages, tuple(tools), thinking=thinks)
        if (
            options.is_retry
            and (repeated := self._newest_answer_to(messages, keys[-1])) is not None
        ):
            return repeated
        parent, num_matched = self._tree.match(messages, keys)
        if self._forgets(messages[num_matched:], parent):
            parent = None
        stored = self._tree.ids(parent)
        tail = None
        if parent is not None:
            history = self._tree.as_answered(messages, keys)
            tail = self._tail(history, num_matched, parent, stored, tools, thinking=thinks)
            if tail is None:
                # The format would show the stored turns otherwise: what it shows becomes a branch of its own.
                parent, messages, stored = None, history, id_array()
        if tail is None:
            prompt = self._openings.prompt(messages, tools, thinking=thinks)
        else:
            prompt = stored + tail
        wanted = self._turn_sampling(options, num_prompt_tokens=len(prompt))
        completion = await self._sample(prompt, wanted, options.on_piece)
        message = self._message(
            completion, tools, thinking=thinks, keeps_calls=options.tool_choice == "auto"
        )
        key = next_key(keys[-1], message)
        node = Node(
            index=self.num_turns,
            parent=None if parent is None else parent.index,
            key=key,
            num_messages=len(messages) + 1,
            context_ids=prompt[len(stored) :],
            sampled_ids=completion.sampled_ids,
            logprobs=completion.logprobs,
            version_runs=completion.version_runs,
            finish_reason=completion.finish_reason,
            message=message,
            ids_digest=digest_ids(prompt + completion.sampled_ids),
            kept_ids=completion.kept_ids,
        )
        # No await from here on: the index is this turn's, and the turn is durable before it is told.
        if self._turn_log is not None:
            self._turn_log(self._settings.session_id, node.index, encode_turn(node))
        self._tree.add(node)
        self._newest = (keys[-1], message, key)
        return Answer(turn=_turn(node, num_prompt_tokens=len(prompt)), node=node)

    def segments(self) -> tuple[Segment, ...]:
        """Everything the engine saw and sampled, one segment per branch; also after closing."""
        return self._tree.segments()

    def payloads(self) -> tuple[bytes, ...]:
        """The turn log of the session, as it was or would have been written."""
        return tuple(encode_turn(node) for node in self._tree.nodes)

    def restore(self, payloads: Iterable[bytes]) -> None:
        """Rebuild the tree of a session that has answered nothing yet from its turn log.

        Raises:
            ContractError: a payload is damaged, missing or out of order.
        """
        if self._tree.nodes:
            raise ContractError(
                f"session {self._settings.session_id} already has {self.num_turns} turns; restore a "
                f"session right after opening it"
            )
        for payload in payloads:
            node = decode_turn(payload)
            self._tree.add(node)
            self._tree.ids(node)

    async def close(self) -> None:
        """Revoke the session; running and later calls raise ``SessionClosed``. Closing twice is allowed."""
        if not self._is_closed:
            self._is_closed = True
            self._on_close(self._settings.session_id)

    def _check_open(self) -> None:
        if self._is_closed:
            raise SessionClosed(
                f"session {self._settings.session_id} is closed; its rollout is over, so this call "
                f"came too late"
            )

    def _keys(
        self, messages: Sequence[Message], tools: tuple[ToolSpec, ...], *, thinking: bool
    ) -> list[bytes]:
        """Return the identity of each prefix; what equals the last request is not hashed again."""
        opening = self._opening_key(tools, thinking=thinking)
        last_opening, last_messages, last_keys = self._last
        keys: list[bytes] = []
        if opening == last_opening:
            for message, known, key in zip(messages, last_messages, last_keys, strict=False):
                if message is not known and message != known:
                    break
                keys.append(key)
        for message in messages[len(keys) :]:
            keys.append(self._next_key(keys[-1] if keys else opening, message))
        self._last = (opening, list(messages), keys)
        return keys

    def _opening_key(self, tools: tuple[ToolSpec, ...], *, thinking: bool) -> bytes:
        """Return the key of what stands before the first message; it is the same for most requests."""
        if self._opening is None or self._opening[:2] != (tools, thinking):
            self._opening = (tools, thinking, self._openings.key(tools, thinking=thinking))
        return self._opening[2]

    def _next_key(self, previous: bytes, message: Message) -> bytes:
        """Return ``next_key``, which is known of the newest answer where that very object comes back."""
        if self._newest is not None:
            before, answer, key = self._newest
            if message is answer and previous == before:
                return key
        return next_key(previous, message)

    def _newest_answer_to(self, messages: Sequence[Message], key: bytes) -> Answer | None:
        node = self._tree.nodes[-1] if self._tree.nodes else None
        if (
            node is None
            or node.num_messages != len(messages) + 1
            or node.key != next_key(key, node.message)
        ):
            return None
        num_prompt_tokens = len(self._tree.ids(node)) - len(node.sampled_ids)
        return Answer(turn=_turn(node, num_prompt_tokens=num_prompt_tokens), node=node)

    def _forgets(self, unmatched: Sequence[Message], parent: Node | None) -> bool:
        """Whether the stored ids hold reasoning that a new user message clears."""
        return (
            self._settings.clear_thinking
            and any(message.role is Role.USER for message in unmatched)
            and self._tree.has_reasoning(parent)
        )

    def _tail(
        self,
        messages: Sequence[Message],
        num_matched: int,
        parent: Node,
        stored: "array[int]",
        tools: Sequence[ToolSpec],
        *,
        thinking: bool,
    ) -> "array[int] | None":
        """Return the ids behind a stored turn; None where the format cannot continue it as it stands."""
        turn = StoredTurn(
            prompt_ids=stored[: len(stored) - len(parent.sampled_ids)],
            sampled_ids=parent.sampled_ids,
            messages=messages[:num_matched],
            tools=tools,
            clear_thinking=self._settings.clear_thinking,
        )
        tail = self._format.tail_after(turn, messages[num_matched:], thinking=thinking)
        return None if tail is None else id_array(tail)

    async def _sample(
        self, prompt: "array[int]", sampling: Sampling, on_piece: OnPiece | None
    ) -> Completion:
        self._num_running += 1
        try:
            completion = await collect(
                self._engine,
                prompt,
                sampling,
                session_id=self._settings.session_id,
                check=self._check_open,
                on_piece=on_piece,
            )
        finally:
            self._num_running -= 1
        self._check_open()
        return completion

    def _turn_sampling(self, options: TurnOptions, *, num_prompt_tokens: int) -> Sampling:
        """Return this turn's distribution and budget: what was asked for, as far as the context goes."""
        seed = self._settings.sampling.seed if options.sampling is None else None
        sampling = options.sampling or self._settings.sampling
        max_new_tokens = options.max_new_tokens
        if max_new_tokens is not None and max_new_tokens < 1:
            raise ConfigError(f"max_new_tokens={max_new_tokens} must be at least 1, or None")
        wanted = min(sampling.max_new_tokens, max_new_tokens or sampling.max_new_tokens)
        room = self._settings.max_context_tokens - num_prompt_tokens
        least = min(wanted, self._settings.min_new_tokens)
        if room < least:
            raise ContextExhausted(
                f"session {self._settings.session_id}: the prompt has {num_prompt_tokens} of "
                f"{self._settings.max_context_tokens} tokens, which leaves {room} for the answer; a "
                f"turn needs at least {least}"
            )
        if seed is not None:
            # Requests in flight count, or two of them would sample the same answer.
            seed = _turn_seed(seed, self.num_turns + self._num_running)
        if options.seed is not None:
            seed = options.seed
        interval = sampling.stream_interval_tokens
        return replace(
            sampling,
            max_new_tokens=min(wanted, room),
            stop_ids=tuple(dict.fromkeys((*self._format.stop_ids, *sampling.stop_ids))),
            stop_strings=tuple(dict.fromkeys((*sampling.stop_strings, *options.stop))),
            stream_interval_tokens=options.stream_interval_tokens if options.on_piece else interval,
            seed=sampling.seed if seed is None else seed,
        )

    def _message(
        self,
        completion: Completion,
        tools: Sequence[ToolSpec],
        *,
        thinking: bool,
        keeps_calls: bool,
    ) -> Message:
        message = self._format.parse(
            completion.sampled_ids,
            tools,
            thinking=thinking,
            call_id_prefix=f"{self._call_id_prefix}_{self.num_turns}",
        ).message
        return message if keeps_calls else replace(message, tool_calls=())


def _turn_seed(seed: int, turn: int) -> int:
    """Return a seed of its own for each turn, or every turn of a session would repeat the same luck."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{turn}".encode(), digest_size=8).digest()) >> 1


def _turn(node: Node, *, num_prompt_tokens: int) -> AssistantTurn:
    finish_reason: Literal["stop", "length", "tool_calls"] = "stop"
    if node.finish_reason == "length":
        finish_reason = "length"
    elif node.message.tool_calls:
        finish_reason = "tool_calls"
    return AssistantTurn(
        message=node.message,
        finish_reason=finish_reason,
        num_prompt_tokens=num_prompt_tokens,
        num_sampled_tokens=len(node.sampled_ids),
    )
