"""Iterators of pieces that have to be closed."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from longarc.records.sampling import SampledTokens


@asynccontextmanager
async def closing(stream: AsyncIterator[SampledTokens]) -> AsyncIterator[None]:
    """Close an engine's stream at the end, which cancels what is left of the request.

    ``AsyncIterator`` does not promise ``aclose``; generators have it.
    """
    try:
        yield
    finally:
        close = getattr(stream, "aclose", None)
        if close is not None:
            await close()
