"""The benchmarks' table, their bars and their command lines."""

import ast
import re
import sys
from importlib import import_module
from pathlib import Path
from runpy import run_path

import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
LAST_LINE = re.compile(r"bars: (\d+) of (\d+) hold")
SCRIPTS = sorted(
    path.stem
    for path in BENCHMARKS.glob("*.py")
    if "__main__" in path.read_text() and not path.stem.endswith("_worker")
)
"""What a user starts; a worker is started by one of these."""


@pytest.fixture(autouse=True)
def _importable(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)


def last_counts(output: str) -> tuple[int, int]:
    """Return H and M of the last line."""
    match = LAST_LINE.fullmatch(output.splitlines()[-1])
    assert match is not None, output
    return int(match[1]), int(match[2])


def asynchronous_report(capsys, *, speed: float, successes: dict[str, list[float]]):
    bench = import_module("asynchronous")
    speeds = {"sync-1": 1000.0, "sync-2": 800.0, "async": speed}
    table = import_module("common").Table()
    bench.add_rows(
        table,
        {
            name: {
                seed: bench.Result(
                    tokens_per_s=value,
                    success_frac=successes[name][seed],
                    num_tokens=1,
                    mean_lag_steps=0.0,
                )
                for seed in range(len(successes[name]))
            }
            for name, value in speeds.items()
        },
        wait_s=0.0,
    )
    table.close()
    return capsys.readouterr().out


def test_the_last_line_counts_bars_and_not_rows(capsys):
    table = import_module("common").Table()
    table.row("held", "5", bar=">= 4", holds=True)
    table.row("missed", "3", peer="2", ratio=1.5, bar=">= 4", holds=False)
    table.row("without a bar", "7")
    assert table.close() is False
    output = capsys.readouterr().out
    assert output.splitlines()[0] == "figure | ours | peer | ratio | bar"
    assert "missed | 3 | 2 | 1.50 | >= 4   MISSED" in output
    assert last_counts(output) == (1, 2)


def test_a_peer_that_is_not_installed_does_not_count_as_beaten(capsys):
    bench = import_module("grpo")
    table = import_module("common").Table()
    measured = bench.Measured(ours=[bench.Spent(1.0, 1.0)], peer=[], versions={})
    bench.add_rows(table, bench.SMALL[0], measured)
    table.close()
    assert last_counts(capsys.readouterr().out) == (0, 1)


def test_the_ratio_to_the_peer_is_that_of_the_median_steps(capsys):
    bench = import_module("grpo")
    table = import_module("common").Table()
    ours = [bench.Spent(t, t) for t in (1.0, 2.0, 30.0)]
    peer = [bench.Spent(t, t) for t in (1.0, 5.0, 6.0)]
    bench.add_rows(table, bench.SMALL[0], bench.Measured(ours=ours, peer=peer, versions={}))
    table.close()
    output = capsys.readouterr().out
    assert "| 32.0 | 12.8 | 2.50 |" in output
    assert last_counts(output) == (1, 1)


def test_asynchronous_is_compared_with_the_faster_synchronous_arm(capsys):
    same = {name: [0.5, 0.6, 0.7] for name in ("sync-1", "sync-2", "async")}
    output = asynchronous_report(capsys, speed=1250.0, successes=same)
    assert "peer sync-1 | 1250 | 1000 | 1.25" in output
    assert last_counts(output) == (1, 2)
    output = asynchronous_report(capsys, speed=1300.0, successes=same)
    assert last_counts(output) == (2, 2)


def test_success_below_the_spread_over_seeds_misses_its_bar(capsys):
    successes = {"sync-1": [0.60, 0.65, 0.70], "sync-2": [0.0, 0.0, 0.0], "async": [0.5, 0.53, 0.5]}
    assert last_counts(asynchronous_report(capsys, speed=2000.0, successes=successes)) == (1, 2)
    successes["async"] = [0.55, 0.6, 0.57]
    assert last_counts(asynchronous_report(capsys, speed=2000.0, successes=successes)) == (2, 2)


def test_two_policies_that_solve_nothing_are_not_equally_good(capsys):
    nothing = {name: [0.0, 0.0] for name in ("sync-1", "sync-2", "async")}
    assert last_counts(asynchronous_report(capsys, speed=2000.0, successes=nothing)) == (1, 2)


def test_one_seed_has_no_spread_to_be_within(capsys):
    same = {name: [0.5] for name in ("sync-1", "sync-2", "async")}
    assert last_counts(asynchronous_report(capsys, speed=2000.0, successes=same)) == (1, 2)


def test_without_a_finished_run_no_bar_of_the_asynchronous_benchmark_holds(
    capsys, monkeypatch, tmp_path
):
    monkeypatch.setattr(sys, "argv", ["asynchronous.py", "--run", str(tmp_path)])
    import_module("asynchronous").main()
    output = capsys.readouterr().out
    assert "make quickstart" in output
    assert last_counts(output) == (0, 4)


