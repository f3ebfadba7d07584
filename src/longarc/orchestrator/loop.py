"""The loop of an RL stage: sampling runs ahead of training, by a bounded number of steps.

::

    mixture --task--> admit --group--> rollouts --trajectory--> ledger --> settle --> choose --> trainer.step
                        ^ waits for a slot                                   | drop                 |
                        +------------ a slot is free ------------------------+--- push, release <---+

How the lag is bounded is told in ``lag.py``.

Exactly once: a rollout is admitted in the ledger before it starts, complete in the ledger before
anybody here sees it, and a group's fate is one transaction (``dispose``, or ``commit_step`` with
the step that trains it). Whatever ends the process, ``recovery.py`` finds each trajectory either
with a fate or waiting for one.

Deadlines and durations are in the event loop's time; the wall clock of the records is injected.
"""

import asyncio
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from longarc.config.orchestrator import RolloutLoopConfig
from longarc.errors import ContractError, first_of
from longarc.orchestrator.groups import Fate, Settled
from longarc.orchestrator.inflight import choose
from longarc.orchestrator.metrics import Tally
from longarc.orchestrator.recovery import close_stage, recover
from longarc.orchestrator.reporter import Reporter
from longarc.orchestrator.rollout import Clock
from longarc.orchestrator.sampler import Sampler
from longarc.orchestrator.stage import OnStep, StageResult, StageSpec, Workers, now_s
from longarc.orchestrator.watchdog import watch
from longarc.records.batch import Batch, StepReport


async def run_stage(
    config: RolloutLoopConfig,
    spec: StageSpec,
    workers: Workers,
    *,
    policy_version: int,
    on_step: OnStep | None = None,
    stop: asyncio.Event | None = None,
    clock: Clock = time.time,
) -> StageResult:
    """Run a stage to its last step, or continue it where its ledger says it stopped.

    Weights are handed to the engine at the start, and then every ``push_every_steps`` steps but after
    the last, and where the steps left them as they were.

    Args:
        config: how rollouts are scheduled against steps.
        spec: what is sampled.
        workers: everybody the loop works with; none of them is closed.
        policy_version: version [optimizer steps] of the weights the trainer holds.
        on_step: awaited after each step.
        stop: when set, the step in progress is finished, rollouts in flight are cancelled and recorded,
            and the stage returns; starting it again runs them as new attempts.
        clock: wall clock [seconds since the epoch] of the records.

    Raises:
        ConfigError: a task source is broken, or recorded tasks belong to no family of the stage.
        ContractError: the trainer's weights are not those the ledger's last step left.
        StalledError: nothing moves, or nothing that is sampled can be trained.
    """
    recorded = workers.ledger.steps(spec.stage)
    if len(recorded) >= config.num_steps:
        close_stage(workers.ledger, spec.stage)
        return StageResult(num_steps=len(recorded), policy_version=policy_version, is_complete=True)
    recovered = recover(
        workers.ledger, spec.stage, policy_version=policy_version, run_seed=spec.run_seed
    )
    sampler = Sampler(config, spec, workers, recovered, policy_version=policy_version, clock=clock)
    loop = _Loop(config, spec, workers, sampler)
    failure: Exception | None = None
    try:
        await loop.run(on_step=on_step, stop=stop)
    except ExceptionGroup as group:
        failure = first_of(group)
    if failure is not None:
        raise failure
    return StageResult(
        num_steps=sampler.num_steps,
        policy_version=sampler.trainer_version,
        is_complete=loop.is_over,
    )


