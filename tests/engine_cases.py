"""An engine for tests in which it must not be a matter of time when new weights come."""

import asyncio
import contextlib

from longarc.engine.embedded import EmbeddedEngine
from longarc.errors import EngineError


class LockStepEngine(EmbeddedEngine):
    """Computes no further step while weights are being loaded; a small model would have sampled all by then."""

    async def _one_step(self, loop):
        loading = self._weights._loading
        if loading is not None:
            with contextlib.suppress(EngineError):
                await asyncio.wrap_future(loading.loaded)
        await super()._one_step(loop)
