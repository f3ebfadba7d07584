"""Real agent programs in a real box, against the embedded engine: ``make integration``.

Each is tried with the embedded engine's own tokens, which are nonsense, and with a scripted policy behind the same
engine port that solves the task (``agent_cases``). Whatever happens, every token that the engine sampled is in
exactly one segment, behind exactly the prompt that the engine saw.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from agent_cases import ROOT, Say, Trail, check_exact, play, trail_task
from longarc.envs.harnesses.claude_code import ClaudeCode
from longarc.envs.harnesses.codex import Codex
from longarc.envs.harnesses.custom import Custom
from longarc.envs.harnesses.family import HarnessLimits
from longarc.envs.harnesses.mini_swe_agent import MiniSweAgent
from longarc.envs.harnesses.openai_agents import OpenAiAgents
from longarc.envs.harnesses.opencode import Opencode
from longarc.records.outcome import Outcome
from longarc.records.ports import Harness

pytestmark = pytest.mark.integration

AGENTS = ROOT / ".agents"
CLIENTS = Path(__file__).with_name("clients")


def bash(command: str) -> tuple[str, dict[str, Any]]:
    return "bash", {"command": command}


def described_bash(command: str) -> tuple[str, dict[str, Any]]:
    return "bash", {"command": command, "description": "look"}


def claude_bash(command: str) -> tuple[str, dict[str, Any]]:
    return "Bash", {"command": command, "description": "look"}


def exec_command(command: str) -> tuple[str, dict[str, Any]]:
    return "exec_command", {"cmd": command}


def submitted(code: str) -> Say:
    return Say("done", (bash(f"echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; echo '{code}'"),))


def observed(prompt: str) -> int:
    """Steps of smolagents, which tells what happened as text."""
    return prompt[prompt.rfind("New task:") :].count("Observation:")


def final_answer(code: str) -> Say:
    return Say("", (("final_answer", {"answer": code}),))


def code_call(command: str) -> tuple[str, dict[str, Any]]:
    raise AssertionError("a code agent writes its calls")


@dataclass(frozen=True)
class CodeTrail(Trail):
    """The trail for an agent that writes Python."""

    def __call__(self, prompt: str) -> Say:
        step = observed(prompt)
        if step < len(self.steps):
            return Say(f"Thought: next\n<code>\nprint(bash({self.steps[step]!r}))\n</code>")
        return Say(f"Thought: done\n<code>\nfinal_answer({self.code!r})\n</code>")


def client(name: str, mode: str) -> Callable[[], Harness]:
    """The harness of an SDK's client script."""
    return lambda: Custom(
        command=["{python}", f"/opt/agent/{name}_client.py"],
        venv=str(AGENTS / name),
        shows={f"{name}_client.py": str(CLIENTS / f"{name}_client.py")},
        env={"MODE": mode, "LITELLM_LOCAL_MODEL_COST_MAP": "True"},
    )


@dataclass(frozen=True)
class Case:
    """A program and how a policy plays it."""

    agent: str
    """Its folder below ``.agents``."""
    make: Callable[[], Harness]
    trail: Callable[[Any], Trail] = lambda task: Trail(task, bash)
    num_segments: int = 1


def case_of(agent: str, program: str, kind: Callable[..., Harness], **more: Any) -> Case:
    return Case(agent, lambda: kind(program=str(AGENTS / agent / program)), **more)


CASES: Mapping[str, Case] = {
    "claude-code": case_of(
        "claude-code",
        "node_modules/.bin/claude",
        ClaudeCode,
        trail=lambda task: Trail(task, claude_bash),
    ),
    "codex": case_of(
        "codex",
        "node_modules/.bin/codex",
        Codex,
        trail=lambda task: Trail(task, exec_command),
    ),
    "opencode": case_of(
        "opencode",
        "node_modules/.bin/opencode",
        Opencode,
        trail=lambda task: Trail(task, described_bash),
        num_segments=2,
    ),
    "mini-swe-agent": case_of(
        "mini-swe-agent",
        "bin/mini",
        MiniSweAgent,
        trail=lambda task: Trail(task, bash, say=submitted),
    ),
    **{
        f"openai-agents-{api}": Case(
            "openai-agents",
            lambda api=api: OpenAiAgents(program=str(AGENTS / "openai-agents/bin/python"), api=api),
        )
        for api in ("chat", "responses")
    },
    **{
        f"{name}-{mode}": Case(name, client(name, mode))
        for name, modes in {
            "openai": ("chat", "chat-stream", "responses", "responses-stream"),
            "anthropic": ("whole", "stream"),
            "litellm": ("openai", "hosted_vllm", "anthropic"),
        }.items()
        for mode in modes
    },
    # It tells the model's calls back as text, so each step is a conversation of its own.
    "smolagents-tools": Case(
        "smolagents",
        client("smolagents", "tools"),
        trail=lambda task: Trail(task, bash, say=final_answer, step_of=observed),
        num_segments=4,
    ),
    "smolagents-code": Case(
        "smolagents",
        client("smolagents", "code"),
        trail=lambda task: CodeTrail(task, code_call),
        num_segments=4,
    ),
}


