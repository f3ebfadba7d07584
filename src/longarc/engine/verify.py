"""Does an engine from elsewhere compute with the weights it was given? Asked after every update.

A server can report success and keep part of the old weights (an output head that shares the embedding did),
and everything sampled from then on is off-policy by an unknown amount. So a short text is scored by the
engine and by the trainer's own code with the weights of the same file, and some tokens are sampled and
compared as well, because a server computes prompts and next tokens in different ways.

Two rules, because one update of RL moves log-probabilities by less than two implementations differ:

* the mean difference may not exceed a bound, which finds what is wrong by much at once and what drifts in time;
* the engine may not be nearer to the trainer's previous weights than to the new ones, which finds an update that
  did nothing as soon as updates can be told apart at all.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, ParamSpec, TypeVar

import torch

from longarc.errors import WeightMismatchError
from longarc.models.decoder_base import Decoder
from longarc.models.hf_weights import load_weights
from longarc.models.layout import Layout
from longarc.models.projection import token_logprobs
from longarc.models.threads import set_compute_threads
from longarc.records.ports import Engine
from longarc.records.sampling import EngineHealth, SampledTokens, Sampling, WeightSource

P = ParamSpec("P")
R = TypeVar("R")

_NUM_START = 8
"""Tokens of the probe that are drawn blindly; what follows them the engine samples once, at the start."""
_NUM_SAMPLED = 16
"""Tokens sampled anew at each probe."""
_TEMPERATURE = 0.7
"""They are sampled at: one that shows whether log-probabilities are of the distribution sampled from."""
_NUM_TOKENS = 72
"""Of the whole probe; fewer where the context is shorter."""
_NEARER = 2.0
"""How many times nearer to the old weights than to the new ones an engine has to be, to be called stale."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """What a comparison found."""

    policy_version: int
    mean_gap: float
    """Mean of |engine - trainer| over all tokens [nats]."""
    max_gap: float
    worst: tuple[float, float]
    """Log-probabilities of the token with the largest gap: the engine's, the trainer's [nats]."""


class VerifiedEngine:
    """An engine whose every weight update is checked against the trainer's own arithmetic."""

    def __init__(
        self,
        inner: Engine,
        reference: Decoder,
        *,
        name: str,
        max_mean_gap: float,
        max_context_tokens: int,
        attention: Literal["dense", "sparse"] = "dense",
        num_threads: int = 1,
        seed: int = 0,
    ) -> None:
        """Wrap ``inner``.

        Args:
            inner: the engine.
            reference: a model with the weights the engine has now; each update is loaded into it as well.
            name: what errors call the engine.
            max_mean_gap: bound of the mean difference [nats].
            max_context_tokens: longest sequence of the engine; at least 32.
            attention: how the model attends.
            num_threads: compute threads of the reference.
            seed: of the probe's text.
        """
        self._inner = inner
        self._reference = reference.eval().requires_grad_(False)
        self._name = name
        self._bound = max_mean_gap
        self._attention: Literal["dense", "sparse"] = attention
        self._seed = seed
        self._num_text = min(_NUM_TOKENS, max_context_tokens) - _NUM_START - _NUM_SAMPLED
        self._pool = ThreadPoolExecutor(
            1,
            thread_name_prefix="probe",
            initializer=set_compute_threads,
            initargs=(num_threads,),
        )
        self._text: list[int] = []
        self._before: list[float] | None = None
        """The reference's log-probabilities of the text under the weights before."""
        self.last: Probe | None = None

    def stream(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, session_id: str
    ) -> AsyncIterator[SampledTokens]:
        """Sample one completion; see `longarc.records.ports.Engine`."""
        return self._inner.stream(prompt_ids, sampling, session_id=session_id)

    async def score(self, token_ids: Sequence[int], *, temperature: float = 1.0) -> list[float]:
        """Return the engine's own log-probabilities."""
        return await self._inner.score(token_ids, temperature=temperature)

    async def update_weights(self, source: WeightSource, *, policy_version: int) -> None:
        """Update the engine and check that it has done so.

        Raises:
            EngineError: the engine refused the weights, and has the old ones.
            WeightMismatchError: it took them, and computes something else.
        """
        await self._inner.update_weights(source, policy_version=policy_version)
        await self._compute(load_weights, self._reference, source.path)
        await self.check(policy_version)

    async def health(self) -> EngineHealth:
        """Say what the engine is doing, and what the last probe found."""
        health = await self._inner.health()
        return health if self.last is None else replace(health, probe_gap=self.last.mean_gap)

    def close(self) -> None:
        """Let the thread go."""
        self._pool.shutdown(wait=True)

    async def check(self, policy_version: int) -> Probe:
        """Compare engine and reference.

        Raises:
            WeightMismatchError: they are too far apart, or the engine still has the weights before.
        """
        if not self._text:
            start = random.Random(self._seed).choices(
                range(self._reference.config.vocab_size), k=_NUM_START
            )
            text, _ = await self._drawn(start, self._num_text, seed=self._seed, temperature=1.0)
            self._text = start + text
        theirs = (await self._inner.score(self._text))[1:]
        tokens, logprobs = await self._drawn(
            self._text, _NUM_SAMPLED, seed=policy_version, temperature=_TEMPERATURE
        )
        ours, drawn = await self._compute(self._score, self._text, tokens)
        before, self._before = self._before, ours
        probe = _compare(policy_version, [*theirs, *logprobs], [*ours, *drawn])
        self.last = probe
        if not probe.mean_gap <= self._bound:
            raise WeightMismatchError(self._too_far(probe))
        if before is not None:
            self._check_moved(policy_version, theirs, ours, before)
        return probe

    def _too_far(self, probe: Probe) -> str:
        return (
            f"{self._name} does not compute with weights {probe.policy_version}: its log-probabilities of "
            f"{len(self._text) + _NUM_SAMPLED - 1} tokens differ from the trainer's by {probe.mean_gap:.4g} nats "
            f"on average, allowed are {self._bound:.4g} (engine.max_probe_gap). The largest difference is "
            f"{probe.max_gap:.4g}: {probe.worst[0]:.4f} there, {probe.worst[1]:.4f} here. Where this follows an "
            f"update, part of the model kept its old weights; where it is so from the start, the engine computes "
            f"another model or dtype than the recipe says. Nothing it sampled since can be trained"
        )

    def _check_moved(
        self, version: int, theirs: Sequence[float], ours: Sequence[float], before: Sequence[float]
    ) -> None:
        to_new, to_old = _mean_gap(theirs, ours), _mean_gap(theirs, before)
        if to_old * _NEARER < to_new:
            raise WeightMismatchError(
                f"{self._name} says that it has weights {version}, but is nearer to those before: its "
                f"log-probabilities differ from the trainer's by {to_new:.4g} nats with weights {version}, and by "
                f"{to_old:.4g} with the ones before. The update did not reach the model; nothing sampled since can "
                f"be trained under this version"
            )

    async def _drawn(
        self, prompt: Sequence[int], count: int, *, seed: int, temperature: float
    ) -> tuple[list[int], list[float]]:
        tokens: list[int] = []
        logprobs: list[float] = []
        sampling = Sampling(max_new_tokens=count, seed=seed, temperature=temperature)
        async for piece in self._inner.stream(prompt, sampling, session_id="probe"):
            tokens += piece.token_ids
            logprobs += piece.logprobs
        return tokens, logprobs

    @torch.inference_mode()
    def _score(
        self, text: Sequence[int], sampled: Sequence[int]
    ) -> tuple[list[float], list[float]]:
        """Return log p of every token but the first [nats], as the trainer computes it.

        Those of the text are at temperature 1, the sampled ones at theirs.
        """
        ids = torch.tensor([*text, *sampled])
        output = self._reference(ids, Layout.documents([len(ids)]), attention=self._attention)
        split = len(text) - 1
        parts = (slice(0, split), 1.0), (slice(split, len(ids) - 1), _TEMPERATURE)
        scored = [
            token_logprobs(
                output.hidden[:-1][part],
                self._reference.output_weight,
                ids[1:][part],
                temperature=temperature,
                compute_dtype=self._reference.compute_dtype,
            )[0].tolist()
            for part, temperature in parts
        ]
        return scored[0], scored[1]

    async def _compute(self, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        call = partial(work, *args, **kwargs)
        return await asyncio.get_running_loop().run_in_executor(self._pool, call)


def _compare(version: int, theirs: Sequence[float], ours: Sequence[float]) -> Probe:
    pairs = list(zip(theirs, ours, strict=True))
    worst = max(pairs, key=lambda pair: abs(pair[0] - pair[1]))
    return Probe(
        policy_version=version,
        mean_gap=_mean_gap(theirs, ours),
        max_gap=abs(worst[0] - worst[1]),
        worst=worst,
    )


def _mean_gap(theirs: Sequence[float], ours: Sequence[float]) -> float:
    return sum(abs(a - b) for a, b in zip(theirs, ours, strict=True)) / len(ours)