def test_without_a_finished_run_no_bar_of_the_quality_of_sparse_attention_holds(
    capsys, monkeypatch, tmp_path
):
    monkeypatch.setattr(sys, "argv", ["sparse_quality.py", "--run", str(tmp_path)])
    assert import_module("sparse_quality").main() == 1
    output = capsys.readouterr().out
    assert "make quickstart" in output
    assert last_counts(output) == (0, 4)


def measured(monkeypatch, *, ours, theirs):
    """Let the sides of the sparse benchmark measure what is given: time [s] and memory [MB] at 8,192 tokens."""
    bench = import_module("model_sparse")

    def measure(name, num_tokens, what, *, repeats=1):
        time_s, peak_mb = ours if name == "ours" else theirs
        length = num_tokens / 8192
        return bench.Measured(time_s * length, peak_mb * length, indexer_frac=0.5, norm=1.0)

    monkeypatch.setattr(bench, "measure", measure)
    return bench


def test_the_bars_of_sparse_attention_are_parts_of_what_transformers_takes(capsys, monkeypatch):
    table = import_module("common").Table()
    bench = measured(monkeypatch, ours=(2.0, 100.0), theirs=(10.0, 1250.0))
    bench.sparse_rows(table, num_repeats=1, is_quick=False)
    table.close()
    assert last_counts(capsys.readouterr().out) == (8, 8)


def test_a_side_that_is_too_slow_or_too_large_misses_its_bars(capsys, monkeypatch):
    table = import_module("common").Table()
    bench = measured(monkeypatch, ours=(3.1, 200.0), theirs=(10.0, 1250.0))
    bench.sparse_rows(table, num_repeats=1, is_quick=False)
    table.close()
    assert last_counts(capsys.readouterr().out) == (4, 8)


def test_every_arm_takes_the_same_steps_over_the_same_groups():
    bench = import_module("asynchronous")
    start = bench.Start(
        model=Path("model"), tokenizer=Path("tokenizer.json"), chat_format="glm-5", is_sparse=True
    )
    options = bench.parse(["--steps", "3", "--groups", "2"])
    arms = (*bench.SYNC, bench.ASYNC)
    recipes = [bench.make_recipe(start, arm, options, wait_s=0.05, seed=1) for arm in arms]
    stages = [recipe.stages["agentic_rl"] for recipe in recipes]
    assert {stage.loop.num_steps * stage.loop.groups_per_step for stage in stages} == {6}
    assert [stage.loop.max_lag_steps for stage in stages] == [0, 0, 3]
    assert [stage.trainer_process for stage in stages] == [False, False, True]
    assert [recipe.trainer_threads for recipe in recipes] == [1, 2, 1]
    assert len({(stage.loss.model_dump_json(), stage.optimizer.lr) for stage in stages}) == 1


def test_the_heavy_tail_has_more_short_trails_than_long_ones_and_continues_by_cursor():
    family = import_module("heavy_tail").HeavyTailedFiles()
    stream = family.tasks("train", cursor=0)
    tasks = [next(stream) for _ in range(200)]
    hops = [task.difficulty for task in tasks]
    assert hops.count(1) > hops.count(2) > hops.count(5) > 0
    assert len({task.id for task in tasks}) == 200
    assert next(family.tasks("train", cursor=150)) == tasks[150]


@pytest.mark.parametrize("script", SCRIPTS)
def test_each_benchmark_has_help_and_a_quick_mode(script, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", [f"{script}.py", "--help"])
    with pytest.raises(SystemExit) as stopped:
        run_path(str(BENCHMARKS / f"{script}.py"), run_name="__main__")
    assert stopped.value.code == 0
    assert "--quick" in capsys.readouterr().out


def options_with(script, reader):
    """Return the options of a benchmark that ``reader`` reads, found in its source."""
    calls = [
        node
        for node in ast.walk(ast.parse((BENCHMARKS / f"{script}.py").read_text()))
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument"
    ]
    return [
        node.args[0].value
        for node in calls
        for keyword in node.keywords
        if keyword.arg == "type" and getattr(keyword.value, "id", "") == reader
    ]


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_number_of_nothing_is_refused_where_it_is_read(script, capsys, monkeypatch):
    assert options_with(script, "int") == []  # it would read any number
    refused = [(option, "0") for option in options_with(script, "positive")]
    refused += [(option, "-1") for option in options_with(script, "natural")]
    for option, value in refused:
        monkeypatch.setattr(sys, "argv", [f"{script}.py", f"{option}={value}"])
        with pytest.raises(SystemExit) as stopped:
            run_path(str(BENCHMARKS / f"{script}.py"), run_name="__main__")
        assert stopped.value.code == 2
        assert f"argument {option}: {value} is not at least" in capsys.readouterr().err


def test_the_exactness_benchmark_runs_to_its_last_line(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["exactness.py", "--quick"])
    import_module("exactness").main()
    held, num_bars = last_counts(capsys.readouterr().out)
    assert held == num_bars == 2