class _Loop:
    """The training half, and the tasks of a stage."""

    def __init__(
        self, config: RolloutLoopConfig, spec: StageSpec, workers: Workers, sampler: Sampler
    ) -> None:
        self._config, self._spec, self._workers, self._sampler = config, spec, workers, sampler
        self._reporter = Reporter(workers, num_steps=config.num_steps)
        # A resumed stage pushes at its start what an uninterrupted one pushed after the last step.
        self._was_pushed = sampler.num_steps > 0
        self._waits_for = "the start"

    @property
    def is_over(self) -> bool:
        """Whether every step of the stage is recorded."""
        return self._sampler.num_steps >= self._config.num_steps

    async def run(self, *, on_step: OnStep | None, stop: asyncio.Event | None) -> None:
        """Run the stage's tasks; the first error of any of them ends all."""
        async with asyncio.TaskGroup() as tasks:
            background = [tasks.create_task(self._watch(), name="watchdog")]
            if stop is not None:
                background.append(tasks.create_task(self._listen(stop), name="stop"))
            await self._push()
            await self._reporter.start()
            self._sampler.continue_recovered(tasks)
            background.append(tasks.create_task(self._sampler.admit(tasks), name="admit"))
            await self._train(on_step)
            for task in background:
                task.cancel()
            self._sampler.recall_all()
        if self.is_over:
            close_stage(self._workers.ledger, self._spec.stage)

    async def _listen(self, stop: asyncio.Event) -> None:
        await stop.wait()
        self._sampler.recall_all()

    async def _watch(self) -> None:
        await watch(
            self._sampler.bell,
            timeout_s=self._config.watchdog_s,
            key=f"stages.{self._spec.stage}.loop.watchdog_s",
            is_alive=self._reporter.has_sampled,
            describe=lambda: f"The loop waits for {self._waits_for}. {self._sampler.describe()}",
        )

    async def _train(self, on_step: OnStep | None) -> None:
        """Consumes complete groups, produces steps; waits for groups, unblocked by their rollouts."""
        while not (self.is_over or self._sampler.is_stopping):
            settled = await self._next_groups()
            if settled is None:
                return
            report = await self._step(settled)
            if on_step is not None:
                with self._waiting_for(f"what follows step {report.step} (checkpoint)"):
                    await on_step(report)

    async def _next_groups(self) -> Mapping[int, Settled] | None:
        """Return the groups of the next step by index, in training order; None when stopped."""
        sampler, config = self._sampler, self._config
        started_at_s = now_s()
        while not sampler.is_stopping:
            chosen = choose(
                sampler.groups.values(),
                consume=config.consume,
                groups_per_step=sampler.groups_wanted,
                trainer_version=sampler.trainer_version,
                max_lag_steps=config.max_lag_steps,
            )
            if chosen is None:
                with self._waiting_for(f"{sampler.groups_wanted} groups to train on"):
                    await sampler.bell.wait()
                continue
            for group in chosen:
                sampler.settle(group)  # once more: it may have got too old while it waited
            settled = {group.index: group.settled for group in chosen if group.settled is not None}
            if all(decision.group is not None for decision in settled.values()):
                self._reporter.trainer_waited_s = now_s() - started_at_s
                return settled
        return None

    async def _step(self, settled: Mapping[int, Settled]) -> StepReport:
        sampler = self._sampler
        batch = Batch(
            stage=self._spec.stage,
            step=sampler.num_steps,
            groups=tuple(one.group for one in settled.values() if one.group is not None),
            trainer_version=sampler.trainer_version,
            resets_optimizer=self._was_pushed and self._config.reset_optimizer_on_push,
        )
        with self._waiting_for(f"trainer.step({batch.step})"):
            report = await self._workers.trainer.step(batch)
        _check(report, batch)
        fates: dict[str, Fate] = {}
        for one in settled.values():
            fates.update(one.fates)
        self._workers.ledger.commit_step(batch, report, filtered=fates)

        sampler.trainer_version = report.policy_version
        is_last = batch.step + 1 == self._config.num_steps
        is_new = report.policy_version != sampler.engine_version  # a critic alone may have learned
        is_due = (batch.step + 1) % self._config.push_every_steps == 0
        self._was_pushed = is_due and is_new and not is_last
        if self._was_pushed:
            await self._push()
        # Slots are released after the push, so that what takes them is sampled by the new weights.
        sampler.num_steps += 1
        sampler.release(settled)
        sampler.recall_stale()
        tally, sampler.tally = sampler.tally, Tally()
        await self._reporter.write(batch, report, tally, fates, num_inflight=len(sampler.groups))
        return report

    async def _push(self) -> None:
        version = self._sampler.trainer_version
        with self._waiting_for("trainer.publish()"):
            source = await self._workers.trainer.publish()
        with self._waiting_for(f"engine.update_weights(policy_version={version})"):
            await self._workers.engine.update_weights(source, policy_version=version)
        self._sampler.engine_version = version
        self._sampler.bell.ring()

    @contextmanager
    def _waiting_for(self, what: str) -> Iterator[None]:
        self._waits_for = what
        yield
        self._waits_for = "itself"


def _check(report: StepReport, batch: Batch) -> None:
    grown = report.policy_version - batch.trainer_version
    if report.step != batch.step or grown not in (0, 1):
        raise ContractError(
            f"stage {batch.stage!r}: the trainer answered step {batch.step} at version "
            f"{batch.trainer_version} with step {report.step}, version {report.policy_version}. A step "
            f"adds at most one version; check that this trainer serves no other stage."
        )
