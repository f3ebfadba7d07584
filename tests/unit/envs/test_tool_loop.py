import asyncio

import pytest

from fakes import FakeSandbox, ScriptedPolicy
from longarc.envs.bash_tool import BASH, bash_tool, observation
from longarc.envs.tool_loop import ToolCallError, run_tool_loop
from longarc.errors import EngineError, RolloutError, SandboxError
from longarc.records.message import Message, Role, ToolCall
from longarc.records.outcome import Outcome
from longarc.records.ports import AssistantTurn, ExecResult
from longarc.records.task import Task

TASK = Task(
    id="t/train/0",
    family="t",
    split="train",
    messages=(Message(role=Role.USER, content="go"),),
    tools=(BASH,),
)


def says(text):
    return Message(role=Role.ASSISTANT, content=text)


def calls(*tool_calls):
    return Message(role=Role.ASSISTANT, content="", tool_calls=tool_calls)


def bash(command, call_id="c0", **kwargs):
    return ToolCall(id=call_id, name="bash", arguments={"command": command}, **kwargs)


async def echo(arguments):
    return f"ran {arguments['command']}"


async def test_an_answer_without_a_call_completes():
    episode = await run_tool_loop(ScriptedPolicy([says("hi")]), TASK, {"bash": echo}, max_turns=3)

    assert episode.outcome is Outcome.COMPLETED
    assert episode.num_turns == 1
    assert episode.messages == (*TASK.messages, says("hi"))


async def test_each_request_shows_the_whole_conversation_so_far():
    policy = ScriptedPolicy([calls(bash("a")), says("done")])
    await run_tool_loop(policy, TASK, {"bash": echo}, max_turns=3)

    tool = Message(role=Role.TOOL, content="ran a", tool_call_id="c0")
    assert policy.seen == [TASK.messages, (*TASK.messages, calls(bash("a")), tool)]


async def test_a_malformed_call_gets_an_error_for_its_id_and_the_others_of_the_turn_still_run():
    broken = ToolCall(id="c0", name="bash", arguments={}, error="arguments are not an object")
    turn = calls(broken, bash("ls", "c1"), ToolCall(id="c2", name="sh", arguments={}))
    episode = await run_tool_loop(
        ScriptedPolicy([turn, says("ok")]), TASK, {"bash": echo}, max_turns=3
    )

    results = [m for m in episode.messages if m.role is Role.TOOL]
    assert [(m.tool_call_id, m.content) for m in results] == [
        ("c0", "error: arguments are not an object"),
        ("c1", "ran ls"),
        ("c2", "error: no tool 'sh'; use bash"),
    ]
    assert episode.outcome is Outcome.COMPLETED
    assert episode.info == {"num_tool_calls": 3, "num_tool_errors": 2}


async def test_a_call_without_a_required_argument_is_refused_before_the_tool_sees_it():
    empty = calls(ToolCall(id="c0", name="bash", arguments={}))
    episode = await run_tool_loop(
        ScriptedPolicy([empty, says("ok")]), TASK, {"bash": echo}, max_turns=3
    )
    assert episode.messages[2].content == "error: bash needs command"


async def test_a_tool_that_refuses_a_call_is_heard_by_the_policy():
    async def picky(arguments):
        raise ToolCallError("not like this")

    episode = await run_tool_loop(
        ScriptedPolicy([calls(bash("x")), says("ok")]), TASK, {"bash": picky}, max_turns=3
    )
    assert episode.messages[2].content == "error: not like this"
    assert episode.outcome is Outcome.COMPLETED


async def test_a_full_context_ends_as_truncated_tokens_with_the_turns_that_were_taken():
    policy = ScriptedPolicy([calls(bash("a"))])  # the script's end is a full context
    episode = await run_tool_loop(policy, TASK, {"bash": echo}, max_turns=3)
    assert (episode.outcome, episode.num_turns) == (Outcome.TRUNCATED_TOKENS, 1)


async def test_an_answer_that_was_cut_ends_as_truncated_tokens_and_its_calls_do_not_run():
    ran = []

    async def spy(arguments):
        ran.append(arguments)
        return ""

    cut = AssistantTurn(
        message=calls(bash("rm")), finish_reason="length", num_prompt_tokens=1, num_sampled_tokens=1
    )
    episode = await run_tool_loop(ScriptedPolicy([cut]), TASK, {"bash": spy}, max_turns=3)
    assert (episode.outcome, ran) == (Outcome.TRUNCATED_TOKENS, [])
    assert episode.messages[-1] == cut.message


