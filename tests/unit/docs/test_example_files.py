"""The examples are short, satisfy their protocols, and compute what they say."""

import ast
from itertools import islice
from pathlib import Path

import pytest
import torch
from pages import ROOT

from longarc.algos.losses import double_sided
from longarc.algos.protocols import LossInputs, PolicyLoss
from longarc.config.load_object import load_object
from longarc.config.loader import load_settings
from longarc.config.recipe import Recipe
from longarc.records.message import Message, Role
from longarc.records.outcome import Outcome
from longarc.records.ports import TaskFamily
from longarc.records.trajectory import EpisodeResult

EXAMPLES = ROOT / "examples"


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch):
    monkeypatch.chdir(ROOT)


def code_lines(path: Path) -> int:
    """Lines of code: no blanks, comments or docstrings."""
    source = path.read_text(encoding="utf-8")
    tree = ast.parse(source)
    docstring = ast.get_docstring(tree, clean=False) or ""
    is_code = [line.strip() and not line.strip().startswith("#") for line in source.splitlines()]
    return sum(map(bool, is_code)) - sum(bool(line.strip()) for line in docstring.splitlines())


@pytest.mark.parametrize("name", ["own_env.py", "own_loss.py", "own_agent.py"])
def test_an_example_has_at_most_20_lines_of_code(name):
    assert 5 < code_lines(EXAMPLES / name) <= 20


@pytest.mark.parametrize("name", ["own_env.toml", "own_loss.toml", "own_agent.toml"])
def test_an_example_recipe_is_valid(name):
    recipe = load_settings(Recipe, EXAMPLES / name, overrides=[])
    assert next(iter(recipe.stages.values())).kind == "pretrain"


def test_the_walk_shows_the_recipe_as_it_is_in_ten_lines():
    recipe = (EXAMPLES / "train_claude_code.toml").read_text(encoding="utf-8")
    assert f"```toml\n{recipe}```" in (EXAMPLES / "train_claude_code.md").read_text(
        encoding="utf-8"
    )
    assert len(recipe.splitlines()) <= 10
    stages = load_settings(Recipe, EXAMPLES / "train_claude_code.toml", overrides=[]).stages
    assert [stage.kind for stage in stages.values()] == ["agentic_rl", "eval"]


def test_the_family_satisfies_its_protocol_and_a_cursor_goes_on():
    family = load_object("examples.own_env:Shout", kind=TaskFamily)
    whole = list(islice(family.tasks("train", cursor=0), 6))
    assert list(islice(family.tasks("train", cursor=4), 2)) == whole[4:]
    held_out = {task.messages for task in islice(family.tasks("test", cursor=0), 1000)}
    assert len(held_out) == 1000
    assert held_out.isdisjoint(task.messages for task in whole)


@pytest.mark.parametrize(
    ("answer", "reward"),
    [("LOUD", 1.0), ("Half LOUD", 5 / 8), ("quiet", 0.0), ("", 0.0), ("1!", 0.0)],
)
async def test_the_family_rewards_the_share_of_capitals(answer, reward):
    family = load_object("examples.own_env:Shout", kind=TaskFamily)
    task = next(family.tasks("train", cursor=0))
    messages = (*task.messages, Message(role=Role.ASSISTANT, content=answer))
    episode = EpisodeResult(outcome=Outcome.COMPLETED, messages=messages, num_turns=1)
    assert (await family.grade(task, episode)).value == pytest.approx(reward)


def inputs(policy, *, behaviour, train_mask):
    return LossInputs(
        policy_logprobs=policy,
        proximal_logprobs=policy.detach(),
        behaviour_logprobs=behaviour,
        advantages=torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64),
        train_mask=torch.tensor(train_mask),
        token_weights=torch.tensor([1.0, 0.5, 1.0], dtype=torch.float64),
        sequence_ids=torch.tensor([0, 0, 0]),
    )


def test_the_loss_is_the_policy_gradient_where_engine_and_trainer_agree():
    capped = load_object("examples.own_loss:capped", kind=PolicyLoss)
    gradients = []
    for loss in (capped, double_sided):
        policy = torch.tensor([-1.0, -2.0, -0.5], dtype=torch.float64, requires_grad=True)
        out = loss(inputs(policy, behaviour=policy.detach(), train_mask=[True] * 3))
        out.loss_sum.backward()
        assert out.normaliser.item() == 2.5
        gradients.append(policy.grad)
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-12)


def test_the_loss_caps_the_ratio_and_lets_nothing_masked_in():
    capped = load_object("examples.own_loss:capped", kind=PolicyLoss)
    policy = torch.tensor([-1.0, -2.0, float("-inf")], dtype=torch.float64, requires_grad=True)
    behaviour = torch.tensor([-3.0, -2.0, float("nan")], dtype=torch.float64)
    out = capped(inputs(policy, behaviour=behaviour, train_mask=[True, True, False]), cap=1.5)
    out.loss_sum.backward()
    # -(weight * min(ratio, cap) * advantage): e^2 is capped at 1.5; the second ratio is 1.
    torch.testing.assert_close(policy.grad, torch.tensor([-1.5, 1.0, 0.0], dtype=torch.float64))
