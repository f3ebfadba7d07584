"""Walks of grammars: what stands before JSON, what may stand in its place, and that a walk depends on its tokens alone."""

import json
import random
import sys

import numpy as np
import pytest

from longarc.errors import ConfigError, ContractError
from longarc.records.constraint import Constraint
from longarc.tokens.grammar import AllowedIds, Grammars, check_schema
from longarc.tokens.tokenizer import Tokenizer

SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"a": {"type": "integer", "maximum": 99, "minimum": 0}},
        "required": ["a"],
        "additionalProperties": False,
    }
)
ANSWER = '{"a": 7}'


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.train([f"{ANSWER} because <think> so </think>\n"] * 30, vocab_size=284)


@pytest.fixture(scope="module")
def plain_tokenizer():
    """A vocabulary whose only control token ends a turn."""
    return Tokenizer.train(
        [f"{ANSWER} </think> <tool_call>\n"] * 30, vocab_size=267, special_tokens=("<|end|>",)
    )


def stops(tokenizer):
    return tuple(
        i for name, i in tokenizer.special_tokens.items() if name in ("<|user|>", "<|end|>")
    )


def accepts(tokenizer, text, *, with_control=True, **fields):
    """Whether a completion may be this text and then end."""
    encode = tokenizer.encode_with_control if with_control else tokenizer.encode
    ids = [*encode(text), *stops(tokenizer)]
    walk = Grammars(tokenizer, vocab_size=tokenizer.vocab_size).walk(
        Constraint(json_schema=SCHEMA, **fields), stops(tokenizer)
    )
    for token_id in ids:
        if not walk.allowed().mask()[token_id]:
            return False
        walk.take([token_id])
    return True


@pytest.mark.parametrize(
    ("fields", "text", "expected"),
    [
        ({}, ANSWER, True),
        ({}, f"\n {ANSWER}", True),
        ({}, '{"a": 7', False),
        ({}, '{"b": 7}', False),
        ({}, f"so </think>{ANSWER}", False),
        ({}, "<tool_call>x</tool_call>", False),
        ({"reasoning": "open"}, f"so {ANSWER} so</think>\n{ANSWER}", True),
        ({"reasoning": "open"}, f"</think>{ANSWER}", True),
        ({"reasoning": "open"}, ANSWER, False),
        ({"reasoning": "open"}, "so </think> so", False),
        ({"reasoning": "optional"}, ANSWER, True),
        ({"reasoning": "optional"}, f"<think>so</think>{ANSWER}", True),
        ({"reasoning": "optional"}, f"so</think>{ANSWER}", False),
        ({"allows_calls": True}, ANSWER, True),
        ({"allows_calls": True}, "<tool_call>f<arg_key>a</arg_key>", True),
        ({"allows_calls": True}, "so <tool_call>f", False),
        ({"allows_calls": True, "reasoning": "open"}, "so</think><tool_call>f", True),
    ],
)
@pytest.mark.parametrize("tags_by_id", [True, False])
def test_only_the_json_has_to_follow_the_schema(tokenizer, fields, text, expected, tags_by_id):
    assert accepts(tokenizer, text, tags_by_id=tags_by_id, **fields) is expected


def test_a_tag_spelt_in_text_is_one_only_where_tags_are_text(tokenizer, plain_tokenizer):
    spelt = f"so</think>\n{ANSWER}"
    fields = {"reasoning": "open", "with_control": False}
    assert accepts(tokenizer, spelt, **fields)
    assert not accepts(tokenizer, spelt, tags_by_id=True, **fields)
    assert accepts(plain_tokenizer, spelt, **fields)
    # A vocabulary without the control token has no other way to write it.
    assert accepts(plain_tokenizer, spelt, tags_by_id=True, **fields)
    assert accepts(plain_tokenizer, "<tool_call>f", with_control=False, allows_calls=True)


