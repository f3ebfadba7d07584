"""Some hundred of the cases that ``codec_fuzz`` makes; its own command runs a hundred thousand."""

from codec_fuzz import BODIES, fuzz


async def test_bodies_near_what_clients_send_are_answered_or_refused_in_their_dialect():
    counts = await fuzz(600, seed=1)
    assert sum(counts.values()) == 600
    for path in BODIES:
        assert counts[f"{path} 200"] > 10
        assert counts[f"{path} 400"] > 10
