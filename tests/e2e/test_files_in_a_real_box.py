"""The files family in the sandbox that training uses."""

from itertools import islice

import pytest

from fakes import ScriptedPolicy
from longarc.envs.sandbox.backend import BwrapBackend
from longarc.envs.tasks.files import Files, simulated
from longarc.records.message import Message, Role, ToolCall
from longarc.records.outcome import Outcome

pytestmark = pytest.mark.e2e


@pytest.fixture
async def sandboxes():
    backend = BwrapBackend(max_boxes=4)
    found = await backend.probe()
    if not found.is_usable:
        await backend.close()
        pytest.skip(f"no sandbox on this machine: {found.problem}")
    yield backend
    await backend.close()


def bash(command):
    call = ToolCall(id="c", name="bash", arguments={"command": command})
    return Message(role=Role.ASSISTANT, content="", tool_calls=(call,))


async def test_the_expert_follows_every_trail_and_reads_what_its_demonstrations_show(sandboxes):
    family = Files(indirect_frac=0.5)
    for task in islice(family.tasks("test", cursor=0), 12):
        answer = Message(role=Role.ASSISTANT, content=f"code: {task.data['code']}")
        script = [*map(bash, task.data["steps"]), answer]
        episode = await family.open(task, sandboxes=sandboxes, seed=0).run(ScriptedPolicy(script))
        shown = [m.content for m in episode.messages if m.role is Role.TOOL]
        assert shown == [simulated(step, task.data["files"]) for step in task.data["steps"]]
        assert (await family.grade(task, episode)).value == 1.0


@pytest.mark.parametrize("look", ["grep -rh ^code: *", "grep -rl ^code: *", "grep -rl ^"])
async def test_the_order_of_a_listing_does_not_give_the_code_away(sandboxes, look):
    family = Files()
    num_tasks, ends = 80, {"first": 0, "last": 0}
    for task in islice(family.tasks("test", cursor=0), num_tasks):
        env = family.open(task, sandboxes=sandboxes, seed=0)
        episode = await env.run(ScriptedPolicy([bash(look)]))
        (shown,) = [m.content for m in episode.messages if m.role is Role.TOOL]
        files, right = task.data["files"], f"code: {task.data['code']}"
        lines = shown.splitlines()
        assert len(lines) >= 3
        for end, line in (("first", lines[0]), ("last", lines[-1])):
            ends[end] += right in files.get(line, line)
    # By chance one in four of the listed codes, one in ten of all files; made in trail order, three in four.
    assert max(ends.values()) < 0.45 * num_tasks, ends


async def test_mistakes_read_as_demonstrations_show_them(sandboxes):
    family = Files()
    task = next(family.tasks("test", cursor=0))
    wrong = ["cat d3/n00", "cat missing/n11"]
    env = family.open(task, sandboxes=sandboxes, seed=0)
    episode = await env.run(ScriptedPolicy(map(bash, wrong)))
    shown = [m.content for m in episode.messages if m.role is Role.TOOL]
    assert shown == [simulated(step, {}) for step in wrong]


async def test_a_command_that_hangs_is_told_so_graded_zero_and_the_box_still_works(sandboxes):
    family = Files(command_timeout_s=0.5)
    task = next(family.tasks("test", cursor=0))
    env = family.open(task, sandboxes=sandboxes, seed=0)
    answer = Message(role=Role.ASSISTANT, content="code: none")
    episode = await env.run(ScriptedPolicy([bash("sleep 60"), bash("echo alive"), answer]))
    shown = [m.content for m in episode.messages if m.role is Role.TOOL]
    assert shown == ["timed out after 0.5 s", "alive"]
    assert episode.outcome is Outcome.COMPLETED
    assert (await family.grade(task, episode)).value == 0.0


async def test_the_host_and_other_tasks_are_out_of_reach(sandboxes):
    family = Files()
    task = next(family.tasks("test", cursor=0))
    env = family.open(task, sandboxes=sandboxes, seed=0)
    look = "ls -A; ls -A ..; ls /root /home 2>/dev/null | head -3"
    episode = await env.run(ScriptedPolicy([bash(look)]))
    (shown,) = [m.content for m in episode.messages if m.role is Role.TOOL]
    places = {path.split("/")[0] for path in task.data["files"]}
    assert set(shown.split("\n")[: len(places)]) == places
    assert task.data["code"] not in shown
