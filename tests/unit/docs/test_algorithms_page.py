"""docs/algorithms.md says what longarc.algos has, no more and no less."""

import importlib.util
import inspect
import pkgutil
from importlib import import_module
from typing import get_args

import pytest
from pages import ROOT

import longarc.algos
from longarc.algos import losses
from longarc.algos.reductions import Reduction
from longarc.config.critic import CriticConfig, GaeConfig
from longarc.config.orchestrator import RolloutLoopConfig
from longarc.config.rollout import RolloutConfig
from longarc.config.stages import Advantage, LossConfig, RlConfig

SPEC = importlib.util.spec_from_file_location(
    "algorithms_page", ROOT / "scripts" / "algorithms_page.py"
)
algorithms_page = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(algorithms_page)
ENTRIES = [entry for entries in algorithms_page.SECTIONS.values() for entry in entries]


def test_the_page_of_algorithms_is_what_the_generator_writes():
    written = (ROOT / "docs" / "algorithms.md").read_text(encoding="utf-8")
    assert written == algorithms_page.page(), "run make docs"


def test_every_public_function_has_a_row_or_a_reason_for_none():
    rows = [f"{entry.module}.{entry.function}" for entry in ENTRIES]
    assert len(rows) == len(set(rows))
    listed = {*rows, *(n for names in algorithms_page.NOT_LISTED.values() for n in names)}
    modules = {module.name for module in pkgutil.iter_modules(longarc.algos.__path__)}
    elsewhere = set(algorithms_page.ELSEWHERE)
    assert {entry.module for entry in ENTRIES} == modules - elsewhere
    found = {
        f"{name}.{function}"
        for name in modules - elsewhere
        for function, value in vars(import_module(f"longarc.algos.{name}")).items()
        if inspect.isfunction(value)
        and value.__module__ == f"longarc.algos.{name}"
        and function[0] != "_"
    }
    assert listed == found


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: f"{entry.module}.{entry.function}")
def test_a_row_has_a_formula_a_source_and_settings_that_exist(entry):
    function = algorithms_page.function_of(entry)
    assert algorithms_page.formula(function)
    assert algorithms_page.source(function)
    for asked in entry.recipe:
        what, _, value = asked.partition(" ")
        match what:
            case "loss":
                assert callable(getattr(losses, value))
            case "advantage" if value:
                assert value in get_args(Advantage)
            case "reduction":
                assert value in get_args(Reduction)
            case "stage":
                assert value in ("distill", "mtp", "dsa", "value_pretrain")
            case key:
                owner = {
                    "loop": RolloutLoopConfig,
                    "rollout": RolloutConfig,
                    "critic": CriticConfig,
                    "gae": GaeConfig,
                }.get(key.partition(".")[0], RlConfig)
                assert key.rpartition(".")[2] in owner.model_fields


def test_a_row_names_a_test_that_imports_its_function():
    imported = algorithms_page._importers()
    missing = [
        f"{entry.module}.{entry.function}"
        for entry in ENTRIES
        if (entry.module, entry.function) not in imported
    ]
    assert missing == []


def test_recipes_can_choose_every_reduction_there_is():
    chosen = LossConfig.model_fields["reduction"].annotation
    assert get_args(chosen) == get_args(Reduction)
