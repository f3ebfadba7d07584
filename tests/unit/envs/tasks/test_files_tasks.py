from itertools import islice

import pytest

from fakes import FakeSandboxes, ScriptedPolicy
from longarc.envs.tasks.files import Files, simulated
from longarc.errors import ConfigError, RolloutError, SandboxError
from longarc.records.message import Message, Role, ToolCall
from longarc.records.outcome import Outcome


def says(text):
    return Message(role=Role.ASSISTANT, content=text)


def bash(command):
    call = ToolCall(id="c", name="bash", arguments={"command": command})
    return Message(role=Role.ASSISTANT, content="", tool_calls=(call,))


def expert_script(task):
    return [*map(bash, task.data["steps"]), says(f"code: {task.data['code']}")]


async def play(family, task, script, sandboxes):
    env = family.open(task, sandboxes=sandboxes, seed=0)
    episode = await env.run(ScriptedPolicy(script))
    return episode, (await family.grade(task, episode)).value


async def test_the_expert_solves_every_task_with_the_real_commands(tmp_path):
    family = Files(indirect_frac=0.5)
    sandboxes = FakeSandboxes(tmp_path)
    for task in islice(family.tasks("test", cursor=0), 25):
        episode, reward = await play(family, task, expert_script(task), sandboxes)
        assert reward == 1.0, task.id
        assert episode.outcome is Outcome.COMPLETED
        shown = [m.content for m in episode.messages if m.role is Role.TOOL]
        assert shown == [simulated(step, task.data["files"]) for step in task.data["steps"]]
    assert all(box.is_closed for box in sandboxes.made)


async def test_demonstrations_show_what_the_real_commands_print_mistakes_included(tmp_path):
    family = Files(expert_indirect_frac=0.5, expert_shortcut_frac=0.3)
    sandboxes = FakeSandboxes(tmp_path)
    num_mistakes = 0
    for index in range(40):
        demo = family.demonstration(index, error_frac=0.6)
        tree = family._expert_trail(index)
        task = next(family.tasks("train", cursor=0))
        task = type(task)(
            id="x",
            family="files",
            split="train",
            messages=demo.messages[:1],
            tools=demo.tools,
            data={"files": dict(tree.files), "code": tree.code},
        )
        script = [m for m in demo.messages if m.role is Role.ASSISTANT]
        episode, reward = await play(family, task, script, sandboxes)
        assert [m.content for m in episode.messages] == [m.content for m in demo.messages]
        assert reward == 1.0
        num_mistakes += len(demo.untrained)
    assert 10 < num_mistakes < 38


def test_exactly_the_mistakes_are_untrained_and_each_is_followed_by_the_right_step():
    family = Files()
    for index in range(60):
        wrong = family.demonstration(index, error_frac=1.0)
        right = family.demonstration(index, error_frac=0.0)
        assert right.untrained == frozenset()
        (position,) = wrong.untrained
        assert wrong.messages[position].role is Role.ASSISTANT
        kept = wrong.messages[:position] + wrong.messages[position + 2 :]
        assert kept == right.messages


def test_the_short_cut_is_shown_with_its_share_and_is_right_where_it_is_shown():
    family = Files(expert_shortcut_frac=0.4)
    demos = [family.demonstration(index) for index in range(300)]
    short = [
        d for d in demos if d.messages[1].tool_calls[0].arguments["command"].startswith("grep -rh")
    ]
    assert 90 < len(short) < 150
    for demo in short:
        _, _, printed, answer = demo.messages
        assert printed.content == answer.content  # one code, and it is the right one
    never = Files()
    assert not any(
        call.arguments["command"].startswith("grep -rh")
        for index in range(100)
        for message in never.demonstration(index).messages
        for call in message.tool_calls
    )


def test_the_short_cut_does_not_tell_which_code_of_a_task_is_right():
    for task in islice(Files().tasks("test", cursor=0), 40):
        printed = simulated("grep -rh ^code: *", task.data["files"]).splitlines()
        assert f"code: {task.data['code']}" in printed
        assert len(printed) >= 3


def test_an_id_is_searched_in_the_words_that_name_it():
    for task in islice(Files(indirect_frac=1.0).tasks("test", cursor=0), 30):
        for step in task.data["steps"]:
            if step.startswith("grep"):
                pattern = step.split()[2].removeprefix("^")
                pointed = [t for t in task.data["files"].values() if f"find: {pattern}" in t]
                assert pointed or f"find: {pattern}" in task.messages[0].content
                (path,) = simulated(step, task.data["files"]).splitlines()
                assert task.data["files"][path].startswith(f"{pattern}\n")


def test_demonstrations_stay_within_their_hops_while_tasks_go_further():
    family = Files(expert_hops=(1, 2), train_hops=(1, 5), test_hops=(3, 5))
    assert {family.demonstration(i).difficulty for i in range(50)} == {1.0, 2.0}
    assert {t.difficulty for t in islice(family.tasks("train", cursor=0), 80)} == {1, 2, 3, 4, 5}
    assert {t.difficulty for t in islice(family.tasks("test", cursor=0), 80)} == {3, 4, 5}