def made(case: Case) -> Harness:
    if not (AGENTS / case.agent).is_dir():
        pytest.skip(f".agents/{case.agent} is missing: make agent-{case.agent}")
    return case.make()


@pytest.mark.parametrize("name", CASES)
async def test_a_task_is_solved_and_every_token_is_where_the_engine_sampled_it(name):
    case, task = CASES[name], trail_task()
    played = await play(made(case), case.trail(task), task=task)
    trajectory = played.trajectory
    assert (trajectory.outcome, trajectory.error) == (Outcome.COMPLETED, None)
    assert trajectory.reward == 1.0
    assert check_exact(trajectory.segments, played.seen) > 0
    assert len(trajectory.segments) == case.num_segments
    assert len(trajectory.turns) == len(played.seen) == trajectory.num_turns
    assert trajectory.tools or name == "smolagents-code"


@pytest.mark.parametrize("name", CASES)
async def test_whatever_the_models_own_tokens_do_to_the_program_they_stay_exact(name):
    played = await play(made(CASES[name]), None, max_new_tokens=60)
    assert played.seen, played.trajectory.error
    assert check_exact(played.segments, played.seen) > 0
    assert played.trajectory.outcome.is_trainable, played.trajectory.error


def in_shell(name: str) -> list[str]:
    """Arguments that keep Claude Code's prompt short."""
    return ["--tools", name, "--system-prompt", "You work in a shell."]


def claude(*arguments: str) -> ClaudeCode:
    made(CASES["claude-code"])
    return ClaudeCode(
        program=str(AGENTS / "claude-code/node_modules/.bin/claude"), arguments=arguments
    )


SUBTASK = "SUBTASK read the first file"
FOUND = "the sub-agent read it and found where it leads to"


@dataclass(frozen=True)
class Delegated(Trail):
    """The first command of a trail is left to a sub-agent."""

    delegate: Callable[[int, str], Say | None] = lambda step, prompt: None
    """What the main agent says at a step until the sub-agent has answered."""
    num_delegating: int = 1

    def __call__(self, prompt: str) -> Say:
        if "title generator" in prompt:
            return Say("Find the code")
        step = self.step_of(prompt)
        at = max(prompt.rfind(f"<|user|>{SUBTASK}"), prompt.rfind(f"\n\n{SUBTASK}"))
        if at >= 0:
            return (
                Say(FOUND) if self.step_of(prompt[at:]) else Say("sub", (self.call(self.steps[0]),))
            )
        if step < self.num_delegating:
            said = self.delegate(step, prompt)
            assert said is not None
            return said
        return Trail(self.task, self.call)(
            prompt.replace("<|observation|>", "", self.num_delegating - 1)
        )


async def test_sub_agents_of_claude_code_are_agents_of_their_own():
    task = trail_task()
    arguments = {"description": "read", "prompt": SUBTASK, "subagent_type": "general-purpose"}
    policy = Delegated(task, claude_bash, delegate=lambda *_: Say("go", (("Agent", arguments),)))
    played = await play(claude(), policy, task=task)
    check_exact(played.segments, played.seen)
    main, sub = played.segments
    assert played.trajectory.reward == 1.0
    assert (main.kind, main.agent_id, main.parent_agent_id) == ("exec", "main", None)
    assert (sub.kind, sub.parent_agent_id, sub.parent) == ("exec", "main", 0)
    assert sub.agent_id != "main"
    assert sub.num_trained_tokens > 0


async def test_sub_agents_of_codex_are_agents_of_their_own():
    task, codex = trail_task(), made(CASES["codex"])

    def delegate(step: int, prompt: str) -> Say:
        if step == 0:
            return Say("go", (("multi_agent_v1__spawn_agent", {"message": SUBTASK}),))
        name = prompt.rpartition('"agent_id":"')[2].partition('"')[0]
        return Say(
            "wait", (("multi_agent_v1__wait_agent", {"targets": [name], "timeout_ms": 60000}),)
        )

    policy = Delegated(task, exec_command, delegate=delegate, num_delegating=2)
    played = await play(codex, policy, task=task)
    check_exact(played.segments, played.seen)
    main, sub = played.segments
    assert played.trajectory.reward == 1.0
    assert (main.agent_id, sub.parent_agent_id, sub.parent) == ("main", "main", 0)
    assert f'"agent_id":"{sub.agent_id}"' in played.prompts[-1], "its own name for the agent"


