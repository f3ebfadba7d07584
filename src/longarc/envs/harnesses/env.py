"""The environment of a rollout in which a program speaks for the agent.

::

    box: workspace, the program --127.0.0.1:PORT--> listening socket, held outside --> the policy's door
    program ends --> look at the box --> close it --> episode

The gateway is all that the box can reach. What the policy did wrong is an episode to grade; a program that never
asked, or that was refused, is the environment's fault.
"""

from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, Final

from longarc.envs.harnesses.running import facts_of, tail_of
from longarc.errors import RolloutError, SandboxError
from longarc.records.message import Json, Message, Role
from longarc.records.outcome import Outcome
from longarc.records.ports import (
    Harness,
    HarnessResult,
    PolicyClient,
    Sandbox,
    SandboxBackend,
    SandboxSpec,
    ServablePolicy,
    ServedPolicy,
)
from longarc.records.task import Task
from longarc.records.trajectory import EpisodeResult

PORT: Final = 42101
"""Where the program finds the gateway, on the box's loopback."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HarnessEnv:
    """One rollout of a program; satisfies ``Env``."""

    task: Task
    prompt: str
    harness: Harness
    sandboxes: SandboxBackend
    spec: SandboxSpec
    """The box: the task's files, and what the program needs to be shown."""
    max_requests: int
    """Requests that are answered [turns]."""
    timeout_s: float
    """How long the program may take [seconds]."""
    inspect: Callable[[Sandbox], Coroutine[Any, Any, Mapping[str, Json]]] | None = None
    """What the grader wants to know of the box, before it is closed."""

    async def run(self, policy: PolicyClient) -> EpisodeResult:
        """Let the program work until it ends."""
        if not isinstance(policy, ServablePolicy):
            raise RolloutError(
                f"harness {self.harness.name!r} needs a policy that programs can reach, but {type(policy).__name__} "
                f"cannot be served; open sessions with longarc.gateway.rollouts.RolloutSessions"
            )
        sandbox = await self.sandboxes.create(self.spec)
        try:
            listener = await sandbox.listen(PORT)
            async with policy.serve(listener, max_requests=self.max_requests) as served:
                result = await self.harness.run(
                    self.prompt, policy=served, sandbox=sandbox, timeout_s=self.timeout_s
                )
            found = {} if self.inspect is None else await self._inspected(sandbox, result)
            return self._episode(served, result, found)
        finally:
            await sandbox.close()

    async def _inspected(self, sandbox: Sandbox, result: HarnessResult) -> Mapping[str, Json]:
        if result.run.failure is not None:
            return {}
        assert self.inspect is not None
        return await self.inspect(sandbox)

    def _episode(
        self, served: ServedPolicy, result: HarnessResult, found: Mapping[str, Json]
    ) -> EpisodeResult:
        done, name = result.run, self.harness.name
        if done.failure is not None:
            raise SandboxError(f"the box of harness {name!r} was lost: {tail_of(done.stderr)}")
        told = f"it exited with {done.rc} and said {tail_of(done.stderr, 500)!r}"
        # Once the policy has acted, a refused request may be its own doing: it would choose what counts.
        if served.refusal is not None and served.num_turns == 0:
            raise RolloutError(
                f"harness {name!r} asked for what the gateway does not do: {served.refusal}; {told}"
            )
        if served.num_requests == 0:
            raise RolloutError(f"harness {name!r} ended before it asked the policy: {told}")
        if served.num_turns == 0 and served.exhausted is not None:
            raise RolloutError(
                f"the first request of harness {name!r} leaves no room for an answer in {served.max_context_tokens} "
                f"tokens: raise max_context_tokens, or give the program fewer tools and a shorter system prompt; {told}"
            )
        outcome = served.exhausted or Outcome.COMPLETED
        if done.timed_out:
            outcome = Outcome.TIMED_OUT
        refused: dict[str, Json] = {} if served.refusal is None else {"refusal": served.refusal}
        return EpisodeResult(
            outcome=outcome,
            messages=_with_answer(served.conversation() or self.task.messages, result.answer),
            num_turns=served.num_turns,
            info={"harness": name, **facts_of(done), **refused, **found},
        )


def _with_answer(messages: tuple[Message, ...], answer: str | None) -> tuple[Message, ...]:
    """Return a conversation that ends with the program's answer, where that is not what the policy said last."""
    if answer is None:
        return messages
    last = messages[-1]
    if last.role is Role.ASSISTANT and not last.tool_calls and last.content == answer:
        return messages
    return (*messages, Message(role=Role.ASSISTANT, content=answer))
