"""Sessions on disk: what a kill leaves, what a full disk does, and that trees come back byte for byte."""

import errno
import os
from pathlib import Path

import pytest

from fakes import FakeEngine
from longarc.errors import ConfigError, ContractError, ResourceError
from longarc.gateway.budget import SessionBudget
from longarc.gateway.core import Gateway
from longarc.gateway.durable import DurableSessions, SessionSpec
from longarc.gateway.turn_files import TurnFiles
from longarc.gateway.wire import WireError
from longarc.records.message import Message, Role
from longarc.records.sampling import Sampling
from longarc.tokens.glm import GlmFormat
from token_samples import sampled, small_tokenizer, user

FORMAT = GlmFormat(small_tokenizer())
SPEC = SessionSpec(
    sampling=Sampling(max_new_tokens=50, temperature=0.5, seed=3),
    thinking=True,
    max_context_tokens=1000,
    budget=SessionBudget(max_requests=9),
)
FIRST = sampled("a</think>one<|user|>")
SECOND = sampled("b</think>two<|user|>")


def opened(directory: Path, *completions: list[int]) -> tuple[TurnFiles, DurableSessions]:
    files = TurnFiles(directory)
    gateway = Gateway(FakeEngine(completions), FORMAT, turn_log=files.append)
    return files, DurableSessions(files, gateway)


def answered() -> list[Message]:
    return [
        user("q"),
        Message(role=Role.ASSISTANT, content="one", reasoning="a"),
        user("more"),
    ]


async def test_a_session_comes_back_with_its_key_and_the_same_bytes_and_goes_on(tmp_path):
    files, sessions = opened(tmp_path, FIRST)
    name, key = sessions.open("run-7", SPEC)
    await sessions.session(path_key=key, bearer=None).chat([user("q")])
    payloads = sessions.session(path_key=None, bearer=key).payloads()
    written = (tmp_path / "run-7.jsonl").read_bytes()
    files.close()

    files, sessions = opened(tmp_path, SECOND)
    assert [(state.session_id, state.num_turns) for state in sessions.states()] == [(name, None)]
    session = sessions.session(path_key=None, bearer=key)
    assert session.payloads() == payloads
    assert session.settings.budget.max_requests == 9
    assert session.settings.sampling == SPEC.sampling
    await session.chat(answered())
    (segment,) = sessions.segments(name)
    assert segment.num_trained_tokens == len(FIRST) + len(SECOND)
    assert (tmp_path / "run-7.jsonl").read_bytes().startswith(written)
    assert key.encode() not in written
    files.close()


