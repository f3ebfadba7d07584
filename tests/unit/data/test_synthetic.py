import re
from itertools import pairwise

from longarc.data.synthetic import CopyTexts, LongRecallTexts


def test_copy_texts_are_the_same_for_one_seed_and_position_and_differ_otherwise():
    assert CopyTexts(seed=0).text(5) == CopyTexts(seed=0).text(5)
    texts = {CopyTexts(seed=seed).text(i) for seed in range(3) for i in range(20)}
    assert len(texts) == 60
    assert all(1200 <= len(text) < 2000 for text in texts)


def test_look_ups_and_sessions_tell_the_truth():
    for index in range(40):
        lines = CopyTexts(seed=0).text(index).split("\n")
        for previous, line in pairwise(lines):
            if previous.startswith("next: "):
                assert line == "cat " + previous.removeprefix("next: ")
            if re.fullmatch(r"[a-z]{6}", previous) and line.startswith(f"{previous}="):
                assert lines.count(line) >= 2
            if sums := re.fullmatch(r"(-?\d+)([+-])(\d)=(-?\d+)", line):
                left, sign, right, result = sums.groups()
                assert int(left) + int(f"{sign}{right}") == int(result)


def test_long_texts_fill_half_their_bound_at_least_and_ask_for_lines_they_hold():
    source = LongRecallTexts(seed=0, num_tokens=3000, count_tokens=len, num_questions=5)
    for index in range(20):
        text = source.text(index)
        assert 1000 <= len(text) <= 3000 + 250
        body, *questions = text.split("\nRepeat the line of this key:\n")
        assert len(questions) == 5
        for question in questions:
            key, answer = question.split("\n")
            assert answer.startswith(f"{key}=")
            assert answer in body.split("\n")
