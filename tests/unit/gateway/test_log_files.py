"""Turn logs without a ledger: what was told is there after any death, and nothing else is."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fakes import FakeEngine
from longarc.errors import ContractError, ResourceError
from longarc.gateway.core import Gateway
from longarc.gateway.log_files import TurnLogFiles
from longarc.gateway.turn_options import TurnOptions
from longarc.records.sampling import Sampling
from longarc.tokens.glm import GlmFormat
from small_disk import file_size_limit
from token_samples import sampled, small_tokenizer, user

FORMAT = GlmFormat(small_tokenizer())
ANSWER = sampled("one<|user|>")
OPTIONS = {
    "sampling": Sampling(max_new_tokens=200, seed=3),
    "thinking": False,
    "max_context_tokens": 4096,
}


def the_file(directory: Path) -> Path:
    (path,) = directory.iterdir()
    return path


async def logged(directory: Path, num_turns: int = 2):
    log = TurnLogFiles(directory, syncs=True)
    session = Gateway(FakeEngine([ANSWER] * num_turns), FORMAT, turn_log=log).open(
        "s/../ü", **OPTIONS
    )
    for number in range(num_turns):
        await session.chat([user(f"q{number}")])
    return session


async def test_sessions_come_back_byte_for_byte(tmp_path):
    session = await logged(tmp_path / "log")
    (found,) = TurnLogFiles(tmp_path / "log").sessions()
    assert (found.session_id, found.facts) == ("s/../ü", {})
    restored = Gateway(FakeEngine([]), FORMAT).restore(found.session_id, found.payloads, **OPTIONS)
    assert restored.payloads() == session.payloads() == found.payloads
    assert restored.segments() == session.segments()


def test_what_a_session_was_opened_with_is_kept_and_can_be_removed(tmp_path):
    log = TurnLogFiles(tmp_path)
    log.open("s", {"key": "digest", "thinking": True})
    (found,) = log.sessions()
    assert found.facts == {"key": "digest", "thinking": True}
    assert found.payloads == ()
    with pytest.raises(ContractError, match="already"):
        log.open("s", {})
    log.remove("s")
    log.remove("s")
    assert list(log.sessions()) == []


async def test_every_cut_leaves_the_turns_before_it_and_the_session_goes_on(tmp_path):
    session = await logged(tmp_path)
    whole = the_file(tmp_path).read_bytes()
    for length in range(len(whole)):
        the_file(tmp_path).write_bytes(whole[:length])
        log = TurnLogFiles(tmp_path)
        found = list(log.sessions())
        kept = found[0].payloads if found else ()
        assert kept == session.payloads()[: len(kept)]
        if not found:
            assert not list(tmp_path.iterdir()), "a file without its opening is gone"
            log.open(session.settings.session_id, {})
        for index in range(len(kept), 2):
            log(session.settings.session_id, index, session.payloads()[index])
        assert the_file(tmp_path).read_bytes() == whole


async def test_damage_before_the_end_is_an_error_that_names_the_file(tmp_path):
    await logged(tmp_path)
    path = the_file(tmp_path)
    whole = bytearray(path.read_bytes())
    whole[40] ^= 1
    path.write_bytes(whole)
    with pytest.raises(ContractError, match=path.name):
        list(TurnLogFiles(tmp_path).sessions())
    path.write_bytes(b"something else entirely")
    with pytest.raises(ContractError, match="no turn log"):
        list(TurnLogFiles(tmp_path).sessions())


async def test_on_a_full_disk_no_turn_is_told_and_the_log_stays_whole(tmp_path):
    log = TurnLogFiles(tmp_path)
    engine = FakeEngine([ANSWER] * 3)
    session = Gateway(engine, FORMAT, turn_log=log).open("s", **OPTIONS)
    await session.chat([user("q")])
    before = the_file(tmp_path).read_bytes()
    with file_size_limit(len(before) + 20), pytest.raises(ResourceError):
        await session.chat([user("r")])
    assert the_file(tmp_path).read_bytes() == before
    assert session.num_turns == 1
    await session.chat([user("r")])
    (found,) = log.sessions()
    assert found.payloads == session.payloads()


KILLED = """
import asyncio, sys
from pathlib import Path
from fakes import FakeEngine
from longarc.gateway.core import Gateway
from longarc.gateway.log_files import TurnLogFiles
from longarc.gateway.turn_options import TurnOptions
from longarc.records.sampling import Sampling
from longarc.tokens.glm import GlmFormat
from token_samples import sampled, small_tokenizer, user

async def main():
    engine = FakeEngine([sampled("one<|user|>")] * 100000, yields=True)
    gateway = Gateway(engine, GlmFormat(small_tokenizer()), turn_log=TurnLogFiles(Path(sys.argv[1])))
    session = gateway.open("s", sampling=Sampling(max_new_tokens=200, seed=3), thinking=False, max_context_tokens=1 << 20)
    history = [user("q0")]
    for number in range(100000):
        answer = await session.answer(history, options=TurnOptions(idempotency_key=str(number)))
        print(number, answer.node.ids_digest.hex(), flush=True)
        history = [*history, answer.turn.message, user(f"q{number + 1}")]

asyncio.run(main())
"""


async def test_a_killed_gateway_has_every_turn_that_it_told_and_retries_get_them(tmp_path):
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path)],
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": ":".join(sys.path)},
        text=True,
    ) as process:
        assert process.stdout is not None
        told = [process.stdout.readline() for _ in range(20)]
        process.send_signal(signal.SIGKILL)
        told += process.stdout.readlines()
    told = [line.split() for line in told if line.endswith("\n")]

    (found,) = TurnLogFiles(tmp_path).sessions()
    engine = FakeEngine([])
    session = Gateway(engine, FORMAT).restore(
        "s", found.payloads, **OPTIONS | {"max_context_tokens": 1 << 20}
    )
    assert session.payloads() == found.payloads
    assert session.num_turns in (len(told), len(told) + 1)
    for number, digest in told:
        answer = await session.answer([user("any")], options=TurnOptions(idempotency_key=number))
        assert answer.node.ids_digest.hex() == digest
    assert engine.requests == []
