"""The white-box agent loop: policy speaks, tools answer, until there is nothing more to do.

::

    messages --fit to the context--> chat --> assistant message --tool calls--> tools --results--> messages
                                                   |
                                                   +-- no calls: completed

What the policy does wrong is data: a malformed call, an unknown tool, a command that hangs all come
back to it as text, and the episode is graded. What the world does wrong ends the episode with an
environment outcome, which keeps it out of the loss.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeAlias

from longarc.config.context import ContextConfig
from longarc.envs.context_manager import make_context
from longarc.errors import RolloutError, SandboxError, boundary
from longarc.records.lineage import Lineage
from longarc.records.message import Json, Message, Role, ToolCall, ToolSpec
from longarc.records.outcome import Outcome
from longarc.records.ports import AssistantTurn, ContextExhausted, PolicyClient
from longarc.records.task import Task
from longarc.records.trajectory import EpisodeResult

ToolFunction: TypeAlias = Callable[[Mapping[str, Json]], Awaitable[str]]
"""Runs one call and returns what the policy shall read."""


class ToolCallError(Exception):
    """A tool refuses a call that the policy made wrongly; the message goes back to the policy."""


async def run_tool_loop(
    policy: PolicyClient,
    task: Task,
    tools: Mapping[str, ToolFunction],
    *,
    max_turns: int,
    max_new_tokens: int | None = None,
    context: ContextConfig | None = None,
) -> EpisodeResult:
    """Let the policy act on ``task`` until it answers without a call, or a bound is reached.

    Args:
        policy: the session of this rollout.
        task: its messages open the conversation and its tool descriptions are shown.
        tools: what runs a call, by name; every name of ``task.tools`` needs one.
        max_turns: answers the policy may give [turns].
        max_new_tokens: bound of one answer [tokens]; None leaves it to the session.
        context: what keeps the conversation within the context; None shows everything until it is full.

    Returns:
        The episode, its conversation as it stood at the end. ``info`` holds ``num_tool_calls``,
        ``num_tool_errors``, what was done about the context and, where the world failed, ``error``.
        An ``EngineError`` is not caught: whoever runs the engine says what it was.
    """
    messages = list(task.messages)
    counts = {"num_tool_calls": 0, "num_tool_errors": 0}
    facts: dict[str, Json] = {}
    outcome = Outcome.TRUNCATED_TURNS
    num_turns = 0
    manager = make_context(context, opening=task.messages, tools=task.tools)
    while num_turns < max_turns:
        try:
            shown = await manager.fit(messages, policy)
            turn = await _asked(policy, shown, task.tools, max_new_tokens, manager.lineage)
        except ContextExhausted:
            outcome = Outcome.TRUNCATED_TOKENS
            break
        num_turns += 1
        messages.append(turn.message)
        if turn.finish_reason == "length":
            outcome = Outcome.TRUNCATED_TOKENS
            break
        if not turn.message.tool_calls:
            outcome = Outcome.COMPLETED
            break
        try:
            await _run_calls(turn.message.tool_calls, tools, task.tools, messages, counts)
        except (SandboxError, RolloutError) as error:
            is_lost = isinstance(error, SandboxError)
            outcome = Outcome.SANDBOX_LOST if is_lost else Outcome.ENV_CRASHED
            facts["error"] = str(error)
            break
    return EpisodeResult(
        outcome=outcome,
        messages=tuple(messages),
        num_turns=num_turns,
        info={**counts, **manager.counts, **facts},
    )


async def _asked(
    policy: PolicyClient,
    messages: Sequence[Message],
    tools: tuple[ToolSpec, ...],
    max_new_tokens: int | None,
    lineage: Lineage | None,
) -> AssistantTurn:
    """Ask the policy; only an environment that rewrites its context says who asks."""
    if lineage is None:
        return await policy.chat(messages, tools=tools, max_new_tokens=max_new_tokens)
    return await policy.chat(messages, tools=tools, max_new_tokens=max_new_tokens, lineage=lineage)


async def _run_calls(
    calls: tuple[ToolCall, ...],
    tools: Mapping[str, ToolFunction],
    specs: tuple[ToolSpec, ...],
    messages: list[Message],
    counts: dict[str, int],
) -> None:
    """Answer the calls of one turn in their order, each with one tool message."""
    for call in calls:
        counts["num_tool_calls"] += 1
        try:
            text = await _answer(call, tools, specs)
        except ToolCallError as refusal:
            counts["num_tool_errors"] += 1
            text = f"error: {refusal}"
        messages.append(Message(role=Role.TOOL, content=text, tool_call_id=call.id))


async def _answer(
    call: ToolCall, tools: Mapping[str, ToolFunction], specs: tuple[ToolSpec, ...]
) -> str:
    """Run one call; a call that cannot run is refused, and the others of its turn still run."""
    if call.error is not None:
        raise ToolCallError(call.error)
    spec = next((s for s in specs if s.name == call.name), None)
    if spec is None or call.name not in tools:
        raise ToolCallError(
            f"no tool {call.name!r}; use {', '.join(s.name for s in specs) or 'none'}"
        )
    required = spec.parameters.get("required", ())
    for name in required if isinstance(required, (list, tuple)) else ():
        if name not in call.arguments:
            raise ToolCallError(f"{call.name} needs {name}")
    return await _run(tools[call.name], call)


async def _run(tool: ToolFunction, call: ToolCall) -> str:
    refusal: ToolCallError | None = None
    with boundary(RolloutError, f"tool {call.name} crashed"):
        try:
            return await tool(call.arguments)
        except ToolCallError as error:
            refusal = error
    raise refusal
