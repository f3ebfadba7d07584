"""What would stop a later stage is found before the first one."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from longarc.algos import losses
from longarc.config.loader import load_settings
from longarc.config.recipe import Recipe
from longarc.errors import ConfigError, ResourceError
from longarc.models import offload
from longarc.pipeline.preflight import check_recipe

RECIPES = Path(__file__).parents[3] / "recipes"


def recipe(name, *overrides):
    return load_settings(Recipe, RECIPES / f"{name}.toml", overrides=list(overrides))


@pytest.fixture
def two_cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})


@pytest.mark.usefixtures("two_cores")
def test_the_recipes_fit_a_machine_of_two_cores():
    check_recipe(recipe("quickstart"), is_new=True)
    check_recipe(recipe("smoke"), is_new=True)


@pytest.mark.usefixtures("two_cores")
@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("threads=64", "threads = 64, but this process may use 2"),
        ("trainer_threads=2", "trainer_threads = 3, but this process may use 2"),
    ],
)
def test_more_threads_than_cores_are_refused(override, said):
    with pytest.raises(ResourceError, match=said):
        check_recipe(recipe("quickstart", override), is_new=True)


@pytest.mark.usefixtures("two_cores")
def test_where_servers_sample_the_trainer_may_have_all_cores():
    servers = 'engine.servers=["http://a:8100"]'
    check_recipe(recipe("quickstart", "trainer_threads=2", servers), is_new=True)
    with pytest.raises(ResourceError, match=r"^trainer_threads = 3, but this process may use 2"):
        check_recipe(recipe("quickstart", "trainer_threads=3", servers), is_new=True)


@pytest.mark.usefixtures("two_cores")
def test_a_family_of_a_text_stage_is_looked_at_before_the_run():
    settings = "{settings={no_such_setting=1}}"
    wrong = f"stages.midtrain.demonstrations.tasks.format={settings}"
    with pytest.raises(ConfigError, match="no_such_setting"):
        check_recipe(recipe("quickstart", wrong), is_new=True)


def test_demonstrations_of_nothing_are_refused():
    with pytest.raises(ConfigError, match=r"demonstrations\.tasks"):
        recipe("quickstart", "stages.midtrain.demonstrations={tasks={}}")


nameless = lambda inputs: losses.ppo_clip(inputs)  # noqa: E731 - what a user may write


@pytest.mark.usefixtures("two_cores")
def test_a_loss_that_other_processes_cannot_find_is_refused_before_the_run():
    loss = f"stages.reasoning_rl.loss={{path='{__name__}:nameless'}}"
    with pytest.raises(ConfigError, match="cannot go to other processes; give it a name"):
        check_recipe(recipe("quickstart", loss), is_new=True)
    check_recipe(recipe("quickstart", loss, "threads=1"), is_new=True)
    beside = f"stages.agentic_rl.loss={{path='{__name__}:nameless'}}"
    check_recipe(recipe("quickstart", beside), is_new=True)  # this trainer loads it by its path


def no_record(inputs):
    return inputs.policy_logprobs.sum()


def not_a_number(inputs):
    out = losses.ppo_clip(inputs)
    return replace(out, normaliser=out.normaliser * float("nan"))


def without_gradient(inputs):
    out = losses.ppo_clip(inputs)
    return replace(out, loss_sum=out.loss_sum.detach())


def meddling(inputs):
    raise KeyError("teacher")


@pytest.mark.usefixtures("two_cores")
@pytest.mark.parametrize(
    ("stage", "loss", "said"),
    [
        ("reasoning_rl", f"path='{__name__}:no_record'", "it returns a Tensor; a loss returns"),
        ("reasoning_rl", f"path='{__name__}:not_a_number'", "its normaliser is nan"),
        ("agentic_rl", f"path='{__name__}:without_gradient'", "does not require grad"),
        ("general_rl", f"path='{__name__}:meddling'", "on-policy tokens: KeyError: 'teacher'"),
        (
            "reasoning_rl",
            "path='longarc.algos.losses:icepop', settings={low=2.0, high=3.0}",
            "low=2.0, high=3.0: the band excludes the ratio 1",
        ),
        (
            "reasoning_rl",
            "path='longarc.algos.losses:ppo_clip', settings={eps_low=-0.1}",
            "eps_low=-0.1",
        ),
        (
            "distill",
            "path='longarc.algos.losses:gspo'",
            "needs one advantage for all tokens of a segment",
        ),
    ],
)
def test_a_loss_that_cannot_work_is_refused_before_the_run(stage, loss, said):
    bad = recipe("quickstart", f"stages.{stage}.loss={{{loss}}}")
    with pytest.raises(ConfigError, match=f"^stage '{stage}': loss '.*{said}"):
        check_recipe(bad, is_new=True)


@pytest.mark.usefixtures("two_cores")
@pytest.mark.parametrize("stage", ["reasoning_rl", "agentic_rl"])
@pytest.mark.parametrize(
    "loss",
    [
        name
        for name, function in vars(losses).items()
        if getattr(function, "__module__", "") == losses.__name__ and name[0] != "_"
    ],
)
def test_every_built_in_loss_passes_its_trial_with_its_own_settings(stage, loss):
    good = recipe("quickstart", f"stages.{stage}.loss={{path='longarc.algos.losses:{loss}'}}")
    check_recipe(good, is_new=True)


def offloading(stage, directory):
    settings = f"{{offloaded_layers='all', offload_directory='{directory}'}}"
    return recipe("quickstart", f"stages.{stage}.activations={settings}")


@pytest.mark.usefixtures("two_cores")
@pytest.mark.parametrize("stage", ["pretrain", "sft", "reasoning_rl", "distill"])
def test_a_directory_for_activations_is_looked_at_before_the_run(stage, tmp_path, monkeypatch):
    with pytest.raises(ResourceError, match=rf"'{stage}': cannot offload activations to .*none"):
        check_recipe(offloading(stage, tmp_path / "none"), is_new=True)
    mount(monkeypatch, tmp_path, kind="ext4")
    check_recipe(offloading(stage, tmp_path), is_new=True)
    assert {path.name for path in tmp_path.iterdir()} == {"mountinfo"}
    mount(monkeypatch, tmp_path, kind="tmpfs")
    with pytest.raises(ResourceError, match=rf"'{stage}': .*is a tmpfs.*offload_directory"):
        check_recipe(offloading(stage, tmp_path), is_new=True)


def mount(monkeypatch, directory, *, kind):
    """Let a directory seem to be on a file system of some kind."""
    device = directory.stat().st_dev
    place = f"36 35 {os.major(device)}:{os.minor(device)} / {directory} rw,noatime master:1"
    (directory / "mountinfo").write_text(f"{place} - {kind} /dev/root rw\n")
    monkeypatch.setattr(offload, "MOUNTS", directory / "mountinfo")


@pytest.mark.usefixtures("two_cores")
def test_a_misspelt_setting_of_transformers_is_refused_before_the_run():
    pytest.importorskip("transformers")
    sizes = (
        "vocab_size=1024,hidden_size=32,num_hidden_layers=2,num_attention_heads=4,"
        "num_key_value_heads=2,max_position_embeddings=4096"
    )
    model = f"model={{family='glm4',hf_config={{{sizes}}}}}"
    text_only = "stages={pretrain={kind='pretrain',num_steps=1}}"
    check_recipe(recipe("smoke", model, text_only), is_new=True)
    with pytest.raises(ConfigError, match="did you mean attention_bias"):
        check_recipe(
            recipe("smoke", model, text_only, "model.hf_config.atention_bias=true"), is_new=True
        )