def test_the_trail_is_as_long_as_the_difficulty_says_and_only_it_leads_to_the_code():
    for task in islice(Files().tasks("test", cursor=0), 60):
        reads = [step for step in task.data["steps"] if step.startswith("cat ")]
        assert len(reads) == task.difficulty
        holders = [p for p, text in task.data["files"].items() if task.data["code"] in text]
        assert holders == [reads[-1].removeprefix("cat ")]
        others = [t for t in task.data["files"].values() if "code:" in t]
        assert len(others) >= 3  # decoys: a code alone proves nothing


def test_indirect_pointers_appear_with_their_share_and_not_without():
    none = Files(indirect_frac=0.0)
    every = Files(indirect_frac=1.0)
    direct = [s for t in islice(none.tasks("test", cursor=0), 30) for s in t.data["steps"]]
    assert all(step.startswith("cat ") for step in direct)
    steps = [s for t in islice(every.tasks("test", cursor=0), 30) for s in t.data["steps"]]
    assert {step.split()[0] for step in steps} == {"cat", "ls", "grep"}
    assert sum(step.startswith("cat ") for step in steps) == len(steps) / 2


async def test_listing_every_code_wins_nothing(tmp_path):
    family = Files()
    task = next(family.tasks("test", cursor=1))
    codes = [
        line.removeprefix("code: ")
        for text in task.data["files"].values()
        for line in text.splitlines()
        if line.startswith("code:")
    ]
    sandboxes = FakeSandboxes(tmp_path)
    for answer in (
        " ".join(codes),
        "\n".join(f"code: {c}" for c in codes),
        task.data["code"] + "!",
    ):
        _, reward = await play(family, task, [says(answer)], sandboxes)
        assert reward == 0.0


async def test_a_decoy_is_wrong_and_so_is_speaking_beside_a_call(tmp_path):
    family = Files()
    task = next(family.tasks("test", cursor=2))
    sandboxes = FakeSandboxes(tmp_path)
    decoy = next(
        text.split("code: ")[1].strip()
        for text in task.data["files"].values()
        if "code: " in text and task.data["code"] not in text
    )
    _, reward = await play(family, task, [says(decoy)], sandboxes)
    assert reward == 0.0
    call = bash("true").tool_calls
    beside = Message(role=Role.ASSISTANT, content=task.data["code"], tool_calls=call)
    episode, reward = await play(family, task, [beside], sandboxes)
    assert (episode.outcome, reward) == (Outcome.TRUNCATED_TOKENS, 0.0)


async def test_wandering_past_the_last_turn_is_graded_zero(tmp_path):
    family = Files(max_turns=3)
    task = next(family.tasks("test", cursor=0))
    episode, reward = await play(family, task, [bash("true")] * 9, FakeSandboxes(tmp_path))
    assert (episode.outcome, episode.num_turns, reward) == (Outcome.TRUNCATED_TURNS, 3, 0.0)


@pytest.mark.parametrize(
    ("fault", "outcome"),
    [
        ({"create_error": SandboxError("no namespaces")}, Outcome.SANDBOX_LOST),
        ({"exec_error": SandboxError("box died")}, Outcome.SANDBOX_LOST),
        ({"exec_error": RolloutError("odd")}, Outcome.ENV_CRASHED),
        ({"reports_failure": True}, Outcome.ENV_CRASHED),
    ],
)
async def test_a_lost_sandbox_is_noise_and_is_closed(tmp_path, fault, outcome):
    family = Files()
    task = next(family.tasks("test", cursor=0))
    sandboxes = FakeSandboxes(tmp_path, **fault)
    env = family.open(task, sandboxes=sandboxes, seed=0)
    episode = await env.run(ScriptedPolicy(expert_script(task)))
    assert episode.outcome is outcome
    assert episode.messages[:1] == task.messages
    assert all(box.is_closed for box in sandboxes.made)


def test_code_words_of_the_test_split_never_occur_in_training():
    family = Files()
    held_out = {t.data["code"] for t in family.tasks("test", cursor=0)}
    trained = {t.data["code"] for t in islice(family.tasks("train", cursor=0), 1500)}
    shown = {family.demonstration(i).messages[-1].content.split()[-1] for i in range(500)}
    assert not held_out & (trained | shown)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"test_hop": (3, 5)}, "did you mean 'test_hops'"),
        ({"test_hops": (5, 3)}, "low <= high"),
        ({"test_hops": (0, 3)}, "test_hops"),
        ({"num_distractors": 60}, "need 66 different file names"),
        ({"indirect_frac": 1.5}, "indirect_frac"),
        ({"zzz": 1}, "known:"),
    ],
)
def test_impossible_settings_are_refused_with_the_fix(settings, message):
    with pytest.raises(ConfigError, match=message):
        Files(**settings)
