"""The sampling half of the loop: admits groups, runs their rollouts, decides what is trainable.

A group holds one of ``inflight_capacity`` slots from its admission until it was dropped here, or
released by the training half. Everything happens in one event loop, so plain attributes are the state
that both halves share; the bell tells each about the other's changes.
"""

import asyncio
import sys
from collections.abc import Iterable

from longarc.config.orchestrator import RolloutLoopConfig
from longarc.errors import ConfigError, StalledError
from longarc.orchestrator.groups import settle
from longarc.orchestrator.inflight import InflightGroup, Member, new_admissions
from longarc.orchestrator.lag import inflight_capacity
from longarc.orchestrator.metrics import Tally
from longarc.orchestrator.mixture import Mixture
from longarc.orchestrator.recovery import Recovered
from longarc.orchestrator.rollout import Clock, RolloutSpec, run_rollout
from longarc.orchestrator.stage import StageSpec, Workers, now_s
from longarc.orchestrator.watchdog import Bell
from longarc.records.outcome import Disposition, Outcome
from longarc.records.trajectory import Trajectory

_DROPPED_STEPS = 32
"""Steps' worth of groups that may be dropped in a row, unless the settings say otherwise."""


class Sampler:
    """Groups in flight and everything that happens to them before they are trained."""

    def __init__(
        self,
        config: RolloutLoopConfig,
        spec: StageSpec,
        workers: Workers,
        recovered: Recovered,
        *,
        policy_version: int,
        clock: Clock,
    ) -> None:
        """Take over the recovered groups; nothing runs before ``continue_recovered`` and ``admit``."""
        self.groups = {group.index: group for group in recovered.groups}
        """Groups in flight, by their position in the order of admission."""
        self.trainer_version = policy_version
        """Weights [optimizer steps] that the next step starts from; kept up to date by the loop."""
        self.engine_version = policy_version
        """Weights [optimizer steps] that the engine samples with at least; kept up to date by the loop."""
        self.num_steps = recovered.first_step
        """Steps that are recorded [optimizer steps]; kept up to date by the loop."""
        self.is_stopping = False
        self.bell = Bell()
        """Rings whenever a group or a version changed."""
        self.tally = Tally()
        """What happened since the last step."""
        self._config, self._spec, self._workers, self._clock = config, spec, workers, clock
        self._families = {item.family.name: item.family for item in spec.families}
        self._mixture = Mixture(
            spec.families, split=spec.split, position=recovered.num_groups_admitted
        )
        self._rollout_spec = RolloutSpec(
            sampling=spec.sampling,
            max_context_tokens=spec.max_context_tokens,
            timeout_s=config.rollout_timeout_s,
            grader_timeout_s=config.grader_timeout_s,
        )
        self._capacity = inflight_capacity(config)
        self._places = asyncio.Semaphore(config.max_concurrent_rollouts)

    # ------------------------------------------------------------- admission

    def continue_recovered(self, tasks: asyncio.TaskGroup) -> None:
        """Run what is missing of the groups that an earlier process left."""
        for group in list(self.groups.values()):
            if group.is_complete:
                self.settle(group)
            else:
                self._start(group, tasks)

    async def admit(self, tasks: asyncio.TaskGroup) -> None:
        """Consumes free slots, produces running groups; waits for a slot, unblocked by a step or a drop.

        Never admits more than the remaining steps can train.
        """
        config = self._config
        while not self.is_stopping and self.num_steps < config.num_steps:
            wanted = (config.num_steps - self.num_steps) * config.groups_per_step
            if len(self.groups) < min(self._capacity, wanted, self._sampling_left):
                self._start(self._admit_group(), tasks)
            else:
                await self.bell.wait()

    @property
    def groups_wanted(self) -> int:
        """Groups that the next step takes [groups]: fewer once the bound on sampling was reached."""
        return min(self._config.groups_per_step, self._sampling_left)

    @property
    def _sampling_left(self) -> int:
        """Groups that may be in flight for the next step, now that some were dropped [groups]."""
        bound = self._config.max_sampled_groups_per_step
        return sys.maxsize if bound is None else max(1, bound - self.tally.num_dropped)

    def _admit_group(self) -> InflightGroup:
        index = self._mixture.position
        admissions = new_admissions(
            self._mixture.draw(),
            stage=self._spec.stage,
            group_index=index,
            group_size=self._config.group_size,
            policy_version=self.engine_version,
            run_seed=self._spec.run_seed,
        )
        self._workers.ledger.admit(admissions)
        self.groups[index] = InflightGroup(index, tuple(map(Member, admissions)))
        return self.groups[index]

    def _start(self, group: InflightGroup, tasks: asyncio.TaskGroup) -> None:
        for member in group.members:
            if member.trajectory is None:
                tasks.create_task(self._fill(group, member), name=member.admission.trajectory_id)

    # -------------------------------------------------------------- rollouts

    async def _fill(self, group: InflightGroup, member: Member) -> None:
        """Fill one place of a group, with a second attempt where the first got too old."""
        ledger = self._workers.ledger
        while member.trajectory is None:
            trajectory = await self._rollout(member)
            self.tally.ended.append(trajectory)
            if trajectory.outcome is Outcome.CANCELLED_SHUTDOWN:
                ledger.complete(
                    trajectory, disposition=Disposition.CANCELLED, reason=trajectory.outcome.value
                )
                return
            if trajectory.outcome is Outcome.CANCELLED_STALE and not member.was_stale:
                self._retry(member, trajectory)
            else:
                ledger.complete(trajectory)
                member.trajectory = trajectory
            self.bell.ring()
        if group.is_complete:
            self.settle(group)

    async def _rollout(self, member: Member) -> Trajectory:
        admission = member.admission
        family = self._families.get(admission.task.family)
        if family is None:
            raise ConfigError(
                f"rollout {admission.trajectory_id} is recorded with task family "
                f"{admission.task.family!r}, but the stage has {sorted(self._families)}. Continue the "
                f"run with the families it was started with."
            )
        async with self._places:
            member.started_version, member.started_at_s = self.engine_version, now_s()
            return await run_rollout(
                admission,
                family,
                self._workers.sessions,
                self._workers.sandboxes,
                spec=self._rollout_spec,
                clock=self._clock,
                recall=member.recall,
            )

    def _retry(self, member: Member, cancelled: Trajectory) -> None:
        """Admit the place again before its old attempt is closed, so that no crash can lose it."""
        retry = member.retry_stale(policy_version=self.engine_version, run_seed=self._spec.run_seed)
        self._workers.ledger.admit([retry])
        self._workers.ledger.complete(
            cancelled, disposition=Disposition.CANCELLED, reason=cancelled.outcome.value
        )
        if self.is_stopping:
            member.recall.end(Outcome.CANCELLED_SHUTDOWN)

    def recall_all(self) -> None:
        """End every rollout in flight and admit nothing any more."""
        self.is_stopping = True
        for member in self._unfinished():
            member.recall.end(Outcome.CANCELLED_SHUTDOWN)
        self.bell.ring()

    def recall_stale(self) -> None:
        """End rollouts whose first tokens are too old by now: nothing they produce can be trained.

        Admission pacing leaves nothing to do here, unless a resumed run allows less lag than before.
        """
        for member in self._unfinished():
            started = member.started_version
            if started is None:
                continue
            if self.trainer_version - started > self._config.max_lag_steps:
                member.recall.end(Outcome.CANCELLED_STALE)

    def _unfinished(self) -> list[Member]:
        members = (member for group in self.groups.values() for member in group.members)
        return [member for member in members if member.trajectory is None]

    # ------------------------------------------------------------- decisions

    def settle(self, group: InflightGroup) -> None:
        """Decide a complete group; one that is not trained gets its fate and frees its slot.

        Raises:
            StalledError: too many groups were dropped since the last step.
        """
        group.settled = settle(
            group.trajectories,
            dynamic_sampling=self._config.dynamic_sampling,
            trainer_version=self.trainer_version,
            max_lag_steps=self._config.max_lag_steps,
            min_mean_reward=self._config.min_mean_reward,
            max_mean_reward=self._config.max_mean_reward,
        )
        if group.settled.group is not None:
            return
        self._workers.ledger.dispose(group.settled.fates)
        del self.groups[group.index]
        self.tally.drop(group.settled.fates)
        self.bell.ring()
        per_step = self._config.groups_per_step
        limit = self._config.max_dropped_groups_per_step or _DROPPED_STEPS * per_step
        if self.tally.num_dropped > limit:
            raise StalledError(
                f"stage {self._spec.stage!r}: {self.tally.num_dropped} groups were dropped without one "
                f"step of {per_step}, allowed are {limit}. {self.tally.explain()} Zero variance means "
                f"tasks that are too easy or too hard for the policy; environment faults mean broken "
                f"tasks. Change the tasks, or raise stages.{self._spec.stage}.loop."
                f"max_dropped_groups_per_step."
            )

    def release(self, indices: Iterable[int]) -> None:
        """Free the slots of groups that were trained."""
        for index in indices:
            del self.groups[index]
        self.bell.ring()

    def describe(self) -> str:
        """Say what is in flight, for the message of a stall."""
        complete = sum(group.is_complete for group in self.groups.values())
        running = [m for m in self._unfinished() if m.started_at_s is not None]
        running.sort(key=lambda member: member.started_at_s or 0.0)
        oldest = ", ".join(
            f"{m.admission.trajectory_id} on task {m.admission.task.id!r} "
            f"({now_s() - (m.started_at_s or 0.0):.0f} s)"
            for m in running[:5]
        )
        queued = len(self._unfinished()) - len(running)
        return (
            f"{len(self.groups)} groups are in flight, {complete} complete; {len(running)} rollouts run"
            + (f", the oldest are {oldest}" if oldest else "")
            + f"; {queued} wait for a place (max_concurrent_rollouts="
            f"{self._config.max_concurrent_rollouts})."
        )
