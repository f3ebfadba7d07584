"""A program in a real box whose only network is the gateway: every ending is typed."""

import asyncio
import json
import textwrap
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from fakes import FakeEngine, ScriptedPolicy
from longarc.envs.harnesses.custom import Custom
from longarc.envs.harnesses.env import _with_answer
from longarc.envs.harnesses.family import HarnessFamily, HarnessLimits, prompt_of
from longarc.envs.sandbox.backend import BwrapBackend
from longarc.errors import EngineLostError, RolloutError
from longarc.gateway.core import Gateway
from longarc.gateway.rollouts import RolloutSessions
from longarc.gateway.wire import WireError
from longarc.orchestrator.rollout import RolloutSpec, run_rollout
from longarc.records.message import Json, Message, Role
from longarc.records.outcome import Outcome
from longarc.records.ports import Sandbox
from longarc.records.sampling import Sampling
from longarc.records.task import Task
from longarc.records.trajectory import Admission, EpisodeResult, Reward, Trajectory
from longarc.tokens.glm import GlmFormat
from token_samples import sampled, small_tokenizer

FORMAT = GlmFormat(small_tokenizer())
ASK = """
import json, os, sys, urllib.error, urllib.request
BASE, KEY = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
PORT = int(BASE.split(":")[2].split("/")[0])
def ask(text, **more):
    body = {"model": "any", "messages": [{"role": "user", "content": text}]} | more
    headers = {"content-type": "application/json", "authorization": f"Bearer {KEY}"}
    request = urllib.request.Request(BASE + "/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.load(answer)["choices"][0]["message"]["content"]
"""
"""Begins every program: a client without any package."""
TASK = Task(
    id="notes/train/0",
    family="notes",
    split="train",
    messages=(
        Message(role=Role.SYSTEM, content="Be short."),
        Message(role=Role.USER, content="Write the word."),
    ),
)


@dataclass
class Notes:
    """A family whose grader reads a file that the program leaves."""

    name: str = "notes"
    thinking: bool = False
    episodes: list[EpisodeResult] = field(default_factory=list)

    def tasks(self, split: str, *, cursor: int) -> Iterator[Task]:
        yield TASK

    def open(self, task, *, sandboxes, seed):
        raise AssertionError("the harness works on the task")

    def workspace(self, task: Task) -> Mapping[str, bytes]:
        return {"notes/hint.txt": b"the word"}

    async def inspect(self, task: Task, sandbox: Sandbox) -> Mapping[str, Json]:
        done = await sandbox.exec(["cat", "out.txt"])
        return {"out": done.stdout.decode()}

    async def grade(self, task: Task, episode: EpisodeResult) -> Reward:
        self.episodes.append(episode)
        return Reward(value=float(episode.info.get("out") == "the word"))


@pytest.fixture
async def sandboxes():
    backend = BwrapBackend(max_idle=1)
    if not (found := await backend.probe()).is_usable:
        pytest.skip(f"no sandbox on this machine: {found.problem}")
    yield backend
    await backend.close()


@dataclass
class Stage:
    """Runs programs on the one task."""

    sandboxes: BwrapBackend
    engine: FakeEngine
    family: Notes = field(default_factory=Notes)

    async def run(
        self,
        program: str,
        *,
        limits: HarnessLimits | None = None,
        max_context_tokens: int = 4096,
        timeout_s: float = 60.0,
        **settings: Any,
    ) -> Trajectory:
        self.sessions = RolloutSessions(Gateway(self.engine, FORMAT))
        command = ["python3", "-c", ASK + textwrap.dedent(program)]
        harness = Custom(command=command, **settings)
        return await run_rollout(
            Admission(
                trajectory_id="rl/0/0/0",
                stage="rl",
                group_id="rl/0",
                group_index=0,
                member_index=0,
                attempt=0,
                task=TASK,
                policy_version=0,
                seed=1,
            ),
            HarnessFamily(self.family, harness, limits or HarnessLimits(timeout_s=20.0)),
            self.sessions,
            self.sandboxes,
            spec=RolloutSpec(
                sampling=Sampling(max_new_tokens=40),
                max_context_tokens=max_context_tokens,
                timeout_s=timeout_s,
                grader_timeout_s=5.0,
            ),
            clock=time.time,
        )


