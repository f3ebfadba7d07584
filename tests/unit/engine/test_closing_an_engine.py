"""An engine that is closed while it works: nobody waits for ever, and the event loop goes on."""

import asyncio
import threading

import pytest

from longarc.config.engine import EngineConfig
from longarc.config.model import LlamaConfig
from longarc.engine.decoding import Decoding
from longarc.engine.embedded import EmbeddedEngine
from longarc.engine.weights import load_weights
from longarc.errors import EngineLostError
from longarc.models.build import build_model
from longarc.models.hf_weights import save_weights
from longarc.records.sampling import Sampling, WeightSource
from longarc.runs.checkpoint import file_sha256

MODEL = LlamaConfig(vocab_size=64, hidden_size=48, max_position_embeddings=256)
PATIENCE_S = 10
"""Of a thread that waits for what a blocked event loop would never do."""


def make_engine():
    return EmbeddedEngine(build_model(MODEL, seed=0), EngineConfig(), max_context_tokens=64)


class Gate:
    """Stops a thread in a function until the test lets it go on."""

    def __init__(self, function):
        self.function = function
        self.is_there, self.may_go_on = threading.Event(), threading.Event()
        self.was_let_go = False

    def __call__(self, *args, **kwargs):
        self.is_there.set()
        self.was_let_go = self.may_go_on.wait(PATIENCE_S)
        return self.function(*args, **kwargs)


async def until(event):
    while not event.is_set():
        await asyncio.sleep(0.001)


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "1.safetensors"
    save_weights(build_model(MODEL, seed=1), path)
    return WeightSource(path=str(path), sha256=file_sha256(path))


async def test_the_event_loop_goes_on_while_weights_that_are_being_loaded_are_waited_for(
    monkeypatch, source
):
    gate = Gate(load_weights)
    monkeypatch.setattr("longarc.engine.weights.load_weights", gate)
    engine = make_engine()
    async with engine:
        updating = asyncio.create_task(engine.update_weights(source, policy_version=1))
        await until(gate.is_there)
        closing = asyncio.create_task(engine.close())
        for _ in range(5):
            await asyncio.sleep(0.001)
        assert not closing.done()
        gate.may_go_on.set()
        await closing
    assert gate.was_let_go
    with pytest.raises(EngineLostError, match="closed"):
        await updating


async def test_who_cancels_the_closing_still_has_everything_closed_first(monkeypatch, source):
    gate = Gate(load_weights)
    monkeypatch.setattr("longarc.engine.weights.load_weights", gate)
    engine = make_engine()
    async with engine:
        updating = asyncio.create_task(engine.update_weights(source, policy_version=1))
        await until(gate.is_there)
        closing = asyncio.create_task(engine.close())
        await asyncio.sleep(0.001)
        closing.cancel()
        await asyncio.sleep(0.001)
        assert not closing.done()
        gate.may_go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await closing
        with pytest.raises(EngineLostError, match="closed"):
            await updating
        assert not hasattr(engine._weights, "current")


async def test_a_completion_that_ends_with_the_last_step_of_an_engine_is_handed_over(monkeypatch):
    engine = make_engine()
    gate = Gate(lambda *args, **kwargs: decode(engine._decoding, *args, **kwargs))
    decode = Decoding.decode
    monkeypatch.setattr(engine._decoding, "decode", gate)

    async def complete():
        asked = Sampling(max_new_tokens=2)
        return [piece async for piece in engine.stream([1, 2], asked, session_id="s")]

    async with engine:
        listening = asyncio.create_task(complete())
        await until(gate.is_there)
        closing = asyncio.create_task(engine.close())
        await asyncio.sleep(0.001)
        gate.may_go_on.set()
        await closing
        async with asyncio.timeout(PATIENCE_S):
            pieces = await listening
    assert pieces[-1].finish_reason == "length"
    assert sum(len(piece.token_ids) for piece in pieces) == 2
