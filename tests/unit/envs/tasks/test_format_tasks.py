import pytest

from longarc.envs.tasks.format import Format, Instruction
from longarc.errors import ConfigError
from longarc.records.message import Message, Role
from longarc.records.outcome import Outcome
from longarc.records.trajectory import EpisodeResult

ASKED = Instruction(word="page", times=3, case="upper", joiner=",", opening=">", ending="!")


def test_the_text_names_every_constraint():
    assert ASKED.text == (
        "Write page 3 times, in upper case, joined by commas, after >, ending with !."
    )


def test_the_answer_keeps_every_constraint():
    assert ASKED.answer() == ">PAGE,PAGE,PAGE!"
    assert all(ASKED.check(ASKED.answer()).values())


@pytest.mark.parametrize(
    ("answer", "broken"),
    [
        (">PAGE,PAGE!", {"times"}),
        (">PAGE,page,PAGE!", {"case"}),
        (">PAGE PAGE PAGE!", {"joiner"}),
        (">PAGE,PAGE,PAGE", {"ending"}),
        ("PAGE,PAGE,PAGE!", {"opening"}),
        ("page-page", {"times", "case", "joiner", "opening", "ending"}),
    ],
)
def test_each_broken_constraint_is_named(answer, broken):
    held = ASKED.check(answer)
    assert {name for name, holds in held.items() if not holds} == broken


@pytest.mark.parametrize(
    "answer", ["", ">!", ">PAGE,PAGE,FILE!", ">PAGE,,PAGE!", "> PAGE,PAGE,PAGE!", "A,B,C!"]
)
def test_an_answer_with_anything_but_the_word_keeps_nothing(answer):
    assert not any(ASKED.check(answer).values())


def test_lower_case_can_be_asked_for():
    asked = Instruction(word="page", times=2, case="lower")
    assert all(asked.check("page page").values())
    assert not asked.check("PAGE page")["case"]


async def test_the_reward_is_all_or_nothing_or_the_share_that_holds():
    strict, partial = Format(), Format(is_partial=True)
    tasks = strict.tasks("train", cursor=0)
    task = next(t for t in tasks if t.data["case"] == "upper" and t.data["ending"])
    word, times = task.data["word"], task.data["times"]
    lower = task.data["opening"] + (task.data["joiner"] or " ").join([word] * times)
    last = Message(role=Role.ASSISTANT, content=lower + task.data["ending"])
    episode = EpisodeResult(outcome=Outcome.COMPLETED, messages=(last,), num_turns=1)
    assert (await strict.grade(task, episode)).value == 0.0
    assert (await partial.grade(task, episode)).value == pytest.approx(0.8)
    assert (await strict.grade(task, episode)).parts["case"] == 0.0


def test_tasks_combine_more_constraints_than_demonstrations():
    family = Format(task_constraints=(4, 4), expert_constraints=(1, 2))
    assert next(family.tasks("train", cursor=0)).difficulty == 4
    assert {family.demonstration(i).difficulty for i in range(40)} == {1.0, 2.0}


def test_impossible_settings_are_refused():
    with pytest.raises(ConfigError, match="there are 4 kinds"):
        Format(task_constraints=(1, 5))
