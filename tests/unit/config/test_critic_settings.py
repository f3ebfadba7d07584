"""Settings of critics: what an algorithm needs is there, and what has no effect is refused."""

import copy

import pytest

from longarc.config.critic import CriticConfig, GaeConfig
from longarc.config.loader import validated
from longarc.config.recipe import Recipe
from longarc.errors import ConfigError

LOOP = {"num_steps": 4, "group_size": 1, "dynamic_sampling": False, "max_concurrent_rollouts": 8}
RECIPE = {
    "name": "r",
    "engine": {"max_running": 8, "max_waiting": 8},
    "tasks": {"t": {"path": "a.b:C"}},
    "stages": {
        "pretrain": {"kind": "pretrain", "num_steps": 1},
        "values": {"kind": "value_pretrain", "tasks": {"t": {}}, "loop": LOOP},
        "sao": {
            "kind": "agentic_rl",
            "tasks": {"t": {}},
            "loop": LOOP,
            "advantage": "gae",
            "critic": {"start": "values"},
        },
    },
}


def read(*changes: tuple[str, object]) -> Recipe:
    tree = copy.deepcopy(RECIPE)
    for key, value in changes:
        *path, last = key.split(".")
        node = tree
        for part in path:
            node = node.setdefault(part, {})
        if value is None:
            del node[last]
        else:
            node[last] = value
    return validated(Recipe, tree, source="recipe")


def test_the_recipe_as_it_stands_is_accepted_with_the_published_defaults():
    recipe = read()
    critic = recipe.stages["sao"].critic
    assert (critic.updates_per_step, critic.trains, critic.gamma) == (2, "feed_forward", 1.0)
    assert recipe.stages["sao"].gae is None
    assert GaeConfig().length_alpha == 1.5
    assert recipe.stages["values"].critic == CriticConfig()


def test_a_critic_may_go_on_from_another_rl_stage():
    other = copy.deepcopy(RECIPE["stages"]["sao"])
    recipe = read(("stages.more", other | {"critic": {"start": "sao"}}))
    assert recipe.stages["more"].critic.start == "sao"