def test_what_is_allowed_depends_on_the_tokens_and_on_nothing_else(tokenizer):
    """Asked at every step, at the end alone, by another object, or after other walks: the same ids."""
    grammars = Grammars(tokenizer, vocab_size=tokenizer.vocab_size + 3)
    for seed in range(40):
        rng = random.Random(seed)
        reasoning = rng.choice(["none", "open", "optional"])
        constraint = Constraint(json_schema=SCHEMA, reasoning=reasoning, allows_calls=seed % 2 == 0)
        walk, ids = grammars.walk(constraint, stops(tokenizer)), []
        for _ in range(rng.randint(1, 25)):
            token_id = int(rng.choice(np.asarray(walk.allowed())))
            if token_id in stops(tokenizer):
                break
            walk.take([token_id])
            ids.append(token_id)
        expected = walk.allowed().mask()
        others = Grammars(tokenizer, vocab_size=tokenizer.vocab_size + 3)
        for again in (grammars, others):
            late = again.walk(constraint, stops(tokenizer))
            late.take(ids)
            assert (late.allowed().mask() == expected).all()
        assert not expected[tokenizer.vocab_size :].any()


def test_a_walk_ends_with_its_stop_id_and_takes_nothing_foreign(tokenizer):
    walk = Grammars(tokenizer, vocab_size=tokenizer.vocab_size).walk(
        Constraint(json_schema=SCHEMA), stops(tokenizer)
    )
    with pytest.raises(ContractError, match=r"token 1 .* which its grammar does not allow"):
        walk.take([*tokenizer.encode("{")[:1], tokenizer.special_id("<|observation|>")])
    walk = Grammars(tokenizer, vocab_size=tokenizer.vocab_size).walk(
        Constraint(json_schema=SCHEMA), stops(tokenizer)
    )
    ids = tokenizer.encode(ANSWER)
    walk.take(ids)
    assert np.asarray(walk.allowed()).tolist() == list(stops(tokenizer))
    walk.take(stops(tokenizer))
    assert walk.num_taken == len(ids) + 1
    with pytest.raises(ContractError, match="it has ended"):
        walk.allowed()
    with pytest.raises(ContractError, match="does not allow"):
        walk.take(ids[:1])


def test_allowed_ids_are_a_sequence():
    is_allowed = np.zeros(70, dtype=bool)
    is_allowed[[3, 64, 69]] = True
    ids = AllowedIds(is_allowed)
    assert len(ids) == 3
    assert list(ids) == [3, 64, 69]
    assert ids[1:] == [64, 69]
    assert np.asarray(ids, dtype=np.int64).tolist() == [3, 64, 69]
    assert (ids.mask() == is_allowed).all()


def test_a_schema_is_checked_without_a_tokenizer():
    check_schema(SCHEMA)
    check_schema("true")
    with pytest.raises(ConfigError, match=r"Unimplemented keys: \[\"if\"\]"):
        check_schema('{"if": {}}')


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ('{"items":' * 400 + "{}" + "}" * 400, "too deeply|recursion|depth"),
        ('{"items":' * 90000 + "{}" + "}" * 90000, "recursion|too deeply"),
        ('{"const": 123456789012345678901234567890}', "does not fit into 64 bits"),
        ('{"const": 1e999}', "1e999 is no number"),
        ('{"const": NaN}', "NaN is no number"),
        ('{"const": "\\ud800"}', "hex escape"),
        ('{"oneOf": [{"type": "integer"}, {"type": "number"}]}', "use anyOf"),
        ('{"not": {}, "x-guidance": {"lenient": true}}', "Unimplemented keys"),
        (
            json.dumps({"properties": {f"p{i}": {"type": "string"} for i in range(20000)}}),
            "too large",
        ),
    ],
)
def test_a_schema_that_means_trouble_is_refused_and_nothing_breaks(schema, reason):
    with pytest.raises(ConfigError, match=reason):
        check_schema(schema)


def test_without_the_library_the_way_to_it_is_said(tokenizer, monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ConfigError, match=r"pip install 'longarc\[structured\]'"):
        check_schema("{}")
    grammars = Grammars(tokenizer, vocab_size=tokenizer.vocab_size)
    with pytest.raises(ConfigError, match=r"longarc\[structured\]"):
        grammars.walk(Constraint(json_schema="{}"), stops(tokenizer))


def test_a_constraint_of_an_unknown_kind_of_reasoning_is_refused():
    with pytest.raises(ContractError, match="reasoning='much'"):
        Constraint(json_schema="{}", reasoning="much")