@pytest.fixture
def stage(sandboxes):
    return Stage(sandboxes, FakeEngine([sampled(f"answer {i}<|user|>") for i in range(9)]))


async def test_a_program_works_on_a_task_and_its_tokens_are_the_trajectorys(stage):
    done = await stage.run(
        """
        prompt = sys.stdin.read()
        hint = open("notes/hint.txt").read()
        first = ask(prompt)
        open("out.txt", "w").write(hint)
        open(os.environ["LONGARC_ANSWER"], "w").write("the program's own words")
        """
    )
    assert (done.outcome, done.reward, done.error) == (Outcome.COMPLETED, 1.0, None)
    (segment,) = done.segments
    sampled_ids = [i for i, s in zip(segment.token_ids, segment.is_sampled, strict=True) if s]
    assert sampled_ids == sampled("answer 0<|user|>")
    assert [(m.role.value, m.content) for m in done.messages] == [
        ("user", "Be short.\n\nWrite the word."),
        ("assistant", "answer 0"),
        ("assistant", "the program's own words"),
    ]
    assert len(done.turns) == done.num_turns == 1
    assert done.info["harness"] == "custom"
    assert done.info["exit_status"] == 0
    with pytest.raises(WireError):
        stage.sessions.access.session(path_key="whatever", bearer=None)
    assert stage.sessions.gateway.num_open_sessions == 0


async def test_a_program_reaches_the_gateway_and_nothing_else(stage):
    done = await stage.run(
        """
        import socket
        ask("x")
        seen = []
        for host, port in (("1.1.1.1", 443), ("127.0.0.1", 22), ("127.0.0.1", 8000)):
            try:
                socket.create_connection((host, port), timeout=2)
                seen.append(host)
            except OSError:
                pass
        for path in ("/s/wrong/v1/models", "/admin/sessions", "/metrics"):
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{PORT}{path}", timeout=5)
                seen.append(path)
            except urllib.error.HTTPError as error:
                assert error.code in (401, 404), error
        sys.exit(f"reached {seen}" if seen else 0)
        """
    )
    assert done.info["exit_status"] == 0, done.info["stderr_tail"]


async def test_what_a_program_fails_of_by_itself_is_graded_and_told(stage):
    done = await stage.run("ask('x'); sys.exit('the program broke')")
    assert (done.outcome, done.reward) == (Outcome.COMPLETED, 0.0)
    assert done.info["exit_status"] == 1
    assert "the program broke" in done.info["stderr_tail"]


async def test_a_program_that_never_asks_is_the_environments_fault(stage):
    done = await stage.run("sys.exit('no such option')")
    assert (done.outcome, done.reward) == (Outcome.ENV_CRASHED, None)
    assert "ended before it asked the policy: it exited with 1" in done.error
    assert "no such option" in done.error
    missing = await stage.run("", env={"PATH": "/nowhere"})
    assert missing.outcome is Outcome.ENV_CRASHED


async def test_a_request_that_the_gateway_does_not_do_is_the_environments_fault(stage):
    done = await stage.run(
        """
        try:
            ask("x", logit_bias={"5": 3})
        except urllib.error.HTTPError as error:
            sys.exit(error.read().decode())
        """
    )
    assert done.outcome is Outcome.ENV_CRASHED
    assert "asked for what the gateway does not do: logit_bias" in done.error
    went_on = await stage.run(
        """
        try:
            ask("x", logit_bias={"5": 3})
        except urllib.error.HTTPError:
            ask("x")
        """
    )
    assert went_on.outcome is Outcome.COMPLETED, "the program found another way"


async def test_a_refused_request_behind_an_answer_does_not_take_the_rollout_out_of_the_loss(stage):
    program = """
    ask("q")
    open("out.txt", "w").write("the word")
    try:
        ask("q", logit_bias={"1": 1})
    except urllib.error.HTTPError:
        pass
    """
    done = await stage.run(program)
    assert (done.outcome, done.reward) == (Outcome.COMPLETED, 1.0)
    assert "logit_bias" in done.info["refusal"]