@pytest.mark.parametrize("loss", ["double_sided", "icepop"])
def test_groups_may_have_a_critic_too(loss):
    read(
        ("stages.sao.loop.group_size", 4),
        ("stages.sao.loss", {"path": f"longarc.algos.losses:{loss}"}),
    )


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("stages.sao.critic", None, r'advantage="gae" needs the values of a critic.*\[critic\]'),
        ("stages.sao.advantage", "running_mean", r'critic has no effect with advantage="runn'),
        ("stages.sao.critic.gamma", 1.01, r"critic.gamma = 1.01: .*less than or equal to 1"),
        ("stages.sao.critic.gamma", -0.1, r"critic.gamma = -0.1: .*greater than or equal to 0"),
        ("stages.sao.gae", {"lam": 1.5}, r"gae.lam = 1.5: .*less than or equal to 1"),
        ("stages.sao.gae", {"lam": -1}, r"gae.lam = -1: .*greater than or equal to 0"),
        ("stages.sao.gae", {"alpha": 0}, r"gae.alpha = 0: .*greater than 0"),
        ("stages.sao.gae", {"alpha": 1.5, "lam": 0.9}, r"alpha=1.5 and lam=0.9 both say"),
        (
            "stages.sao.gae",
            {"lam": 0.9, "lambda_scope": "segment"},
            r'lambda_scope="segment" has no effect with lam=0.9',
        ),
        ("stages.sao.critic.updates_per_step", 0, r"updates_per_step = 0: .*greater than or eq"),
        ("stages.sao.critic.clip", 0, r"critic.clip = 0: .*greater than 0"),
        ("stages.sao.critic.trains", "attention", r"critic.trains = 'attention'"),
        (
            "stages.sao.critic.optimizer",
            {"warmup_steps": 5},
            r"critic: optimizer.warmup_steps=5 is longer than the stage of 4",
        ),
        (
            "stages.values.critic",
            {"optimizer": {"warmup_steps": 5}},
            r"critic: optimizer.warmup_steps=5 is longer",
        ),
        (
            "stages.sao.critic.start",
            "pretrain",
            r"start='pretrain' is no stage before it with a critic; there are \['values'\]",
        ),
        ("stages.sao.critic.start", "sao", r"start='sao' is no stage before it with a critic"),
        ("stages.values.critic", {"start": "sao"}, r"start='sao' is no stage before it.*\[\]"),
        ("stages.values.loop.dynamic_sampling", True, r"dynamic_sampling|group_size"),
        ("stages.values.loop", {**LOOP, "group_size": 4}, None),
        (
            "stages.values.loop",
            {**LOOP, "group_size": 4, "dynamic_sampling": True},
            r"dynamic_sampling=True.*would learn that what is always solved",
        ),
        (
            "stages.values.loop",
            {**LOOP, "group_size": 4, "max_mean_reward": 0.9},
            r"max_mean_reward=0.9 drop groups by their rewards",
        ),
        (
            "stages.values.loop",
            {**LOOP, "push_every_steps": 2, "max_lag_steps": 1},
            r"push_every_steps=2 have no effect: no weights are pushed",
        ),
        (
            "stages.values.loop.reset_optimizer_on_push",
            True,
            r"reset_optimizer_on_push=True.*have no effect",
        ),
        ("stages.values.rollout", {"temperature": 0}, r"temperature=0 .*above 0"),
        (
            "stages.values.rollout",
            {"routing_replay": "experts"},
            r"routing_replay='experts' has no effect: the policy is not computed",
        ),
        ("stages.values.loss", {"path": "a.b:c"}, r"loss"),
        ("stages.values.tasks", {"u": {}}, r"'values' uses task families \['u'\]"),
        ("stages.values.loop.max_concurrent_rollouts", 17, r"'values': .*rollouts=17.*=8"),
        ("stages.values.rollout", {"max_context_tokens": 5000}, r"'values'.*=5000.*=4096"),
    ],
)
def test_what_cannot_be_is_refused_with_its_values_and_the_fix(key, value, message):
    if message is None:
        read((key, value))
        return
    with pytest.raises(ConfigError, match=message):
        read((key, value))


def test_settings_of_gae_without_gae_have_no_effect():
    with pytest.raises(ConfigError, match=r'gae has no effect with advantage="running_mean"'):
        read(
            ("stages.sao.critic", None),
            ("stages.sao.advantage", "running_mean"),
            ("stages.sao.gae", {"lam": 0.9}),
        )


@pytest.mark.parametrize(
    "stage",
    [
        {"kind": "dsa", "num_steps": 1, "warmup_steps": 1},
        {"kind": "midtrain", "num_steps": 1, "pattern": {"layers": "FSFS"}},
    ],
)
def test_a_critic_does_not_go_on_behind_another_attention(stage):
    tree = copy.deepcopy(RECIPE)
    sao = tree["stages"].pop("sao")
    tree["stages"] |= {"between": stage, "sao": sao}
    with pytest.raises(ConfigError, match="stage 'between' has changed the policy's attention"):
        validated(Recipe, tree, source="recipe")


def test_a_group_of_one_is_told_of_the_critic():
    with pytest.raises(ConfigError, match=r'set advantage to "gae" with a critic'):
        read(("stages.sao.critic", None), ("stages.sao.advantage", "std"))


def test_a_clip_that_nothing_can_reach_is_refused():
    with pytest.raises(ConfigError, match=r"clip=0\.3 has no effect with updates_per_step=1"):
        read(("stages.sao.critic.updates_per_step", 1), ("stages.sao.critic.clip", 0.3))
    read(("stages.sao.critic.updates_per_step", 1))


@pytest.mark.parametrize("stage", ["values", "sao"])
def test_micro_batches_without_room_for_the_longest_rollout_are_refused(stage):
    changes = (
        (f"stages.{stage}.rollout", {"max_context_tokens": 600, "max_new_tokens": 64}),
        (f"stages.{stage}.micro_batch_tokens", 599),
    )
    with pytest.raises(
        ConfigError, match=r"micro_batch_tokens=599 has no room for a rollout of.*=600"
    ):
        read(*changes)
    read(changes[0], (f"stages.{stage}.micro_batch_tokens", 600))
