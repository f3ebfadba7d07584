"""Whatever the speeds: no token trained is older than the bound, and pacing alone sees to it."""

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from longarc.records.outcome import Disposition, Outcome
from longarc.runs.ledger import Ledger
from stage_fakes import STAGE, FakeFamily, Play, Stage, lags, loop_config, quick_directory
from virtual_time import run_virtual

SPEEDS_S = st.sampled_from([0.0, 1.0, 3.0, 40.0])


@st.composite
def loop_settings(draw):
    push_every_steps = draw(st.integers(1, 3))
    max_lag_steps = draw(st.integers(push_every_steps - 1, push_every_steps + 2))
    groups_per_step = draw(st.integers(1, 3))
    bound = groups_per_step * (max_lag_steps - push_every_steps + 2)
    return {
        "num_steps": draw(st.integers(2, 9)),
        "groups_per_step": groups_per_step,
        "group_size": 2,
        "push_every_steps": push_every_steps,
        "max_lag_steps": max_lag_steps,
        "consume": draw(st.sampled_from(["admission", "ready"])),
        "max_inflight_groups": draw(st.none() | st.integers(groups_per_step, bound)),
        "max_concurrent_rollouts": draw(st.sampled_from([64, 64, 5, 2])),
    }


def one_straggler(consume: str) -> dict[str, object]:
    """The first task takes as long as all others together: whoever forgets it trains it too late."""
    config = {
        "num_steps": 6,
        "groups_per_step": 1,
        "group_size": 2,
        "push_every_steps": 1,
        "max_lag_steps": 2,
        "consume": consume,
        "max_inflight_groups": None,
        "max_concurrent_rollouts": 64,
    }
    seconds = [40.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]
    speeds = {"step_s": 1.0, "push_s": 0.0, "turn_s": 0.0}
    return {"config": config, "seconds": seconds, "kinds": [], **speeds}


@example(**one_straggler("admission"))
@example(**one_straggler("ready"))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    config=loop_settings(),
    seconds=st.lists(SPEEDS_S, min_size=1, max_size=7),
    kinds=st.lists(st.sampled_from(["good", "good", "all alike", "crashed"]), max_size=4),
    step_s=SPEEDS_S,
    push_s=SPEEDS_S,
    turn_s=SPEEDS_S,
)
def test_no_trained_token_is_older_than_the_bound_at_any_speeds(
    config, seconds, kinds, step_s, push_s, turn_s
):
    kinds = [*kinds, "good"]

    def how(task_index: int, rollout: int) -> Play:
        kind = kinds[task_index % len(kinds)]
        return Play(
            seconds=seconds[task_index % len(seconds)],
            reward=0.0 if kind == "all alike" else float(rollout % 2),
            outcome=Outcome.ENV_CRASHED if kind == "crashed" else Outcome.COMPLETED,
            num_turns=2,
        )

    with quick_directory() as directory:
        stage = Stage(
            directory / "ledger.sqlite",
            loop_config(**config),
            FakeFamily(how=how),
            step_s=step_s,
            push_s=push_s,
            turn_s=turn_s,
        )
        result = run_virtual(stage.run())
        with Ledger.open(stage.path) as ledger:
            report, dispositions = ledger.audit(), ledger.counts("disposition", stage=STAGE)

    assert result.is_complete
    assert max(lags(stage.trainer.batches)) <= config["max_lag_steps"]
    assert report.findings == ()
    # The check at consumption is a backstop: no rollout was wasted to keep the bound.
    assert Disposition.STALE not in dispositions
    assert Disposition.CANCELLED not in dispositions