async def test_the_line_that_a_kill_cut_short_was_answered_to_nobody_and_is_dropped(tmp_path):
    files, sessions = opened(tmp_path, FIRST, SECOND)
    _, key = sessions.open("run", SPEC)
    session = sessions.session(path_key=key, bearer=None)
    await session.chat([user("q")])
    whole = (tmp_path / "run.jsonl").read_bytes()
    await session.chat(answered())
    more = (tmp_path / "run.jsonl").read_bytes()
    files.close()
    for cut in (len(whole), len(whole) + 1, (len(whole) + len(more)) // 2, len(more) - 1):
        (tmp_path / "run.jsonl").write_bytes(more[:cut])
        files, sessions = opened(tmp_path)
        assert sessions.session(path_key=key, bearer=None).num_turns == 1
        assert (tmp_path / "run.jsonl").read_bytes() == whole
        files.close()


def test_a_session_whose_first_line_was_cut_short_was_told_to_nobody(tmp_path):
    (tmp_path / "run.jsonl").write_bytes(b'{"format":1,"sess')
    files, sessions = opened(tmp_path)
    assert list(sessions.states()) == []
    sessions.open("run", SPEC)
    files.close()


async def test_a_revoked_key_opens_nothing_and_the_segments_stay(tmp_path):
    files, sessions = opened(tmp_path, FIRST)
    name, key = sessions.open(None, SPEC)
    await sessions.session(path_key=key, bearer=None).chat([user("q")])
    before = sessions.segments(name)
    await sessions.revoke(name)
    await sessions.revoke(name)
    assert sessions.segments(name) == before
    files.close()

    files, sessions = opened(tmp_path)
    for shown in ({"path_key": key, "bearer": None}, {"path_key": None, "bearer": key}):
        with pytest.raises(WireError, match="ended"):
            sessions.session(**shown)
    assert sessions.segments(name) == before
    assert sessions.num_open == 0
    await sessions.delete(name)
    assert list(tmp_path.glob("*.jsonl")) == []
    with pytest.raises(WireError, match="no session"):
        sessions.segments(name)
    files.close()


async def test_a_full_disk_fails_the_turn_and_leaves_neither_half_a_line_nor_a_turn(
    tmp_path, monkeypatch
):
    files, sessions = opened(tmp_path, FIRST, FIRST)
    _, key = sessions.open("run", SPEC)
    session = sessions.session(path_key=key, bearer=None)
    before = (tmp_path / "run.jsonl").read_bytes()
    real, calls = os.write, []

    def full(file: int, data: bytes) -> int:
        calls.append(len(data))
        if len(calls) > 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(file, data[:40])

    with monkeypatch.context() as patched:
        patched.setattr("longarc.gateway.turn_files.os.write", full)
        with pytest.raises(ResourceError, match="No space left"):
            await session.chat([user("q")])
    assert (tmp_path / "run.jsonl").read_bytes() == before
    assert session.num_turns == 0
    await session.chat([user("q")])
    assert session.num_turns == 1
    files.close()


async def test_a_full_disk_leaves_no_half_line_where_no_other_file_can_be_opened(
    tmp_path, monkeypatch
):
    files, sessions = opened(tmp_path)
    sessions.open("run", SPEC)
    files.append("run", 0, b'{"turn":0}')
    real_write = os.write

    def full(file: int, data: bytes) -> int:
        # From here on the process has no descriptor left, either.
        patched.setattr("builtins.open", no_more)
        patched.setattr("pathlib.Path.read_bytes", no_more)
        patched.setattr("longarc.gateway.turn_files.os.write", too_full)
        return real_write(file, data[:5])

    def too_full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    def no_more(*_: object, **__: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patched:
        patched.setattr("longarc.gateway.turn_files.os.write", full)
        with pytest.raises(ResourceError, match="No space left"):
            files.append("run", 1, b'{"turn":1}')
    files.append("run", 1, b'{"turn":1}')
    assert files.payloads("run") == [b'{"turn":0}', b'{"turn":1}']
    files.close()


def test_two_gateways_cannot_have_one_directory(tmp_path):
    files, _ = opened(tmp_path)
    with pytest.raises(ConfigError, match="another gateway"):
        TurnFiles(tmp_path)
    files.close()
    TurnFiles(tmp_path).close()


@pytest.mark.parametrize("name", ["", ".hidden", "a/b", "../up", "a" * 129, "ü", "a\n"])
def test_a_name_that_is_no_plain_file_name_is_refused(tmp_path, name):
    files, sessions = opened(tmp_path)
    with pytest.raises(ConfigError, match="1 to 128 letters"):
        sessions.open(name, SPEC)
    files.close()


def test_a_name_is_taken_once(tmp_path):
    files, sessions = opened(tmp_path)
    sessions.open("run", SPEC)
    with pytest.raises(ConfigError, match="exists already"):
        sessions.open("run", SPEC)
    files.close()


@pytest.mark.parametrize("line", [b"{}\n", b"[]\n", b"nonsense\n", b'{"format":2}\n'])
def test_a_file_of_something_else_is_damage_and_is_said(tmp_path, line):
    (tmp_path / "run.jsonl").write_bytes(line)
    files = TurnFiles(tmp_path)
    with pytest.raises(ContractError, match=r"run\.jsonl"):
        list(files.heads())
    files.close()


async def test_a_damaged_turn_is_an_error_of_its_session_alone(tmp_path):
    files, sessions = opened(tmp_path, FIRST)
    _, key = sessions.open("run", SPEC)
    await sessions.session(path_key=key, bearer=None).chat([user("q")])
    files.close()
    path = tmp_path / "run.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"sampled_ids":[', b'"sampled_ids":[9,'))
    files, sessions = opened(tmp_path)
    with pytest.raises(WireError) as raised:
        sessions.session(path_key=key, bearer=None)
    assert (raised.value.status, raised.value.code) == (500, "session_damaged")
    sessions.open("other", SPEC)
    files.close()
