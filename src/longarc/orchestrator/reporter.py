"""Measures a stage between steps and writes what was measured."""

import asyncio
from collections.abc import Mapping

from longarc.errors import EngineError
from longarc.orchestrator.groups import Fate
from longarc.orchestrator.metrics import (
    Tally,
    batch_metrics,
    engine_metrics,
    fate_metrics,
    rollout_metrics,
)
from longarc.orchestrator.stage import Workers, now_s
from longarc.records.batch import Batch, StepReport
from longarc.records.metric import Metric, combine
from longarc.records.sampling import EngineHealth

_HEALTH_TIMEOUT_S = 10.0


class Reporter:
    """Looks at the clock and the engine's counters at each step, and writes the differences."""

    def __init__(self, workers: Workers, *, num_steps: int) -> None:
        """Report to the workers' sinks and progress; ``num_steps`` is the length of the stage."""
        self._workers, self._num_steps = workers, num_steps
        self._since_s = now_s()
        self._health: EngineHealth | None = None
        self._seen_tokens = 0
        self.trainer_waited_s = 0.0
        """Time the trainer had nothing to train on since the last step [seconds]."""

    async def look_at_engine(self) -> EngineHealth | None:
        """Return the engine's counters; None where it does not answer, which rollouts will notice."""
        try:
            async with asyncio.timeout(_HEALTH_TIMEOUT_S):
                return await self._workers.engine.health()
        except (TimeoutError, EngineError):
            return None

    async def has_sampled(self) -> bool:
        """Say whether the engine has sampled anything since this was last asked."""
        health = await self.look_at_engine()
        if health is None:
            return False
        before, self._seen_tokens = self._seen_tokens, health.num_sampled_tokens
        return health.num_sampled_tokens != before

    async def start(self) -> None:
        """Begin to measure."""
        self._since_s, self._health = now_s(), await self.look_at_engine()

    async def write(
        self,
        batch: Batch,
        report: StepReport,
        tally: Tally,
        fates: Mapping[str, Fate],
        *,
        num_inflight: int,
    ) -> None:
        """Write the metrics of one step: the trainer's own, and everything since the step before."""
        step_s = max(now_s() - self._since_s, 1e-9)
        metrics = [
            *report.metrics,
            *batch_metrics(batch, report, step_s=step_s),
            *rollout_metrics(tally.ended, step_s=step_s),
            *fate_metrics(
                {**tally.fates, **fates},
                num_trained=len(batch.groups),
                num_dropped=tally.num_dropped,
            ),
            Metric("loop/groups_in_flight", num_inflight),
            Metric("loop/trainer_idle_frac", min(self.trainer_waited_s, step_s), step_s),
            Metric("loop/step_s", step_s),
        ]
        health = await self.look_at_engine()
        if health is not None and self._health is not None:
            metrics += engine_metrics(self._health, health, step_s=step_s)
        self._health, self._since_s, self.trainer_waited_s = health, now_s(), 0.0

        values = combine(metrics)
        for sink in self._workers.sinks:
            sink.write(stage=batch.stage, step=batch.step + 1, values=values)
        if self._workers.progress is not None:
            self._workers.progress.update(
                stage=batch.stage,
                step=batch.step + 1,
                num_steps=self._num_steps,
                metrics=metrics,
            )
