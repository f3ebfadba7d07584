import pytest

from longarc.envs.graders.answers import final_answer, is_labelled, last_number
from longarc.records.message import Message, Role, ToolCall
from longarc.records.outcome import Outcome
from longarc.records.trajectory import EpisodeResult


def episode(text, *, outcome=Outcome.COMPLETED, **kwargs):
    last = Message(role=Role.ASSISTANT, content=text, **kwargs)
    return EpisodeResult(outcome=outcome, messages=(last,), num_turns=1)


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


@pytest.mark.parametrize(
    ("answer", "number"),
    [
        ("2 + 9 = 11.", "11"),
        ("It is -3", "-3"),
        ("5-3", "3"),
        ("about 1,234.50 in all", "1234.50"),
        ("take 1,2", "2"),
        ("the 3rd of v2", "3"),
        ("none", None),
        ("", None),
        (None, None),
    ],
)
def test_the_last_number_is_read_as_it_was_written(answer, number):
    assert last_number(answer) == number
