"""Seeds that engines give requests which bring none; apart from the sampler, so that a router needs no torch."""

from longarc.records.sampling import MAX_SEED


def seed_of_request(engine_seed: int, number: int) -> int:
    """Return the seed of the ``number``-th request that an engine gives one itself; one that `Sampling` takes."""
    return (engine_seed * 1_000_003 + number) % (MAX_SEED + 1)
