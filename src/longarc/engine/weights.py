"""Weights of an engine: those in use, those that some sequences end with, and the next ones on their way.

::

    ask() --> asked --> loading (a thread: digest, shapes, copy, pack) --> taken between two steps --> current
                ^ waits while held                                                  |
                                                            old ones: held, while sequences end with them, or spare

There are two copies at most. The next weights are read into the one that nobody computes with, so what is in use
stays whole whatever is wrong with them, and decoding goes on meanwhile. All methods but ``_loaded`` and ``stop`` are called
on the event loop.
"""

import asyncio
import contextlib
import copy
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from longarc.errors import ContractError, EngineError, LongArcError, WeightsRefusedError, boundary
from longarc.models.cache import PagedCache
from longarc.models.decoder_base import Decoder
from longarc.models.hf_weights import load_weights
from longarc.models.threads import set_compute_threads
from longarc.records.sampling import WeightSource
from longarc.runs.checkpoint import file_sha256


@dataclass(slots=True, eq=False)
class EngineWeights:
    """One copy of the model, and the engine's cache as that copy computes with it."""

    model: Decoder
    cache: PagedCache
    policy_version: int


@dataclass(slots=True, eq=False)
class WeightUpdate:
    """New weights somebody asked for."""

    source: WeightSource
    policy_version: int
    done: asyncio.Future[None]
    asked_s: float
    """When, by the engine's clock [seconds]."""
    loaded: Future[EngineWeights] | None = None
    """Set while they are loaded and afterwards."""


class WeightStore:
    """The copies of one engine's weights."""

    def __init__(
        self,
        current: EngineWeights,
        *,
        settle: Callable[[], None],
        on_loaded: Callable[[], None],
        alter: Callable[[Decoder], object] | None = None,
    ) -> None:
        """Begin with the weights in use.

        Args:
            current: in use.
            alter: done to weights that were read, in the loading thread.
            settle: called in the loading thread before a copy that was in use is written to: returns when
                nothing computes with it any more.
            on_loaded: called in the loading thread when weights can be taken, or were refused.
        """
        self.current = current
        self.policy_version = current.policy_version
        """Of the weights in use; stays when they are let go."""
        self.held: EngineWeights | None = None
        """Older ones, with which some sequences end."""
        self._spare: EngineWeights | None = None
        self._asked: deque[WeightUpdate] = deque()
        self._loading: WeightUpdate | None = None
        self._settle, self._on_loaded, self._alter = settle, on_loaded, alter
        # One thread for one operator: decoding has the others.
        self._pool = ThreadPoolExecutor(
            1, thread_name_prefix="weights", initializer=set_compute_threads, initargs=(1,)
        )

    def ask(
        self, source: WeightSource, *, policy_version: int, now_s: float
    ) -> asyncio.Future[None]:
        """Line new weights up; the result is there when they are in use, or why they are not."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._asked.append(WeightUpdate(source, policy_version, done, now_s))
        return done

    @property
    def is_due(self) -> bool:
        """Whether `take` or `begin` has something to do."""
        if self._loading is not None:
            return self._loading.loaded is not None and self._loading.loaded.done()
        return bool(self._asked) and self.held is None

    def take(self) -> tuple[WeightUpdate, EngineWeights] | None:
        """Put weights that are loaded in use; return them and those before, which the caller keeps or gives back.

        Weights that were refused are told so, and nothing changes.
        """
        update = self._loading
        if update is None or update.loaded is None or not update.loaded.done():
            return None
        self._loading = None
        error = update.loaded.exception()
        if error is not None:
            if not update.done.done():
                update.done.set_exception(error)
            return None
        before, self.current = self.current, update.loaded.result()
        self.policy_version, self._spare = update.policy_version, None
        return update, before

    def hold(self, weights: EngineWeights) -> None:
        """Keep those before for the sequences that end with them; nothing is loaded until they are given back."""
        self.held = weights

    def give_back(self, weights: EngineWeights) -> None:
        """Say that no sequence computes with a copy any more."""
        self._spare = weights
        if weights is self.held:
            self.held = None

    def begin(self) -> None:
        """Load the next weights if there are any, one at a time; while sequences end with the old ones, none are."""
        if self._loading is not None or not self._asked or self.held is not None:
            return
        update = self._loading = self._asked.popleft()
        update.loaded = self._pool.submit(self._loaded, update, self._spare)
        update.loaded.add_done_callback(lambda _: self._on_loaded())

    def _loaded(self, update: WeightUpdate, spare: EngineWeights | None) -> EngineWeights:
        """Read weights into a copy that nobody computes with, and pack them.

        Raises:
            WeightsRefusedError: the file is not what was announced or not the model's, or there is no room.
        """
        source, version = update.source, update.policy_version
        try:
            with boundary(ContractError, f"reading {source.path!r}"):
                found = file_sha256(Path(source.path))
                if found != source.sha256:
                    raise ContractError(
                        f"{source.path} has digest {found[:12]}, announced was {source.sha256[:12]}; publish again"
                    )
                self._settle()
                weights = spare or self._copy()
                load_weights(weights.model, source.path)
                if self._alter is not None:
                    self._alter(weights.model)
                weights.cache.prepare()
        except LongArcError as error:
            raise WeightsRefusedError(f"weights {version} were not loaded: {error}") from error
        weights.policy_version = version
        return weights

    def _copy(self) -> EngineWeights:
        model = copy.deepcopy(self.current.model)
        return EngineWeights(model, model.shared_cache(self.current.cache), 0)

    def stop(self) -> None:
        """Load nothing any more, and wait for what is being loaded; called from another thread."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def close(self) -> None:
        """Let go of all weights; nothing is loaded any more."""
        self.held = self._spare = None
        with contextlib.suppress(AttributeError):  # closed before
            del self.current

    def fail_all(self, error: EngineError) -> None:
        """Tell whoever waits for new weights that none will come."""
        updates = [*self._asked] if self._loading is None else [self._loading, *self._asked]
        self._asked.clear()
        self._loading = None
        for update in updates:
            if not update.done.done():
                update.done.set_exception(error)
