"""Recipes with ``harness = ...``: read, checked before a run begins, and used where tasks are worked on."""

import pytest

from longarc.config.harness import HarnessConfig
from longarc.config.recipe import Recipe
from longarc.config.stages import TaskShare
from longarc.envs.harnesses.family import HarnessFamily
from longarc.envs.tasks.files import Files
from longarc.errors import ConfigError
from longarc.pipeline.harness import limits_of, make_harness
from longarc.pipeline.preflight import check_recipe
from longarc.pipeline.workspace import rollout_family, task_family
from longarc.records.ports import HarnessResult
from run_cases import small_recipe

FILES = "longarc.envs.tasks.files:Files"
COMMAND = {"kind": "custom", "settings": {"command": ["true"]}}


class Own:
    """A harness of the user's."""

    name = "own"

    def __init__(self, *, word: str = "") -> None:
        self.word = word
        self.shown: dict[str, str] = {}

    async def run(self, prompt, *, policy, sandbox, timeout_s) -> HarnessResult:
        raise NotImplementedError


class NotOne:
    """Has no run()."""

    name = "not one"


def recipe(harness: object, **more: object) -> Recipe:
    tree = small_recipe().model_dump()
    tree["tasks"] = {"files": {"path": FILES, "harness": harness}}
    tree["stages"]["sft"] = {"kind": "sft", "num_steps": 1, "tasks": {"files": {}}}
    tree["stages"]["rl"] = {
        "kind": "agentic_rl",
        "tasks": {"files": {}},
        "loop": {"num_steps": 1, "groups_per_step": 1, "group_size": 2},
        "rollout": {"max_context_tokens": 256},
    } | more
    return Recipe.model_validate(tree)


def test_a_harness_works_on_the_tasks_and_demonstrations_stay_the_familys_own():
    given = recipe(COMMAND)
    played = rollout_family(given, "files", TaskShare())
    assert isinstance(played, HarnessFamily)
    assert (played.name, played.harness.name) == ("files", "custom")
    assert isinstance(task_family(given, "files", TaskShare()), Files)
    assert isinstance(rollout_family(recipe(None), "files", TaskShare()), Files)
    check_recipe(given, is_new=False)


def test_a_name_is_enough_and_the_same_as_a_table():
    by_name = recipe("test_harness_families:Own").tasks["files"].harness
    assert by_name == HarnessConfig(kind="test_harness_families:Own")
    assert make_harness(by_name).name == "own"
    with_word = HarnessConfig(kind="test_harness_families:Own", settings={"word": "w"})
    assert make_harness(with_word).word == "w"


@pytest.mark.parametrize(
    ("harness", "said"),
    [
        ("claude", "is one of"),
        ({"kind": "custom", "max_requests": 0}, "max_requests"),
        ({"kind": "custom", "program": "x"}, "program"),
    ],
)
def test_settings_that_mean_nothing_are_refused_when_the_recipe_is_read(harness, said):
    with pytest.raises(ValueError, match=said):
        recipe(harness)


@pytest.mark.parametrize(
    ("harness", "said"),
    [
        ("codex", r"harness 'codex' needs .*make agent-codex"),
        ("custom", r"tasks\.files\.harness: custom with settings \{\}: TypeError.*'command'"),
        ("no_such_module:Own", "no_such_module"),
        ("test_harness_families:NotOne", "is not a Harness: it needs name, shown and run"),
    ],
)
def test_a_program_that_is_not_there_is_told_before_the_run_begins(
    harness, said, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ConfigError, match=said):
        check_recipe(recipe(harness), is_new=False)


def test_the_limits_of_a_recipe_are_those_of_the_box():
    config = HarnessConfig(
        kind="custom",
        max_requests=7,
        timeout_s=3.0,
        memory_bytes=1 << 30,
        disk_bytes=1 << 20,
        num_processes=9,
    )
    family = HarnessFamily(Files(), Own(), limits_of(config))
    task = next(family.tasks("train", cursor=0))
    env = family.open(task, sandboxes=None, seed=0)
    assert (env.max_requests, env.timeout_s) == (7, 3.0)
    assert (env.spec.memory_bytes, env.spec.disk_bytes, env.spec.num_processes) == (
        1 << 30,
        1 << 20,
        9,
    )
    assert env.spec.files == Files().workspace(task)
    assert env.inspect is None