async def test_requests_beyond_the_bound_end_the_rollout_as_turns_that_are_used_up(stage):
    done = await stage.run(
        """
        for number in range(5):
            ask(f"go on {number}")
        """,
        limits=HarnessLimits(max_requests=2, timeout_s=20.0),
    )
    assert (done.outcome, done.num_turns) == (Outcome.TRUNCATED_TURNS, 2)
    assert done.reward == 0.0


async def test_a_context_that_is_full_ends_the_rollout_as_such(stage):
    done = await stage.run("ask('x'); ask('long ' * 400)", max_context_tokens=400)
    assert (done.outcome, done.reward) == (Outcome.TRUNCATED_TOKENS, 0.0)
    none = await stage.run("ask('long ' * 400)", max_context_tokens=400)
    assert none.outcome is Outcome.ENV_CRASHED
    assert "leaves no room for an answer in 400 tokens: raise max_context_tokens" in none.error


async def test_an_answer_that_was_cut_is_no_answer(stage):
    stage.engine = FakeEngine([sampled("and so on " * 20)])
    done = await stage.run("ask('x')")
    assert done.outcome is Outcome.TRUNCATED_TOKENS


async def test_an_engine_that_is_lost_is_nobodys_fault_whatever_the_program_does_then(stage):
    def die(request: int, piece: int) -> None:
        raise EngineLostError("the engine is gone")

    stage.engine = FakeEngine([sampled("a<|user|>")] * 9, before_piece=die)
    done = await stage.run(
        """
        try:
            ask("x")
        except urllib.error.HTTPError as error:
            assert error.code == 503
        """
    )
    assert (done.outcome, done.reward) == (Outcome.ENGINE_LOST, None)
    assert "the engine is gone" in done.error


async def test_a_program_that_hangs_is_timed_out_and_what_it_said_is_kept(stage):
    started = time.monotonic()
    done = await stage.run(
        """
        ask("x")
        import subprocess, time
        hold = f"trap '' TERM; exec 3<>/dev/tcp/127.0.0.1/{PORT}; sleep 1000"
        subprocess.Popen(["bash", "-c", hold])
        time.sleep(1000)
        """,
        limits=HarnessLimits(timeout_s=2.0),
    )
    assert (done.outcome, done.num_turns, done.reward) == (Outcome.TIMED_OUT, 1, 0.0)
    assert done.messages[-1].content == "answer 0"
    again = await stage.run("ask('x'); import time; time.sleep(1000)", timeout_s=2.0)
    assert (again.outcome, again.num_turns) == (Outcome.TIMED_OUT, 1)
    assert again.messages[-1].content == "answer 1"
    assert time.monotonic() - started < 30
    next_one = await stage.run("ask('x')")
    assert next_one.outcome is Outcome.COMPLETED


async def test_a_rollout_that_is_cancelled_leaves_no_door_open(stage):
    running = asyncio.ensure_future(stage.run("ask('x'); import time; time.sleep(1000)"))
    while not stage.engine.requests:
        await asyncio.sleep(0.05)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert stage.sessions.gateway.num_open_sessions == 0
    assert not stage.sessions.access._sessions


async def test_a_policy_that_cannot_be_served_is_refused(stage):
    family = HarnessFamily(stage.family, Custom(command=["true"]))
    env = family.open(TASK, sandboxes=stage.sandboxes, seed=0)
    with pytest.raises(RolloutError, match="needs a policy that programs can reach"):
        await env.run(ScriptedPolicy([]))


def test_the_program_is_told_the_instructions_and_the_question():
    assert prompt_of(TASK) == "Be short.\n\nWrite the word."
    said = Message(role=Role.ASSISTANT, content="not this")
    assert "not this" not in prompt_of(replace(TASK, messages=(*TASK.messages, said)))


def test_an_answer_that_the_policy_gave_itself_is_not_said_twice():
    messages = (TASK.messages[1], Message(role=Role.ASSISTANT, content="done"))
    assert _with_answer(messages, "done") == messages
    assert _with_answer(messages, None) == messages
    assert json.dumps(_with_answer(messages, "other")[-1].content) == '"other"'
