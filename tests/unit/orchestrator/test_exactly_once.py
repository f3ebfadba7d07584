"""A process that dies anywhere loses nothing and trains nothing twice."""

import asyncio
from collections import Counter

import pytest

from longarc.errors import ContractError
from longarc.records.outcome import Disposition, Outcome
from longarc.runs.ledger import Ledger
from stage_fakes import (
    STAGE,
    FakeFamily,
    Play,
    Stage,
    group_indices,
    lags,
    ledger_batches,
    loop_config,
    quick_directory,
)
from virtual_time import run_virtual


@pytest.fixture
def ledgers():
    with quick_directory() as directory:
        yield directory


class Killed(BaseException):
    """The process is gone."""


class MortalLedger(Ledger):
    """Dies before or after its n-th write, and takes the process with it."""

    def mortal(self, *, dies_at_write: int, after: bool) -> "MortalLedger":
        self.num_writes, self.dies_at_write, self.after = 0, dies_at_write, after
        return self

    def _write(self, operation, *args, **kwargs):
        self.num_writes += 1
        is_last = self.num_writes == self.dies_at_write
        if self.num_writes > self.dies_at_write or (is_last and not self.after):
            raise Killed
        result = operation(*args, **kwargs)
        if is_last:
            raise Killed
        return result

    def admit(self, *args, **kwargs):
        return self._write(super().admit, *args, **kwargs)

    def complete(self, *args, **kwargs):
        return self._write(super().complete, *args, **kwargs)

    def dispose(self, *args, **kwargs):
        return self._write(super().dispose, *args, **kwargs)

    def commit_step(self, *args, **kwargs):
        return self._write(super().commit_step, *args, **kwargs)

    def cancel_open(self, *args, **kwargs):
        return self._write(super().cancel_open, *args, **kwargs)


def assorted(task_index: int, rollout: int) -> Play:
    """Good groups, a repaired one, a crashed one, one without variance; slow and fast members."""
    kind = task_index % 5
    reward = 0.0 if kind == 3 else float(rollout % 2)
    crashes = kind == 2 or (kind == 1 and rollout % 3 == 2)
    outcome = Outcome.ENV_CRASHED if crashes else Outcome.COMPLETED
    return Play(seconds=1.0 + 2.0 * (rollout % 3), reward=reward, outcome=outcome)


def is_killed(error: BaseException) -> bool:
    if isinstance(error, BaseExceptionGroup):
        return any(map(is_killed, error.exceptions))
    return isinstance(error, Killed)


def live(path, config, *, dies_at_write=None, after=False, how=assorted) -> Stage | None:
    """Run one life of the stage; None if it was killed."""

    def open_ledger(path):
        if dies_at_write is None:
            return Ledger.open(path)
        return MortalLedger.open(path).mortal(dies_at_write=dies_at_write, after=after)

    stage = Stage(path, config, FakeFamily(how=how), open_ledger=open_ledger)
    try:
        run_virtual(stage.run())
    except BaseException as error:
        if not is_killed(error):
            raise
        return None
    return stage


def check(path, *, num_steps: int, max_lag_steps: int) -> None:
    batches = ledger_batches(path)
    used = Counter(t.id for batch in batches for group in batch.groups for t in group.trajectories)
    groups = Counter(group.id for batch in batches for group in batch.groups)
    with Ledger.open(path) as ledger:
        assert ledger.audit().findings == ()
        indices = {admission.group_index for admission in ledger.admissions(STAGE)}
        # Each group that was admitted has one fate: all its places were trained or dropped together.
        fates = {row.group_id: set() for row in ledger.rows(stage=STAGE)}
        for row in ledger.rows(stage=STAGE):
            if row.disposition is not Disposition.CANCELLED:
                fates[row.group_id].add(row.disposition)
    assert len(batches) == num_steps
    assert set(used.values()) == {1}
    assert set(groups.values()) == {1}
    assert indices == set(range(len(indices)))
    assert all(fates.values()), "a group that was admitted was forgotten"
    assert max(lags(batches)) <= max_lag_steps


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("consume", ["admission", "ready"])
def test_a_death_at_any_write_loses_nothing_and_trains_nothing_twice(ledgers, consume, after):
    config = loop_config(
        num_steps=2, groups_per_step=2, group_size=3, max_lag_steps=2, consume=consume
    )
    num_deaths = 0
    while True:
        path = ledgers / f"{num_deaths}.sqlite"
        if live(path, config, dies_at_write=num_deaths + 1, after=after) is not None:
            break
        num_deaths += 1
        assert live(path, config) is not None
        check(path, num_steps=2, max_lag_steps=2)
    assert num_deaths > 20


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_death_while_a_stale_rollout_is_admitted_again_does_not_lose_it(ledgers, after):
    def how(task_index: int, rollout: int) -> Play:
        return Play(seconds=1.0 + 10.0 * task_index)

    strict = {"num_steps": 3, "groups_per_step": 1, "group_size": 1, "dynamic_sampling": False}
    for dies_at_write in range(1, 100):
        path = ledgers / f"{dies_at_write}.sqlite"
        # Groups 0 and 1 run when a process ends; the next allows no lag, so that 1 is too old after 0.
        first = Stage(path, loop_config(**strict, max_lag_steps=1))
        first.trainer.fails_at_step = 0
        first.family.how = lambda task_index, rollout: Play(seconds=1.0 + 100.0 * task_index)
        with pytest.raises(ValueError, match="the trainer broke"):
            run_virtual(first.run())
        killed = live(
            path, loop_config(**strict), dies_at_write=dies_at_write, after=after, how=how
        )
        if killed is not None:
            break
        live(path, loop_config(**strict), how=how)
        assert group_indices(ledger_batches(path)) == [[0], [1], [2]]
    with Ledger.open(path) as ledger:
        assert ledger.rows(outcome=Outcome.CANCELLED_STALE), (
            "nothing was stale: the test shows nothing"
        )


