import re

import pytest

from longarc.data.needles import KINDS, NeedleTexts, held_out, needle_text
from longarc.errors import ConfigError
from longarc.tokens.words import WORDS


def words(text: str) -> int:
    """A tokenizer that is good enough: words, digits, signs and spaces."""
    return len(re.findall(r"[A-Za-z]+|\d|\s|[^\w\s]", text))


def parts(text):
    """The haystack's lines, and what is asked for: key -> lines."""
    body, questions = text.text.split("Look up:\n")
    asked = {}
    for line in questions.strip().split("\n"):
        asked.setdefault(line.split("=")[0], []).append(line)
    return body.strip().split("\n"), asked


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_tokens", [256, 1000])
def test_a_text_asks_for_lines_that_it_holds_and_is_as_long_as_wanted(kind, num_tokens):
    for index in range(20):
        text = needle_text(kind, str(index), num_tokens=num_tokens, count_tokens=words)
        lines, asked = parts(text)
        assert num_tokens - 12 < words(text.text) <= num_tokens
        most = {"single": 1, "multi_key": 16, "multi_value": 8}[kind]
        each = 3 if kind == "multi_value" else 1
        assert len(asked) == min(most, num_tokens // (16 * each), 16)
        for key, answers in asked.items():
            assert [line for line in lines if line.startswith(f"{key}=")] == answers
            assert len(answers) == (3 if kind == "multi_value" else 1)


def test_answers_are_the_values_and_nothing_else():
    text = needle_text("multi_value", "0", num_tokens=300, count_tokens=words)
    answers = [piece.text for piece in text.pieces if piece.is_answer]
    assert len(answers) == 18
    assert all(answer in WORDS for answer in answers)


def test_many_keys_are_many():
    lines, _ = parts(needle_text("multi_key", "0", num_tokens=1000, count_tokens=words))
    assert sum("=" in line for line in lines) == 16
    lines, _ = parts(needle_text("single", "0", num_tokens=1000, count_tokens=words))
    assert sum("=" in line for line in lines) == 1


def test_needles_lie_anywhere():
    places = []
    for index in range(60):
        lines, asked = parts(needle_text("single", str(index), num_tokens=500, count_tokens=words))
        places.append(lines.index(next(iter(asked.values()))[0]) / len(lines))
    assert min(places) < 0.1
    assert max(places) > 0.9
    assert 0.4 < sum(places) / len(places) < 0.6


def test_texts_are_the_same_for_one_seed_and_never_held_out():
    first, second = (NeedleTexts(seed=0, num_tokens=(200, 300), count_tokens=words) for _ in "ab")
    assert [first.needle(i).text for i in range(6)] == [second.needle(i).text for i in range(6)]
    other = NeedleTexts(seed=1, num_tokens=(200, 300), count_tokens=words)
    assert first.needle(0) != other.needle(0)
    tests = {
        t.text.strip()
        for k in KINDS
        for t in held_out(k, seed=0, count=5, num_tokens=250, count_tokens=words)
    }
    assert len(tests) == 15
    assert not tests & {first.needle(i).text for i in range(30)}


def test_kinds_take_turns_and_every_doubling_of_the_length_comes_as_often():
    source = NeedleTexts(seed=0, num_tokens=(128, 2048), count_tokens=words)
    lengths = [words(source.needle(index).text) for index in range(120)]
    assert all(110 < length <= 2048 for length in lengths)
    assert 20 < sum(length < 256 for length in lengths) < 45
    assert [source.needle(index).kind for index in range(4)] == [*KINDS, "single"]


def test_keys_are_never_hay():
    lines, _ = parts(needle_text("multi_key", "0", num_tokens=1000, count_tokens=words, num_keys=3))
    keys = {line.split("=")[0] for line in lines if "=" in line}
    assert len(keys) == 3
    assert not keys & {word for line in lines if "=" not in line for word in line.split()}


@pytest.mark.parametrize("num_keys", [0, 1000])
def test_more_keys_than_there_are_words_are_refused(num_keys):
    with pytest.raises(ConfigError, match=rf"num_keys={num_keys}: there are \d+ keys; choose 1 to"):
        needle_text("single", "0", num_tokens=100, count_tokens=words, num_keys=num_keys)


def test_a_text_that_is_too_short_is_refused():
    with pytest.raises(ConfigError, match=r"num_tokens=5 is too short .* alone are"):
        needle_text("multi_key", "0", num_tokens=5, count_tokens=words)
