import math

import pytest

from longarc.envs.graders.answers import final_answer, is_labelled
from longarc.envs.graders.finite import CheckedFamily, checked_grade, finite_reward
from longarc.errors import RolloutError
from longarc.records.message import Message, Role, ToolCall
from longarc.records.outcome import Outcome
from longarc.records.ports import TaskFamily
from longarc.records.task import Task
from longarc.records.trajectory import EpisodeResult, Reward

TASK = Task(id="t/test/3", family="t", split="test", messages=())


def episode(text, *, outcome=Outcome.COMPLETED, **kwargs):
    last = Message(role=Role.ASSISTANT, content=text, **kwargs)
    return EpisodeResult(outcome=outcome, messages=(last,), num_turns=1)


class Returning:
    name = "t"

    def __init__(self, result):
        self.result = result

    def tasks(self, split, *, cursor):
        yield TASK

    def open(self, task, *, sandboxes, seed):
        return ("opened", task.id, seed)

    async def grade(self, task, episode):
        if isinstance(self.result, BaseException):
            raise self.result
        return self.result


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
async def test_a_reward_that_is_no_number_fails_the_grader_and_names_the_task(value):
    with pytest.raises(RolloutError, match="t/test/3 returned"):
        await checked_grade(Returning(Reward(value=value)), TASK, episode("x"))


def test_a_part_that_is_no_number_fails_too():
    with pytest.raises(RolloutError, match="style"):
        finite_reward(Reward(value=1.0, parts={"style": math.nan}), task_id="t")


async def test_a_grader_that_raises_fails_and_is_never_reward_zero():
    with pytest.raises(RolloutError, match="ZeroDivisionError: oops"):
        await checked_grade(Returning(ZeroDivisionError("oops")), TASK, episode("x"))


async def test_a_checked_family_is_the_family_but_for_bad_rewards():
    good = CheckedFamily(Returning(Reward(value=0.5)))
    assert isinstance(good, TaskFamily)
    assert good.name == "t"
    assert list(good.tasks("test", cursor=0)) == [TASK]
    assert good.open(TASK, sandboxes=None, seed=4) == ("opened", "t/test/3", 4)
    assert await good.grade(TASK, episode("x")) == Reward(value=0.5)
    with pytest.raises(RolloutError):
        await CheckedFamily(Returning(Reward(value=math.nan))).grade(TASK, episode("x"))


def test_the_answer_is_the_last_assistants_text_without_its_thinking():
    assert final_answer(episode(" 7\n", reasoning="3+4")) == "7"


@pytest.mark.parametrize(
    "ended",
    [
        episode("7", outcome=Outcome.TRUNCATED_TOKENS),
        episode("7", outcome=Outcome.TRUNCATED_TURNS),
        episode("7", tool_calls=(ToolCall(id="c", name="bash", arguments={}),)),
        EpisodeResult(outcome=Outcome.COMPLETED, messages=(), num_turns=0),
        EpisodeResult(
            outcome=Outcome.COMPLETED,
            messages=(Message(role=Role.USER, content="7"),),
            num_turns=0,
        ),
    ],
)
def test_an_episode_that_did_not_end_with_an_answer_has_none(ended):
    assert final_answer(ended) is None


@pytest.mark.parametrize("answer", ["kovami", "code: kovami", "code:kovami", "code = kovami"])
def test_the_value_is_accepted_alone_or_behind_its_label(answer):
    assert is_labelled(answer, label="code", value="kovami")


@pytest.mark.parametrize(
    "answer",
    [
        *(None, "", "kovam", "Kovami", "kovami derafo", "derafo kovami"),
        *("code: kovami.", "the code: kovami", "code: code: kovami", "kovami\nkovami"),
        "code: derafo\ncode: kovami",
    ],
)
def test_anything_beside_the_value_is_refused(answer):
    assert not is_labelled(answer, label="code", value="kovami")
