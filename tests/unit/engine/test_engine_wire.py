"""What crosses the wire comes back as it was, whatever fields the records have."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Literal, get_args, get_origin, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longarc import errors
from longarc.engine.wire import (
    EngineDescription,
    ScoreRequest,
    StreamRequest,
    UpdateRequest,
    dumps,
    error_body,
    error_of,
    error_status,
    loads,
    plain,
)
from longarc.errors import (
    ConfigError,
    EngineError,
    EngineFaultError,
    EngineLostError,
    EngineRequestError,
)
from longarc.records.sampling import EngineHealth, SampledTokens, Sampling, WeightSource

RECORDS = [Sampling, SampledTokens, WeightSource, EngineHealth]
"""What the port speaks of."""


def other_value(kind, default):
    """Return a value of an annotated type that is not the default."""
    if get_origin(kind) is Literal:
        return next(value for value in get_args(kind) if value != default)
    if get_origin(kind) is tuple:
        return (other_value(get_args(kind)[0], None),)
    if dataclasses.is_dataclass(kind):
        return other_record(kind)
    options = [option for option in get_args(kind) if option is not type(None)]
    if options:
        return other_value(options[0], default)
    values = {bool: [True, False], int: [7, 8], float: [0.1 + 0.2, 0.5], str: ["x", "y"]}
    values |= {bytes: [b"\xff", b""]}
    return next(value for value in values[kind] if value != default)


def other_record(record):
    """Return a record none of whose fields has its default."""
    hints = get_type_hints(record)
    fields = dataclasses.fields(record)
    return record(**{f.name: other_value(hints[f.name], f.default) for f in fields})


@pytest.mark.parametrize("record", RECORDS)
def test_every_field_of_the_ports_records_travels(record):
    sent = other_record(record)
    received = loads(record, dumps(sent))
    assert received == sent
    for field in dataclasses.fields(record):
        assert type(getattr(received, field.name)) is type(getattr(sent, field.name))
        assert getattr(received, field.name) != field.default


@given(st.lists(st.floats(width=64) | st.floats(width=32), max_size=8))
def test_log_probabilities_come_back_bit_for_bit(values):
    sent = SampledTokens(
        token_ids=tuple(range(len(values))), logprobs=tuple(values), policy_version=1
    )
    received = loads(SampledTokens, dumps(sent))
    for got, wanted in zip(received.logprobs, values, strict=True):
        assert got.hex() == wanted.hex() or (math.isnan(got) and math.isnan(wanted))


@pytest.mark.parametrize(
    ("kind", "body", "message"),
    [
        (Sampling, b"{", "not JSON"),
        (Sampling, b"[]", "expected an object"),
        (Sampling, b"{}", "max_new_tokens"),
        (Sampling, b'{"max_new_tokens": 1, "temprature": 2}', "unknown key 'temprature', allowed"),
        (Sampling, b'{"max_new_tokens": true}', r"Sampling.max_new_tokens: 'True' is not"),
        (Sampling, b'{"max_new_tokens": 0}', "has to be at least 1"),
        (Sampling, b'{"max_new_tokens": 1.5}', "Sampling.max_new_tokens"),
        (Sampling, b'{"max_new_tokens": 1, "top_p": "1"}', "top_p: '1' is not a number"),
        (Sampling, b'{"max_new_tokens": 1, "stop_ids": [1, "2"]}', "stop_ids"),
        (Sampling, b'{"max_new_tokens": 1, "on_update": "stop"}', "'stop' is none of .*recompute"),
        (Sampling, b'{"max_new_tokens": 1, "on_update": []}', r"on_update: '\[\]' is none of"),
        (ScoreRequest, b'{"token_ids": [1, null]}', "token_ids: 'None' is not"),
        (ScoreRequest, b'{"token_ids": 1}', "token_ids"),
        (StreamRequest, b'{"prompt_ids": [1], "session_id": "s", "sampling": 3}', r"\.sampling"),
        (UpdateRequest, b'{"policy_version": 1, "source": {"path": "x"}}', "sha256"),
    ],
)
def test_a_body_that_is_not_the_record_is_refused_with_the_place(kind, body, message):
    with pytest.raises(EngineRequestError, match=message):
        loads(kind, body)


def test_what_json_cannot_carry_is_refused_where_it_is_sent():
    with pytest.raises(EngineRequestError, match="Sampling cannot be sent"):
        dumps(Sampling(max_new_tokens=1, top_k=2**70))
    with pytest.raises(TypeError, match="has no form in JSON"):
        plain(object())


def test_bytes_travel_as_base64_and_come_back():
    blobs = (b"", bytes(range(256)), b"\xff\xfe")
    piece = SampledTokens(token_ids=(1,), logprobs=(-0.5,), policy_version=0, routing=blobs)
    sent = dumps(piece)
    assert b'"routing":["","AAEC' in sent
    assert loads(SampledTokens, sent) == piece
    with pytest.raises(EngineRequestError, match=r"SampledTokens\.routing: 'no!' is not base64"):
        loads(SampledTokens, sent.replace(b'"",', b'"no!",'))


def test_a_description_keeps_the_settings_of_the_model():
    model: Mapping[str, object] = {"family": "llama", "rope": {"theta": 1e4}, "layers": [1, 2]}
    sent = EngineDescription(model=model, attention="dense", max_context_tokens=8, num_ranks=2)
    assert loads(EngineDescription, dumps(sent)) == sent


def test_each_error_of_an_engine_comes_back_as_the_class_it_was_raised_as():
    kinds = [
        kind
        for kind in vars(errors).values()
        if isinstance(kind, type) and issubclass(kind, EngineError)
    ]
    assert len(kinds) > 4
    for kind in kinds:
        returned = error_of(error_body(kind("why")), source="http://there")
        assert type(returned) is kind
        assert str(returned) == "http://there: why"


def test_other_errors_arrive_as_plain_engine_errors_and_subclasses_as_what_they_are():
    class OwnFaultError(EngineFaultError):
        pass

    assert type(error_of(error_body(ConfigError("x")), source="a")) is EngineError
    assert type(error_of(error_body(OwnFaultError("x")), source="a")) is EngineFaultError
    assert error_status(OwnFaultError("x")) == 500
    assert error_status(EngineLostError("x")) == 503


@pytest.mark.parametrize("line", [b'{"token_ids": []}', b'{"error": 3}', b'{"error":', b"", b"[]"])
def test_what_is_no_error_is_not_taken_for_one(line):
    assert error_of(line, source="a") is None


def test_an_error_of_a_newer_version_is_a_plain_engine_error():
    line = b'{"error":{"kind":"EngineSleepyError","message":"zzz"}}'
    assert type(error_of(line, source="a")) is EngineError
