import re
from itertools import islice

import pytest

from longarc.envs.tasks.recall import Recall, estimated_tokens
from longarc.errors import ConfigError
from longarc.records.message import Message, Role
from longarc.records.outcome import Outcome
from longarc.records.trajectory import EpisodeResult
from longarc.tokens.words import CODE_WORDS


def test_haystacks_have_the_length_that_was_asked_for_and_leave_room_in_4096():
    for task in islice(Recall().tasks("test", cursor=0), 40):
        haystack, _, question = task.messages[0].content.rpartition("\nWhat")
        assert 2048 - 12 <= estimated_tokens(haystack) <= 3900
        assert estimated_tokens(task.messages[0].content) <= 3900 + 20
        assert question


def test_lengths_follow_the_tokenizer_that_is_given():
    family = Recall(count_tokens=len, task_tokens=(1000, 1000))
    task = next(family.tasks("train", cursor=0))
    haystack = task.messages[0].content.split("\nWhat")[0]
    assert 950 <= len(haystack) <= 1000


def test_of_demonstrations_each_doubling_of_the_length_comes_equally_often():
    family = Recall(expert_tokens=(64, 4096))
    lengths = [family.demonstration(index).difficulty for index in range(300)]
    shorter = sum(length < 512 for length in lengths)  # the middle of 64, 128, ... 4096
    assert 120 <= shorter <= 180
    assert min(lengths) < 100 < 3000 < max(lengths) <= 4096


def test_no_word_of_a_code_stands_anywhere_else():
    for task in islice(Recall().tasks("test", cursor=0), 20):
        hay = task.messages[0].content.replace(f"code: {task.data['code']}", "")
        assert not {w for words in CODE_WORDS for w in words} & set(re.findall(r"[a-z]+", hay))


def test_the_needle_is_there_once_and_anywhere():
    places = []
    for task in islice(Recall().tasks("train", cursor=0), 60):
        lines = task.messages[0].content.split("\n")
        needle = f"code: {task.data['code']}"
        assert [line for line in lines if line.startswith("code: ")] == [needle]
        assert sum("=" in line for line in lines) >= 16
        places.append(lines.index(needle) / len(lines))
    assert min(places) < 0.2
    assert max(places) > 0.8


@pytest.mark.parametrize(
    ("answer", "reward"),
    [
        ("code: {code}", 1.0),
        ("{code}", 1.0),
        ("code", 0.0),
        ("code: {code} code: {code}", 0.0),
        ("other: {code}", 0.0),
        ("1000 {code}", 0.0),
    ],
)
async def test_only_the_code_counts(answer, reward):
    family = Recall()
    task = next(family.tasks("test", cursor=0))
    last = Message(role=Role.ASSISTANT, content=answer.format(**task.data))
    episode = EpisodeResult(outcome=Outcome.COMPLETED, messages=(last,), num_turns=1)
    assert (await family.grade(task, episode)).value == reward


async def test_answering_with_the_whole_haystack_wins_nothing():
    family = Recall()
    task = next(family.tasks("test", cursor=0))
    last = Message(role=Role.ASSISTANT, content=task.messages[0].content)
    episode = EpisodeResult(outcome=Outcome.COMPLETED, messages=(last,), num_turns=1)
    assert (await family.grade(task, episode)).value == 0.0


def test_a_misspelt_setting_names_the_nearest_one():
    with pytest.raises(ConfigError, match="did you mean 'task_tokens'"):
        Recall(tasks_tokens=(1, 2))


def test_more_keys_than_there_are_words_are_refused():
    with pytest.raises(ConfigError, match="there are"):
        Recall(num_pairs=(1, 500))


def test_a_short_haystack_holds_fewer_pairs_rather_than_growing_longer():
    family = Recall(task_tokens=(60, 80), num_pairs=(40, 48))
    for task in islice(family.tasks("train", cursor=0), 40):
        assert task.difficulty <= 80


def test_further_questions_ask_for_lines_of_the_same_haystack():
    one, five = (
        Recall(expert_tokens=(60, 400), expert_questions=n, num_pairs=(3, 9)) for n in (1, 5)
    )
    for index in range(30):
        opening, code, *further = five.demonstration(index).messages
        assert (opening, code) == one.demonstration(index).messages
        lines = opening.content.splitlines()
        pairs = [line for line in lines if "=" in line]
        assert len(further) == 2 * min(4, len(pairs))
        for asked, answered in zip(further[::2], further[1::2], strict=True):
            key, _, _ = answered.content.partition("=")
            assert asked.content == f"What was {key}?"
            assert answered.content in pairs
