import pytest
from hypothesis import given
from hypothesis import strategies as st

from longarc.envs.sandbox.execd import _pack
from longarc.envs.sandbox.wire import pack, unpack
from longarc.errors import SandboxError


@given(st.lists(st.binary(max_size=50), max_size=8))
def test_a_frame_comes_back_as_it_was(fields):
    frame = pack(fields)
    assert frame == _pack(fields)  # the copy that runs inside the box
    assert int.from_bytes(frame[:4], "little") == len(frame) - 4
    assert unpack(frame[4:]) == fields


@given(st.binary(max_size=60))
def test_nonsense_from_a_box_is_a_typed_error_or_fields_within_the_frame(body):
    problem = ""
    try:
        fields = unpack(body)
    except SandboxError as error:
        problem = str(error)
    assert "broken frame" in problem or sum(4 + len(field) for field in fields) == len(body)


def test_a_field_that_reaches_beyond_the_frame_is_refused():
    with pytest.raises(SandboxError, match="beyond the 6 bytes"):
        unpack(b"\x03\0\0\0ab")
