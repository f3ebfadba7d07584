import pytest

from longarc.envs.tasks.format import Format, Instruction
from longarc.errors import ConfigError
from longarc.records.message import Message, Role
from longarc.records.outcome import Outcome
from longarc.records.trajectory import EpisodeResult

ASKED = Instruction(
    words=("name", "list", "file", "key"),
    num_chosen=3,
    order="reversed",
    case="upper",
    joiner=",",
    ending="!",
)


def test_the_text_names_every_constraint():
    assert ASKED.text == (
        "Words: name list file key. Answer with 3 of them, reversed, in upper case, "
        "joined by commas, ending with !."
    )


@pytest.mark.parametrize("answer", ["FILE,LIST,NAME!", "KEY,FILE,LIST!", "KEY,LIST,NAME!"])
def test_every_choice_that_keeps_all_constraints_is_right(answer):
    assert all(ASKED.check(answer).values())


@pytest.mark.parametrize(
    ("answer", "broken"),
    [
        ("FILE,LIST!", {"words"}),
        ("NAME,LIST,FILE!", {"order"}),
        ("FILE,list,NAME!", {"case"}),
        ("FILE LIST NAME!", {"joiner"}),
        ("FILE,LIST,NAME", {"ending"}),
        ("file-list", {"words", "case", "joiner", "ending"}),
    ],
)
def test_each_broken_constraint_is_named(answer, broken):
    held = ASKED.check(answer)
    assert {name for name, holds in held.items() if not holds} == broken


@pytest.mark.parametrize(
    "answer",
    ["", "!", "FILE,FILE,LIST!", "FILE,LIST,HOST!", "FILE,,LIST!", " FILE,LIST,NAME!", "A,B,C!"],
)
def test_an_answer_with_anything_but_the_given_words_keeps_nothing(answer):
    assert not any(ASKED.check(answer).values())


async def test_the_reward_is_all_or_nothing_or_the_share_that_holds():
    strict, partial = Format(), Format(is_partial=True)
    task = next(t for t in strict.tasks("train", cursor=0) if t.data["case"] and t.data["ending"])
    words = list(task.data["words"])[: task.data["num_chosen"]]
    words = words[::-1] if task.data["order"] == "reversed" else words
    lower = (task.data["joiner"] or " ").join(words) + task.data["ending"]
    last = Message(role=Role.ASSISTANT, content=lower)
    episode = EpisodeResult(outcome=Outcome.COMPLETED, messages=(last,), num_turns=1)
    assert (await strict.grade(task, episode)).value == 0.0
    assert (await partial.grade(task, episode)).value == pytest.approx(0.8)
    assert (await strict.grade(task, episode)).parts["case"] == 0.0


def test_tasks_combine_more_constraints_than_demonstrations():
    family = Format(task_constraints=(4, 4), expert_constraints=(1, 2))
    assert next(family.tasks("train", cursor=0)).difficulty == 4
    assert {family.demonstration(i).difficulty for i in range(40)} == {1.0, 2.0}


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"task_constraints": (1, 5)}, "there are 4 kinds"), ({"num_words": (3, 99)}, "there are 24")],
)
def test_impossible_settings_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        Format(**settings)
