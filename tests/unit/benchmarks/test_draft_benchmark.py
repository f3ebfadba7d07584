"""What the benchmark of drafts keeps, and which of its turns count."""

from argparse import Namespace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from longarc.models.build import build_model
from model_cases import small_glm

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture(autouse=True)
def _importable(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)


def options_keeping(keep, **changes):
    values = {"steps": 2, "depths": 1, "lr": 1.0, "deep_steps": 1, "deep_lr": 1.0, "seed": 0}
    return Namespace(keep=keep, **{**values, **changes})


def trained_embedding(options):
    """Return a number of a model that was trained or loaded, and whether it was trained."""
    bench, model, calls = import_module("drafts"), build_model(small_glm(), seed=0), []

    def trains():
        calls.append(None)
        with torch.no_grad():
            model.model.embed_tokens.weight.fill_(7.0)

    loaded = SimpleNamespace(manifest=SimpleNamespace(model_dump_json=lambda: "{}"))
    bench._train_or_load(model, trains, loaded, options, "end-to-end TV")
    return float(model.model.embed_tokens.weight[0, 0].detach()), bool(calls)


def test_what_was_trained_is_kept_for_the_same_options_and_no_others(tmp_path):
    keep = tmp_path / "kept"
    assert trained_embedding(options_keeping(keep)) == (7.0, True)
    assert trained_embedding(options_keeping(keep)) == (7.0, False)
    assert trained_embedding(options_keeping(keep, steps=3)) == (7.0, True)
    assert trained_embedding(options_keeping(None)) == (7.0, True)
    assert len(list(keep.iterdir())) == 2


def answers_with(bench, others):
    return bench.Answers(
        health=None, whole_s=2.0, first_s=0.5, num_answers=10, num_tokens=100, others=others
    )


def test_a_turn_in_which_others_had_the_cores_is_made_again():
    bench, discarded = import_module("speculation"), []
    turns = iter([answers_with(bench, others) for others in (0.9, 0.4, 0.02, 0.0)])
    assert bench.undisturbed(lambda: next(turns), discarded).others == 0.02
    assert discarded == [0.9, 0.4]


def test_turns_are_not_made_again_for_ever():
    bench, discarded = import_module("speculation"), []
    done = bench.undisturbed(lambda: answers_with(bench, 0.5), discarded)
    assert done.others == 0.5
    assert len(discarded) == bench.MOST_DISCARDED


def test_decoding_leaves_out_what_comes_before_the_second_token():
    done = answers_with(import_module("speculation"), 0.0)
    assert done.speed == pytest.approx(50.0)
    assert done.decoding_speed == pytest.approx(60.0)
