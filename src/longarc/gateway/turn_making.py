"""What of a turn is decided before it is sampled, and what the client gets of it afterwards."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from longarc.errors import ConfigError
from longarc.gateway.completion import Completion
from longarc.gateway.session_settings import SessionSettings
from longarc.gateway.stops import cut_at_stop, first_stop
from longarc.gateway.turn_options import TurnOptions, TurnStart
from longarc.records.constraint import Constraint, Reasoning
from longarc.records.message import Message, ToolSpec
from longarc.records.ports import ContextExhausted
from longarc.records.sampling import Sampling
from longarc.tokens.chat_format import ChatFormat

_END_CALL: Final = "</tool_call>"


def opening_ids(
    chat_format: ChatFormat, options: TurnOptions, *, thinking: bool
) -> tuple[int, ...]:
    """Return the ids that begin the answer in the model's place: those of the call that it has to make.

    Raises:
        ConfigError: the chat format cannot begin a call.
    """
    if options.forced_call is None:
        return ()
    ids = chat_format.call_opening(options.forced_call or None, thinking=thinking)
    if ids is None:
        raise ConfigError(
            f"the chat format {chat_format.name} cannot begin a call, so none can be forced; send "
            f"tool_choice 'auto'"
        )
    return ids


def turn_sampling(
    settings: SessionSettings,
    chat_format: ChatFormat,
    options: TurnOptions,
    *,
    num_prompt_tokens: int,
) -> Sampling:
    """Return a turn's distribution and budget: what was asked for, as far as the context goes.

    Raises:
        ConfigError: the budget is not positive, or one call alone cannot be asked of the chat format.
        ContextExhausted: there is no room for an answer.
    """
    sampling = options.sampling or settings.sampling
    if options.max_new_tokens is not None and options.max_new_tokens < 1:
        raise ConfigError(f"max_new_tokens={options.max_new_tokens} must be at least 1, or None")
    wanted = min(sampling.max_new_tokens, options.max_new_tokens or sampling.max_new_tokens)
    room = settings.max_context_tokens - num_prompt_tokens
    least = min(wanted, settings.min_new_tokens)
    if room < least:
        raise ContextExhausted(
            f"session {settings.session_id}: the prompt has {num_prompt_tokens} of "
            f"{settings.max_context_tokens} tokens, which leaves {room} for the answer; a "
            f"turn needs at least {least}"
        )
    end_ids, end_strings = _ends(chat_format) if options.one_call else ((), ())
    stop_ids = (*chat_format.stop_ids, *sampling.stop_ids, *end_ids)
    stop_strings = (*sampling.stop_strings, *options.stop, *end_strings)
    interval = sampling.stream_interval_tokens
    return replace(
        sampling,
        max_new_tokens=min(wanted, room),
        stop_ids=tuple(dict.fromkeys(stop_ids)),
        stop_strings=tuple(dict.fromkeys(stop_strings)),
        stream_interval_tokens=options.stream_interval_tokens if options.on_progress else interval,
    )


def constraint_of(
    chat_format: ChatFormat, options: TurnOptions, tools: Sequence[ToolSpec], *, thinking: bool
) -> Constraint | None:
    """Return what the answer has to follow; None where nothing was asked for, or a call is forced.

    Raises:
        ConfigError: nobody knows where the answer begins in this chat format.
    """
    if options.json_schema is None or options.forced_call is not None:
        return None
    tags = chat_format.streamed_tags
    if tags is None:
        raise ConfigError(
            f"nobody knows where reasoning ends in an answer of the chat format {chat_format.name}, so none can be made "
            f"to follow a JSON schema; ask for plain text"
        )
    reasoning: Reasoning = "none"
    if thinking:
        reasoning = "open" if tags.opens_thinking else "optional"
    return Constraint(
        json_schema=options.json_schema,
        reasoning=reasoning,
        allows_calls=bool(tools) and options.tool_choice != "none",
        tags_by_id=tags.by_id,
    )


def turn_message(
    settings: SessionSettings,
    chat_format: ChatFormat,
    completion: Completion,
    tools: Sequence[ToolSpec],
    options: TurnOptions,
    start: TurnStart,
) -> tuple[Message, str | None]:
    """Return the answer as the client gets it, and the stop text that ended it."""
    message = chat_format.parse(
        (*start.opening_ids, *completion.sampled_ids),
        tools,
        thinking=start.thinking,
        call_id_prefix=start.call_id_prefix,
    ).message
    if options.tool_choice == "none":
        message = replace(message, tool_calls=())
    stop = stop_of(settings, chat_format, completion.sampled_ids, completion.finish_reason, options)
    return (message if stop is None else cut_at_stop(message, stop)), stop


def stop_of(
    settings: SessionSettings,
    chat_format: ChatFormat,
    sampled_ids: Sequence[int],
    finish_reason: str,
    options: TurnOptions,
) -> str | None:
    """Return the stop text that ended a completion, if one did."""
    sampling = options.sampling or settings.sampling
    stops = (*sampling.stop_strings, *options.stop)
    if not stops or finish_reason != "stop" or sampled_ids[-1] in chat_format.stop_ids:
        return None
    return first_stop(chat_format.tokenizer.decode(list(sampled_ids)), stops)


def _ends(chat_format: ChatFormat) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Return what ends a completion behind its first call: an id, or a text."""
    if chat_format.streamed_tags is None:
        raise ConfigError(
            f"nobody knows where a call of the chat format {chat_format.name} ends before the answer does, so "
            f"parallel calls cannot be left out; allow them"
        )
    end_id = chat_format.tokenizer.special_tokens.get(_END_CALL)
    return ((), (_END_CALL,)) if end_id is None else ((end_id,), ())
