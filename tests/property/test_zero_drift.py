"""No token drifts, whatever a client does to its history; benchmarks/gateway_drift.py plays more of this."""

import asyncio

from drift_cases import play_all
from drift_wires import WIRES

NUM_CONVERSATIONS = 200


def test_every_trained_token_is_the_sampled_one_and_every_prefix_what_the_engine_saw():
    counts = asyncio.run(play_all(range(NUM_CONVERSATIONS)))
    moves = {"on", "edit", "rewind", "fold", "compact", "side", "sub", "again", "kill", "fail"}
    assert moves <= set(counts), "the clients did not do all they can"
    assert min(counts[wire.__name__] for wire in WIRES) > NUM_CONVERSATIONS
    assert counts["trained tokens"] > 10 * NUM_CONVERSATIONS
    assert 0 < counts["rewritten"] < counts["requests"] / 20, "a template refuses stray tags only"
