from dataclasses import replace

import pytest

from longarc.gateway.identity import next_key, opening_key
from token_samples import assistant, call, system, tool, user

START = opening_key("glm-4.7", [1, 2])


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (user("a"), system("a")),
        (user("a"), user("a ")),
        (user(""), tool("")),
        (assistant('x[["f", {}]]'), assistant("x", calls=(call("f"),))),
        (assistant(calls=(call("f", x=1),)), assistant(calls=(call("f", x="1"),))),
        (assistant(calls=(call("f", x=1),)), assistant(calls=(call("f", x=True),))),
        (assistant(calls=(call("f"), call("g"))), assistant(calls=(call("g"), call("f")))),
        (assistant(calls=(call("f", x=0.5),)), assistant(calls=(call("f", x=0.25),))),
    ],
)
def test_messages_that_say_different_things_have_different_keys(one, other):
    assert next_key(START, one) != next_key(START, other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (assistant("a", reasoning="r"), assistant("a")),
        (tool("a", call_id="x"), tool("a", call_id="y")),
        (
            assistant(calls=(call("f", x=[{"b": 2.0, "a": None}]),)),
            assistant(calls=(call("f", call_id="z", x=[{"a": None, "b": 2}]),)),
        ),
        (
            assistant(calls=(replace(call("f"), error="not closed"),)),
            assistant(calls=(call("f"),)),
        ),
    ],
)
def test_messages_that_say_the_same_have_the_same_key(one, other):
    assert next_key(START, one) == next_key(START, other)


def test_a_key_stands_for_everything_before_it():
    assert next_key(next_key(START, user("a")), user("b")) != next_key(START, user("b"))
    assert next_key(START, user("a")) != next_key(opening_key("glm-5.2", [1, 2]), user("a"))
    assert next_key(START, user("a")) != next_key(opening_key("glm-4.7", [1, 3]), user("a"))


def test_text_that_is_not_unicode_has_a_key():
    assert next_key(START, user("\ud800")) != next_key(START, user("\ufffd"))