def test_a_process_that_dies_again_and_again_still_finishes(ledgers):
    path, config = ledgers / "ledger.sqlite", loop_config(group_size=3, max_lag_steps=1)
    lives = 0
    while live(path, config, dies_at_write=12, after=lives % 2 == 0) is None:
        lives += 1
        assert lives < 50, "no progress between deaths"
    check(path, num_steps=3, max_lag_steps=1)
    assert lives > 2


def test_finished_members_of_a_cut_off_group_are_not_sampled_again(ledgers):
    def how(task_index: int, rollout: int) -> Play:
        return Play(seconds=[1.0, 50.0][rollout % 2], reward=float(rollout % 2))

    path = ledgers / "ledger.sqlite"
    config = loop_config(num_steps=1, groups_per_step=1, dynamic_sampling=False)
    first = Stage(path, config, FakeFamily(how=how))

    async def run_and_stop():
        asyncio.get_running_loop().call_later(10.0, first.stop.set)
        return await first.run()

    result = run_virtual(run_and_stop())
    assert not result.is_complete

    second = Stage(path, config, FakeFamily(how=how))
    assert run_virtual(second.run()).is_complete
    assert list(second.sessions.opened) == [f"{STAGE}/0/1/1"]
    (batch,) = ledger_batches(path)
    assert [t.id for t in batch.groups[0].trajectories] == [f"{STAGE}/0/0/0", f"{STAGE}/0/1/1"]


def test_a_trainer_that_fails_leaves_its_batch_to_the_next_process(ledgers):
    path, config = ledgers / "ledger.sqlite", loop_config(max_lag_steps=1)
    first = Stage(path, config)
    first.trainer.fails_at_step = 1
    with pytest.raises(ValueError, match="the trainer broke"):
        run_virtual(first.run())

    second = Stage(path, config)
    run_virtual(second.run())
    check(path, num_steps=3, max_lag_steps=1)
    assert second.trainer.batches[0].step == 1


def test_the_frontier_of_a_resume_is_what_was_trained(ledgers):
    # Six groups in flight; the process ends after groups 0 and 1 were trained (PITFALLS S2).
    path = ledgers / "ledger.sqlite"
    config = loop_config(num_steps=4, groups_per_step=2, max_lag_steps=2)
    first = Stage(path, config)
    first.trainer.fails_at_step = 1
    with pytest.raises(ValueError, match="the trainer broke"):
        run_virtual(first.run())
    second = Stage(path, config)
    run_virtual(second.run())

    trained = [g.id for batch in second.trainer.batches for g in batch.groups]
    assert trained == [f"{STAGE}/{index}" for index in range(2, 8)]


def test_a_stage_that_is_over_is_left_alone(ledgers):
    path, config = ledgers / "ledger.sqlite", loop_config()
    run_virtual(Stage(path, config).run())
    again = Stage(path, config)
    assert run_virtual(again.run()).is_complete
    assert again.trainer.batches == []
    assert again.engine.pushed == []


def test_weights_that_do_not_belong_to_the_last_step_are_refused(ledgers):
    path = ledgers / "ledger.sqlite"
    run_virtual(Stage(path, loop_config(num_steps=2)).run())
    again = Stage(path, loop_config(num_steps=3))
    again.trainer.version = 1
    with pytest.raises(
        ContractError, match=r"left weights of version 2, but the trainer holds version 1"
    ):
        run_virtual(again.run())


def test_what_a_shorter_stage_cannot_use_is_cancelled_with_a_reason(ledgers):
    path = ledgers / "ledger.sqlite"
    first = Stage(path, loop_config(num_steps=4, max_lag_steps=2))
    first.trainer.fails_at_step = 1
    with pytest.raises(ValueError, match="the trainer broke"):
        run_virtual(first.run())

    run_virtual(Stage(path, loop_config(num_steps=1)).run())
    with Ledger.open(path) as ledger:
        assert ledger.audit().findings == ()
        reasons = ledger.counts("disposition_reason", stage=STAGE)
    assert reasons["the stage was over"] > 0
