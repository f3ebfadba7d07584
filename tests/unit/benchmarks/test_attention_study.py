"""The attention study's table, and what its cells depend on."""

from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest

from longarc.config.model import AttentionPattern
from longarc.models.build import build_model
from longarc.models.conversion import to_hybrid
from model_cases import small_glm

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture(autouse=True)
def _importable(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)


def make_study(**changes):
    values = {
        "checkpoint": "c",
        "tokenizer": "t",
        "weights": "w",
        "base_steps": 0,
        "window": 16,
        "steps": 4,
        "first_steps": 1,
        "context": 128,
        "tokens_per_step": 256,
        "lr": 1e-3,
        "lengths": (64, 128),
        "texts": 2,
        "keys": 4,
        "search_length": 64,
        "beam": 2,
        "rotates": False,
        "searched": "FSSF",
    }
    return import_module("attention_cells").Study(**(values | changes))


@pytest.mark.parametrize(
    ("variant", "layers"),
    [
        ("full", "FFFF"),
        ("interleaved", "FSFS"),
        ("searched", "FSSF"),
        ("gdn", "FGGF"),
        ("simple-gdn", "FDDF"),
    ],
)
def test_each_variant_has_its_layers(variant, layers):
    pattern = import_module("attention_cells").pattern_of(variant, make_study())
    assert (pattern.layers, pattern.window) == (layers, 16)


def test_sparse_attention_keeps_the_model_as_it_is():
    assert import_module("attention_cells").pattern_of("dsa", make_study()) is None


@pytest.mark.parametrize(
    ("layers", "num_bytes"),
    [
        ("FF", 2 * 128 * 20 * 4),
        ("FS", (128 + 16) * 20 * 4),
        ("FD", (128 * 20 + 4 * 16 * 16) * 4),
        ("FG", (128 * 20 + 4 * 16 * 16 + 3 * 4 * 48) * 4),
    ],
)
def test_the_cache_of_a_sequence_is_counted_by_layer(layers, num_bytes):
    model = to_hybrid(
        build_model(small_glm(num_hidden_layers=2), seed=0), AttentionPattern(layers=layers)
    )
    cells = import_module("attention_cells")
    assert cells.cache_bytes(model, 128, make_study()) == num_bytes


def test_sparse_attention_caches_indexer_keys_too():
    model = build_model(small_glm(num_hidden_layers=2), seed=0)
    cells = import_module("attention_cells")
    assert cells.cache_bytes(model, 128, make_study()) == 2 * 128 * (20 + 8) * 4


def result(layers, score, seconds):
    return {
        "layers": layers,
        "scores": {n: {"single": score, "multi_key": score} for n in ("64", "128")},
        "step_s": seconds,
        "prefill_s": 0.5,
        "new_parameters": 1234,
        "cache_bytes": 2048,
    }


def test_the_table_has_means_and_ranges_over_seeds(tmp_path):
    bench, cells, study = (
        import_module("attention_study"),
        import_module("attention_cells"),
        make_study(),
    )
    results = bench.Results(tmp_path / "results.json", study)
    for seed, score in ((0, 0.5), (1, 0.75)):
        results.put(cells.Cell(variant="full", seed=seed), result("FFFF", score, 1.0 + seed))
    results.put(cells.Cell(variant="full", seed=None), result("FFFF", 0.25, 0.0))
    rows = bench.table(results, study, [0, 1])
    assert [row.strip("| ").split(" | ") for row in rows[2:]] == [
        ["full, untrained", "FFFF", "25.0", "25.0", "1,234", "2 KiB", "-", "0.50 s"],
        ["full", "FFFF", "62.5 (50..75)", "62.5 (50..75)", "1,234", "2 KiB", "1.50 s", "0.50 s"],
    ]


def test_finished_cells_are_read_again_by_the_same_study_alone(tmp_path):
    bench, cells = import_module("attention_study"), import_module("attention_cells")
    path = tmp_path / "results.json"
    bench.Results(path, make_study()).put(
        cells.Cell(variant="dsa", seed=3), result("dsa", 1.0, 1.0)
    )
    assert list(bench.Results(path, make_study()).cells) == ["dsa/3"]
    assert bench.Results(path, make_study(lr=2e-3)).cells == {}


def test_the_command_line_says_all_that_a_study_needs(monkeypatch):
    bench = import_module("attention_study")

    class FinishedRun:
        """Stands for the run directory, the stage, and its manifest."""

        def __init__(self):
            self.files = {"model.safetensors": SimpleNamespace(sha256="w")}

        def stage(self, name):
            assert name == "midtrain"
            return self

        def final(self):
            return Path("checkpoint")

    monkeypatch.setattr(bench.RunDirectory, "look", lambda path: FinishedRun())
    monkeypatch.setattr(bench, "read_manifest", lambda path: FinishedRun())
    monkeypatch.setattr("sys.argv", ["attention_study.py", "--keys", "3"])
    study = bench.study_of(bench.parse())
    assert (study.keys, study.weights, study.first_steps) == (3, "w", study.steps // 4)
