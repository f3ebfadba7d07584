"""``longarc models share``, and what is done with the pattern it prints."""

import json

import pytest
import torch

from longarc.cli.main import main
from longarc.config.recipe import Recipe
from longarc.config.stages import DsaConfig
from longarc.models.build import build_model
from longarc.models.hf_weights import load_pretrained_dir, save_weights
from longarc.models.index_share import with_shared_indexers
from longarc.models.layout import Layout
from longarc.pipeline.sharing import calibration_documents, loss_on, text_config
from longarc.runs.directory import RunDirectory
from model_cases import sharpened, small_glm
from token_samples import small_tokenizer

CONTEXT = 64


def recipe(**dsa):
    text = {"context_tokens": CONTEXT, "corpus": {"max_bytes": 200_000}, "num_steps": 1}
    return Recipe.model_validate(
        {
            "name": "r",
            "model": MODEL.config.model_dump(),
            "tokenizer": {"vocab_size": 320},
            "stages": {
                "pretrain": {"kind": "pretrain", **text},
                "dsa": {"kind": "dsa", "warmup_steps": 1, **text, **dsa},
            },
        }
    )


MODEL = sharpened(build_model(small_glm(vocab_size=320, num_hidden_layers=4), seed=0))


def make_run(path, *, attention="sparse", index_topk=12, **dsa):
    """Return a run whose stage ``dsa`` has a final checkpoint."""
    config = MODEL.config.model_copy(update={"index_topk": index_topk})
    with RunDirectory.create(
        path, recipe=recipe(**dsa).model_dump(mode="json"), seeds={"run": 0}
    ) as run:
        checkpoint = (
            run.stage("dsa")
            .writer(keep_last=1)
            .write(
                lambda directory: save_weights(MODEL, directory / "model.safetensors"),
                kind="policy",
                stage="dsa",
                step=1,
                policy_version=1,
                model=config.model_dump(mode="json"),
                tokenizer_sha256=None,
                info={"attention": attention},
            )
        )
        run.stage("dsa").set_final(checkpoint)
    small_tokenizer().save(path / "tokenizer.json")
    return path


def test_the_search_is_printed_with_a_pattern_that_convert_and_recipes_take(tmp_path, capsys):
    run = make_run(tmp_path / "run")
    command = ["models", "share", str(run), "--stage", "dsa", "--keep", "0.5", "--tokens", "200"]
    assert main(command) == 0
    header, *rows, empty, train, use = capsys.readouterr().out.splitlines()
    assert header.split()[0] == "indexers"
    cells = [row.split() for row in rows]
    assert [int(row[0]) for row in cells] == [4, 3, 2]
    assert cells[0][2:] == ["+0.0000", "-", "FFFF"]
    pattern = cells[-1][-1]
    assert pattern.count("F") == 2
    assert pattern in train
    assert pattern in use
    assert not empty

    documents = calibration_documents(
        text_config(recipe(), "dsa"), small_tokenizer(), num_tokens=200, seed=1 << 20
    )
    loss = loss_on(documents)
    shared = with_shared_indexers(MODEL, ["full" if c == "F" else "shared" for c in pattern])
    assert f"{loss(MODEL):.4f}" == cells[0][1]
    assert f"{loss(shared):.4f}" == cells[-1][1]
    assert loss(shared) != loss(MODEL)  # as it would be if attention were dense

    options = ["--stage", "dsa", "--index-topk-pattern", pattern]
    assert main(["models", "convert", str(run), str(tmp_path / "out"), *options]) == 0
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["index_topk_pattern"] == pattern
    assert config["indexer_types"].count("shared") == 2
    ids = torch.arange(40)
    converted = load_pretrained_dir(tmp_path / "out")
    assert torch.equal(
        converted(ids, Layout.documents([40])).hidden, shared(ids, Layout.documents([40])).hidden
    )
    assert recipe(index_topk_pattern=pattern).stages["dsa"].index_topk_pattern == pattern


def test_calibration_reads_other_documents_than_training():
    config = text_config(recipe(), "dsa")
    assert isinstance(config, DsaConfig)
    here = calibration_documents(config, small_tokenizer(), num_tokens=200, seed=1 << 20)
    trained = calibration_documents(config, small_tokenizer(), num_tokens=200, seed=2)
    assert [list(d.token_ids) for d in here] != [list(d.token_ids) for d in trained]
    assert sum(len(d.token_ids) for d in here) >= 200


@pytest.mark.parametrize(
    ("changes", "stage", "message"),
    [
        ({"attention": "dense"}, "dsa", "stage 'dsa' attends densely"),
        ({}, "pretrain", "stage 'pretrain' of"),
        ({"context_tokens": 16, "index_topk": 16}, "dsa", "are read whole with index_topk=16"),
    ],
)
def test_what_cannot_be_searched_is_refused(tmp_path, capsys, changes, stage, message):
    run = make_run(tmp_path / "run", **changes)
    assert main(["models", "share", str(run), "--stage", stage, "--tokens", "100"]) != 0
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("keep", ["0", "1.5", "-0.2"])
def test_a_share_that_is_none_is_refused(keep, capsys):
    with pytest.raises(SystemExit):
        main(["models", "share", "run", "--stage", "dsa", f"--keep={keep}"])
    assert "is not a share" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("FS", "stage 'dsa': index_topk_pattern: 'FS' describes 2 layers"),
        ("SFFF", "layer 0 is shared"),
    ],
)
def test_a_recipe_with_a_pattern_that_does_not_fit_its_model_is_refused(pattern, message):
    with pytest.raises(ValueError, match=message):
        recipe(index_topk_pattern=pattern)


def test_a_pattern_that_does_not_fit_the_checkpoint_is_refused(tmp_path, capsys):
    run = make_run(tmp_path / "run")
    options = ["--stage", "dsa", "--index-topk-pattern", "FFX"]
    assert main(["models", "convert", str(run), str(tmp_path / "out"), *options]) != 0
    assert "write one letter for each" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