async def test_sub_agents_of_opencode_are_agents_of_their_own_and_its_title_is_beside_the_work():
    task, opencode = trail_task(), made(CASES["opencode"])
    arguments = {"description": "read", "prompt": SUBTASK, "subagent_type": "general"}
    policy = Delegated(task, described_bash, delegate=lambda *_: Say("go", (("task", arguments),)))
    played = await play(opencode, policy, task=task)
    check_exact(played.segments, played.seen)
    assert played.trajectory.reward == 1.0
    by_kind = {s.kind.value: s for s in played.segments if s.kind != "exec"}
    assert by_kind["side"].num_trained_tokens == 0
    main, sub = (s for s in played.segments if s.kind == "exec")
    assert (main.agent_id, sub.parent_agent_id, sub.parent) == ("main", "main", main.order)
    assert sub.agent_id.startswith("ses_")


SUMMARY = "The files tell where to go: I read the first two, and the third one is what is left to be read."


@dataclass(frozen=True)
class Forgetful(Trail):
    """Floods its context, sums up when it is asked to, and then reads the last file."""

    asked: str = ""
    """What stands in a request for a summary, in lower case."""
    num_lines: int = 2000

    def __call__(self, prompt: str) -> Say:
        if "title generator" in prompt:
            return Say("Find the code")
        if self.asked in prompt.lower()[-7000:] or self.asked in prompt.lower()[:2000]:
            return Say(f"<summary>\n{SUMMARY}\n</summary>")
        at = prompt.rfind(SUMMARY)
        if at < 0:
            step = self.step_of(prompt)
            return Say("look", (self.call(f"echo {step}; seq 1 {self.num_lines}"),))
        if f"code: {self.task.data['code']}" in prompt[at:]:
            return Say(self.code)
        return Say("after", (self.call(self.steps[-1]),))


COMPACTED = [("exec", "main", 0, None), ("summary", "main", 0, 0), ("exec", "main", 1, 1)]


async def test_a_compaction_of_claude_code_is_a_summary_and_the_next_window():
    task = trail_task()
    policy = Forgetful(
        task, claude_bash, asked="create a detailed summary of the conversation", num_lines=3000
    )
    played = await play(claude(*in_shell("Bash")), policy, task=task, max_context_tokens=60_000)
    check_exact(played.segments, played.seen)
    assert played.trajectory.reward == 1.0
    assert played.lineage == COMPACTED
    assert all(s.num_trained_tokens for s in played.segments)


async def test_a_compaction_of_codex_is_a_summary_and_the_next_window():
    task, codex = trail_task(), made(CASES["codex"])
    policy = Forgetful(task, exec_command, asked="context checkpoint compaction")
    played = await play(codex, policy, task=task, max_context_tokens=40_000)
    check_exact(played.segments, played.seen)
    assert played.trajectory.reward == 1.0
    assert played.lineage == COMPACTED


async def test_a_compaction_of_opencode_is_a_summary_and_the_next_window():
    task, opencode = trail_task(), made(CASES["opencode"])
    policy = Forgetful(task, described_bash, asked="context summarization agent")
    played = await play(opencode, policy, task=task, max_context_tokens=30_000)
    check_exact(played.segments, played.seen)
    work = [s for s in played.segments if s.kind != "side"]
    assert [(s.kind.value, s.agent_id, s.window) for s in work] == [
        ("exec", "main", 0),
        ("summary", "main", 0),
        ("exec", "main", 1),
    ]
    assert [s.parent for s in work[1:]] == [work[0].order, work[1].order]


async def test_a_context_that_is_full_and_turns_that_are_used_up_end_a_rollout_as_such():
    task = trail_task()
    trail = Trail(task, claude_bash)
    few = await play(
        claude(*in_shell("Bash")), trail, task=task, limits=HarnessLimits(max_requests=2)
    )
    assert (few.trajectory.outcome, few.trajectory.num_turns) == (Outcome.TRUNCATED_TURNS, 2)
    flood = Forgetful(task, claude_bash, asked="nobody asks", num_lines=3000)
    full = await play(claude(*in_shell("Bash")), flood, task=task, max_context_tokens=4000)
    assert full.trajectory.outcome is Outcome.TRUNCATED_TOKENS
    assert full.trajectory.reward == 0.0
    none = await play(claude(*in_shell("Bash")), trail, task=task, max_context_tokens=1000)
    assert none.trajectory.outcome is Outcome.ENV_CRASHED
    assert "leaves no room for an answer in 1000 tokens" in none.trajectory.error
