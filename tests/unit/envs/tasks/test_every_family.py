"""What all families promise: determinism, disjoint splits, experts that win, strict graders."""

import hashlib
from itertools import islice

import pytest

from fakes import FakeSandboxes, ScriptedPolicy
from longarc.envs.tasks.files import Files
from longarc.envs.tasks.format import Format
from longarc.envs.tasks.reasoning import Reasoning
from longarc.envs.tasks.recall import Recall
from longarc.errors import ConfigError
from longarc.records.message import Message, Role
from longarc.records.ports import TaskFamily

FAMILIES = [Files, Format, Reasoning, Recall]


def format_answer(task):
    data = task.data
    word = data["word"].upper() if data["case"] == "upper" else data["word"]
    body = (data["joiner"] or " ").join([word] * data["times"])
    return data["opening"] + body + data["ending"]


EXPERT = {
    Reasoning: lambda task: task.data["answer"],
    Recall: lambda task: f"code: {task.data['code']}",
    Format: format_answer,
}


@pytest.fixture(params=FAMILIES, ids=lambda kind: kind.name)
def kind(request):
    return request.param


def problem(family, messages, data=None):
    """What must not be on both sides; of files it is the code word, which the expert says at the end."""
    if family.name == "files":
        return data["code"] if data else messages[-1].content.removeprefix("code: ")
    return messages[0].content


def test_it_is_a_task_family_with_a_name_and_a_thinking_mode(kind):
    family = kind()
    assert isinstance(family, TaskFamily)
    assert family.name == kind.__name__.lower()
    assert isinstance(family.thinking, bool)


@pytest.mark.parametrize("split", ["train", "test"])
def test_two_objects_give_the_same_tasks_and_a_cursor_goes_on_in_the_middle(kind, split):
    whole = list(islice(kind().tasks(split, cursor=0), 12))
    assert list(islice(kind().tasks(split, cursor=5), 7)) == whole[5:]
    assert [t.id for t in whole] == [f"{kind.name}/{split}/{i}" for i in range(12)]
    assert all(t.split == split and t.family == kind.name for t in whole)


def test_another_seed_gives_other_tasks(kind):
    first = [t.messages for t in islice(kind(seed=0).tasks("train", cursor=0), 8)]
    other = [t.messages for t in islice(kind(seed=1).tasks("train", cursor=0), 8)]
    assert first != other


def test_train_and_test_share_no_problem_and_demonstrations_are_from_train(kind):
    family = kind()
    num = 200 if kind is Recall else 1000  # a haystack takes a millisecond
    test = {
        problem(family, t.messages, t.data) for t in islice(family.tasks("test", cursor=0), num)
    }
    train = {
        problem(family, t.messages, t.data) for t in islice(family.tasks("train", cursor=0), num)
    }
    shown = {problem(family, family.demonstration(i).messages) for i in range(num)}
    assert not test & (train | shown)


def test_there_are_a_thousand_different_test_tasks_and_then_no_more(kind):
    small = {"task_tokens": (40, 60)} if kind is Recall else {}
    tasks = list(kind(num_test_tasks=1000, **small).tasks("test", cursor=0))
    assert len(tasks) == 1000
    # format has few problems in all: a thousand draws of its test side repeat some.
    least = 850 if kind is Format else 985
    assert len({(t.messages, str(t.data)) for t in tasks}) >= least


@pytest.mark.parametrize("kind", [Reasoning, Recall, Format])
async def test_the_expert_wins_on_its_own_problems(kind, tmp_path):
    family = kind()
    for task in islice(family.tasks("test", cursor=0), 40):
        said = Message(role=Role.ASSISTANT, content=EXPERT[kind](task), reasoning="because")
        env = family.open(task, sandboxes=FakeSandboxes(tmp_path), seed=0)
        episode = await env.run(ScriptedPolicy([said]))
        assert (await family.grade(task, episode)).value == 1.0, task.messages


@pytest.mark.parametrize("answer", ["", "0.5x", "code: xxxxxx", "None", "nan", "[]", "<think>"])
async def test_nonsense_gets_nothing(kind, answer, tmp_path):
    family = kind()
    sandboxes = FakeSandboxes(tmp_path)
    for task in islice(family.tasks("train", cursor=0), 8):
        policy = ScriptedPolicy([Message(role=Role.ASSISTANT, content=answer)])
        episode = await family.open(task, sandboxes=sandboxes, seed=0).run(policy)
        assert (await family.grade(task, episode)).value == 0.0


def test_demonstrations_do_not_depend_on_what_was_asked_before(kind):
    family = kind()
    later = family.demonstration(7, error_frac=0.5)
    assert [family.demonstration(i, error_frac=0.5) for i in (3, 7)][1] == later
    assert later.family == kind.name
    assert later.thinking == family.thinking


@pytest.mark.parametrize("split", ["valid", ""])
def test_an_unknown_split_is_refused(kind, split):
    with pytest.raises(ConfigError, match="use train or test"):
        next(kind().tasks(split, cursor=0))


def test_a_negative_cursor_is_refused(kind):
    with pytest.raises(ConfigError, match="negative"):
        next(kind().tasks("train", cursor=-1))


@pytest.mark.parametrize(
    ("family", "fingerprint"),
    [
        (Files(train_hops=(1, 5), test_hops=(2, 4), expert_hops=(1, 2)), "ce29c00bc03f6dfe"),
        (Format(), "fc2fff494f6c60b2"),
        (Recall(task_tokens=(200, 300), expert_tokens=(100, 200)), "ec59520bbef30472"),
    ],
    ids=["files", "format", "recall"],
)
def test_tasks_are_the_same_on_every_machine_and_in_every_release(family, fingerprint):
    """A change here makes results of earlier runs incomparable: it belongs into the change log."""
    shown = [
        str((task.messages, task.data))
        for split in ("train", "test")
        for task in islice(family.tasks(split, cursor=0), 20)
    ]
    shown += [str(family.demonstration(index, error_frac=0.5)) for index in range(20)]
    assert hashlib.sha256("\n".join(shown).encode()).hexdigest()[:16] == fingerprint