async def test_too_many_turns_end_as_truncated_turns():
    policy = ScriptedPolicy([calls(bash("a"))] * 9)
    episode = await run_tool_loop(policy, TASK, {"bash": echo}, max_turns=2)
    assert (episode.outcome, episode.num_turns) == (Outcome.TRUNCATED_TURNS, 2)


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (SandboxError("gone"), Outcome.SANDBOX_LOST),
        (RolloutError("broken"), Outcome.ENV_CRASHED),
        (ZeroDivisionError("bug in a tool"), Outcome.ENV_CRASHED),
    ],
)
async def test_a_failing_world_ends_the_episode_as_noise_and_keeps_what_was_said(error, outcome):
    async def failing(arguments):
        raise error

    episode = await run_tool_loop(
        ScriptedPolicy([calls(bash("a"))]), TASK, {"bash": failing}, max_turns=3
    )
    assert episode.outcome is outcome
    assert not episode.outcome.is_trainable
    assert str(error) in str(episode.info["error"])
    assert episode.messages[-1] == calls(bash("a"))


async def test_an_engine_error_is_left_to_whoever_runs_the_engine():
    class Dead:
        async def chat(self, messages, *, tools=(), max_new_tokens=None):
            raise EngineError("stopped")

    with pytest.raises(EngineError):
        await run_tool_loop(Dead(), TASK, {"bash": echo}, max_turns=1)


async def test_cancellation_passes_through_a_running_tool():
    started = asyncio.Event()

    async def slow(arguments):
        started.set()
        await asyncio.Event().wait()

    loop = asyncio.ensure_future(
        run_tool_loop(ScriptedPolicy([calls(bash("a"))]), TASK, {"bash": slow}, max_turns=3)
    )
    await started.wait()
    loop.cancel()
    with pytest.raises(asyncio.CancelledError):
        await loop


async def observed(tmp_path, command, *, timeout_s=10.0, max_output_chars=40):
    tool = bash_tool(FakeSandbox(tmp_path), timeout_s=timeout_s, max_output_chars=max_output_chars)
    return await tool({"command": command})


async def test_a_command_that_hangs_is_told_so_and_the_episode_goes_on(tmp_path):
    assert await observed(tmp_path, "sleep 60", timeout_s=0.2) == "timed out after 0.2 s"


def test_what_a_hanging_command_printed_before_is_still_shown():
    cut = ExecResult(rc=None, stdout=b"before\n", stderr=b"", timed_out=True)
    assert observation(cut, timeout_s=5, max_output_chars=40) == "before\ntimed out after 5 s"


def test_output_that_the_sandbox_dropped_is_marked_as_cut():
    long = ExecResult(rc=0, stdout=b"aa", stderr=b"", num_dropped_bytes=9)
    assert observation(long, timeout_s=5, max_output_chars=40) == "aa\n[cut]"


@pytest.mark.parametrize(
    ("command", "text"),
    [
        ("printf 'a\\nb\\n'", "a\nb"),
        ("echo out; echo err >&2", "out\nerr"),
        ("true", "[empty]"),
        ("exit 3", "[exit 3]"),
        ("seq 1000 2000 | tr -d '\\n'", "1000100110021003100410051006100710081009\n[cut]"),
        ("printf '\\377'", "\N{REPLACEMENT CHARACTER}"),
    ],
)
async def test_what_the_policy_reads_of_a_command(tmp_path, command, text):
    assert await observed(tmp_path, command) == text


@pytest.mark.parametrize("command", [1, None, "a\0b"])
async def test_a_command_that_cannot_be_run_is_refused(tmp_path, command):
    with pytest.raises(ToolCallError, match="must be text"):
        await observed(tmp_path, command)


async def test_a_sandbox_that_reports_its_own_failure_is_not_the_policys_fault(tmp_path):
    tool = bash_tool(
        FakeSandbox(tmp_path, reports_failure=True), timeout_s=1.0, max_output_chars=40
    )
    with pytest.raises(RolloutError, match="the sandbox failed under 'ls': gone"):
        await tool({"command": "ls"})
