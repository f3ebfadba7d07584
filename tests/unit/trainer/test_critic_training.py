"""The critic's part of a step, beside a policy and before one."""

import math

import numpy as np
import pytest
import torch
from trainer_fixtures import (
    TINY,
    TINY_LLAMA,
    make_batch,
    make_group,
    make_segment,
    make_trajectory,
    random_batch,
    tiny_model,
)

from longarc.algos import losses
from longarc.algos.advantages import group_advantages
from longarc.config.rollout import OverlongConfig
from longarc.config.training import ActivationConfig, OptimizerConfig
from longarc.errors import CheckpointError, ConfigError, ContractError
from longarc.models.critic import Critic
from longarc.models.layout import Layout
from longarc.records.metric import combine
from longarc.records.outcome import Outcome
from longarc.records.segment import SegmentKind
from longarc.trainer.credit import train_items
from longarc.trainer.critic import CriticLearner, CriticSettings
from longarc.trainer.data_parallel import GradientPool
from longarc.trainer.gradients import in_this_process
from longarc.trainer.optim import MuonAdamW
from longarc.trainer.policy import PolicySettings, PolicyTrainer
from longarc.trainer.update import weights_sha256
from longarc.trainer.value_credit import GaeSettings
from longarc.trainer.value_trainer import ValueTrainer

ADAMW = OptimizerConfig(lr=1e-2, use_muon=False, grad_clip=1e9, weight_decay=0.0)


@pytest.fixture(scope="module")
def pool():
    pool = GradientPool(2)
    pool.start()
    yield pool
    pool.close()


def tiny_critic(*, seed=5, dtype=torch.float32, config=TINY):
    """A critic that has an opinion already."""
    critic = Critic(tiny_model(seed=seed, dtype=dtype, config=config))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        critic.value_head.weight.normal_(std=0.2, generator=generator)
    return critic


def critic_settings(**changes):
    values = {"optimizer": ADAMW, "num_steps": 10, "micro_batch_tokens": 4096}
    return CriticSettings(**(values | changes))


def learner(*, critic=None, gradients=in_this_process, dtype=torch.float32, **changes):
    return CriticLearner(
        critic or tiny_critic(dtype=dtype),
        critic_settings(**changes),
        gradients=gradients,
        is_beside=False,
    )


def items_of(batch, *, reduction="token_mean"):
    return train_items(batch, reduction=reduction, advantage_fn=None)


def make_trainer(
    tmp_path, *, gradients=in_this_process, dtype=torch.float32, critic=None, **changes
):
    settings = {name: changes.pop(name) for name in ("overlong", "activations") if name in changes}
    micro_batch_tokens = changes.get("micro_batch_tokens", 4096)
    return PolicyTrainer(
        tiny_model(dtype=dtype),
        PolicySettings(
            optimizer=ADAMW,
            num_steps=10,
            micro_batch_tokens=micro_batch_tokens,
            critic=critic_settings(**changes),
            **settings,
        ),
        loss=losses.double_sided,
        publish_directory=str(tmp_path),
        advantage_fn=critic or tiny_critic(dtype=dtype),
        gradients=gradients,
        clock=lambda: 0.0,
    )


def value_trainer(tmp_path, *, seed=5, overlong=None, **changes):
    return ValueTrainer(
        tiny_model(),
        tiny_critic(seed=seed),
        critic_settings(**changes),
        overlong=overlong,
        publish_directory=str(tmp_path),
        policy_version=3,
        clock=lambda: 0.0,
    )


def values_alone(critic, segment):
    """V of the trained tokens of a segment that stands alone."""
    ids = torch.tensor(segment.token_ids)
    positions = torch.tensor(segment.train_mask).nonzero()[:, 0]
    return critic(ids, Layout.documents([len(ids)]), positions - 1, attention="sparse")


def state(module):
    return {name: value.clone() for name, value in module.state_dict().items()}


def moved(before, module):
    return {
        name for name, value in module.state_dict().items() if not torch.equal(before[name], value)
    }


def one_answer(
    *, name="a", reward=1.0, outcome=Outcome.COMPLETED, prompt=range(20), answer=(30, 31, 32)
):
    segment = make_segment(tuple(prompt), answer, [-4.0] * len(answer))
    return make_trajectory([segment], name=name, reward=reward, outcome=outcome)


def batch_of(*trajectories, step=0, version=0):
    groups = [make_group([trajectory], name=f"g{i}") for i, trajectory in enumerate(trajectories)]
    return make_batch(groups, step=step, version=version)


# Values


@pytest.mark.parametrize("micro_batch_tokens", [4096, 40])
def test_values_of_packed_segments_are_those_of_each_alone(micro_batch_tokens):
    critic = tiny_critic(dtype=torch.float64)
    items = items_of(random_batch())
    expected = [values_alone(critic, item.segment).detach().numpy() for item in items]
    critique = learner(critic=critic, micro_batch_tokens=micro_batch_tokens).step(items, 0)
    for item, values, own in zip(items, critique.values, expected, strict=True):
        trained = np.flatnonzero(item.segment.train_mask)
        assert values[trained] == pytest.approx(own, abs=1e-12)
        assert not np.delete(values, trained).any()
        assert len(values) == len(item.segment.token_ids)


def test_the_value_of_an_action_has_seen_the_observation_before_it():
    critic = tiny_critic()
    prompt, first, seen = tuple(range(20)), (30, 31), (40, 41)
    values = []
    for observation in (seen, (50, 51)):
        segment = make_segment((*prompt, *first, *observation), (33,), [-4.0])
        trajectory = make_trajectory([segment], name="a", reward=1.0)
        items = items_of(batch_of(trajectory))
        values.append(
            learner(
                critic=critic, updates_per_step=1, optimizer=ADAMW.model_copy(update={"lr": 1e-30})
            )
            .step(items, 0)
            .values[0][24]
        )
    assert values[0] != values[1]


def test_a_state_that_a_limit_ended_is_valued_behind_its_last_token():
    critic = tiny_critic(dtype=torch.float64)
    cut = one_answer(outcome=Outcome.TRUNCATED_TOKENS, reward=0.0)
    ids = torch.tensor(cut.segments[0].token_ids)
    behind = critic(ids, Layout.documents([23]), torch.tensor([22]), attention="sparse").item()
    gae = GaeSettings(bootstraps_truncated=True)
    critique = learner(critic=critic, gae=gae).step(items_of(batch_of(cut)), 0)
    assert critique.returns[0][20:] == pytest.approx([behind] * 3, abs=1e-12)
    assert len(critique.values[0]) == len(critique.returns[0]) == 23


# Updates


@pytest.mark.parametrize("reduction", ["token_mean", "sequence_mean"])
@pytest.mark.parametrize("micro_batch_tokens", [4096, 40])
def test_k_updates_are_k_steps_on_the_squared_error_of_each_segment_alone(
    reduction, micro_batch_tokens
):
    critic, reference = tiny_critic(dtype=torch.float64), tiny_critic(dtype=torch.float64)
    items = items_of(random_batch(), reduction=reduction)
    own = learner(
        critic=critic, clip=None, updates_per_step=3, micro_batch_tokens=micro_batch_tokens
    )
    critique = own.step(items, 0)

    for name, parameter in reference.named_parameters():
        parameter.requires_grad_(
            (".mlp." in name and not name.endswith("mlp.gate.weight")) or "value_head" in name
        )
    optimizer = MuonAdamW(reference, TINY, ADAMW)
    norms, first_loss = [], None
    for _ in range(3):
        optimizer.zero_grad()
        total, weight = torch.zeros((), dtype=torch.float64), 0.0
        for item in items:
            values = values_alone(reference, item.segment)
            total = total + item.token_weight * (values - item.trajectory.reward).square().sum()
            weight += item.token_weight * len(values)
        (total / weight).backward()
        first_loss = (total / weight).item() if first_loss is None else first_loss
        grads = [p.grad.flatten() for p in optimizer.parameters if p.grad is not None]
        norms.append(torch.cat(grads).norm().item())
        optimizer.step(1e-2)
    for name, value in reference.state_dict().items():
        torch.testing.assert_close(critic.state_dict()[name], value, rtol=0, atol=1e-9, msg=name)
    values = combine(critique.metrics)
    assert values["loss/value"] == pytest.approx(first_loss, rel=1e-9)
    assert values["grad/critic_norm"] == pytest.approx(sum(norms) / 3, rel=1e-7)
    assert values["loss/value_last_update"] < values["loss/value"]


def test_only_the_projections_of_feed_forward_layers_and_the_head_move():
    critic = tiny_critic()
    before = state(critic)
    decay = OptimizerConfig(lr=1e-2, weight_decay=0.5)
    learner(critic=critic, optimizer=decay).step(items_of(random_batch()), 0)
    names = moved(before, critic)
    assert {"value_head.weight", "value_head.bias"} <= names
    assert any("experts.down_proj" in name for name in names)
    assert any("shared_experts" in name for name in names)
    assert all(".mlp." in name or name.startswith("value_head") for name in names)
    assert not any(name.endswith("mlp.gate.weight") for name in names)


def test_everything_but_the_indexer_moves_where_that_is_asked_for():
    critic = tiny_critic()
    before = state(critic)
    learner(critic=critic, trains="all").step(items_of(random_batch()), 0)
    names = moved(before, critic)
    assert any("self_attn" in name for name in names)
    assert any(name.endswith("mlp.gate.weight") for name in names)
    assert not any("indexer" in name for name in names)


def test_a_critic_without_experts_trains_its_dense_feed_forward_layers():
    critic = tiny_critic(config=TINY_LLAMA)
    before = state(critic)
    learner(critic=critic, attention="dense").step(items_of(random_batch()), 0)
    names = moved(before, critic)
    assert any("mlp.down_proj" in name for name in names)
    assert not any("self_attn" in name or "embed" in name for name in names)


def test_a_clip_stops_values_that_have_moved_far_enough():
    fast = OptimizerConfig(lr=0.05, use_muon=False, weight_decay=0.0)
    metrics = {}
    for clip in (None, 0.01):
        own = learner(clip=clip, updates_per_step=6, optimizer=fast)
        metrics[clip] = combine(own.step(items_of(random_batch()), 0).metrics)
    assert metrics[0.01]["critic/clipped_frac"] > 0.3
    assert "critic/clipped_frac" not in metrics[None]
    assert metrics[None]["loss/value_last_update"] < metrics[0.01]["loss/value_last_update"]


def test_a_critic_that_sees_the_same_rollouts_again_explains_them():
    own = learner(optimizer=OptimizerConfig(lr=5e-3, weight_decay=0.0), clip=None)
    explained = [
        combine(own.step(items_of(random_batch()), step).metrics)["critic/explained_variance"]
        for step in range(25)
    ]
    assert explained[0] < 0.1
    assert explained[-1] > 0.8


def test_the_rate_follows_the_schedule_of_the_stage():
    falling = OptimizerConfig(lr=1e-2, schedule="linear", min_lr_frac=0.0, warmup_steps=2)
    own = learner(optimizer=falling)
    rates = [
        combine(own.step(items_of(random_batch()), step).metrics)["train/critic_lr"]
        for step in (0, 1, 9)
    ]
    assert rates[0] == pytest.approx(5e-3)
    assert rates[1] == pytest.approx(1e-2)
    assert rates[2] < 2e-3


# What is reported


def test_values_returns_and_advantages_are_described():
    batch = batch_of(one_answer(reward=1.0), one_answer(name="b", reward=0.0, answer=(40,)))
    critique = learner(gae=GaeSettings(alpha=None, lam=1.0)).step(items_of(batch), 0)
    values = combine(critique.metrics)
    assert values["return/mean"] == pytest.approx(0.75)
    assert values["return/std"] == pytest.approx(math.sqrt(3) / 4)
    assert (values["return/min"], values["return/max"]) == (0.0, 1.0)
    tokens = np.concatenate([critique.values[0][20:], critique.values[1][20:]])
    targets = np.array([1.0, 1.0, 1.0, 0.0])
    assert values["critic/value_mean"] == pytest.approx(tokens.mean())
    assert values["advantage/mean"] == pytest.approx((targets - tokens).mean())
    assert values["advantage/max_abs"] == pytest.approx(np.abs(targets - tokens).max())
    expected = 1 - (targets - tokens).var() / targets.var()
    assert values["critic/explained_variance"] == pytest.approx(expected)


def test_returns_that_are_all_alike_have_nothing_to_explain():
    values = combine(learner().step(items_of(batch_of(one_answer())), 0).metrics)
    assert "critic/explained_variance" not in values
    assert values["return/std"] == 0.0


def test_segments_of_several_kinds_are_described_apart():
    work = make_segment(tuple(range(20)), (30, 31), [-4.0, -4.0])
    summary = make_segment(tuple(range(20, 40)), (50,), [-4.0], order=1)
    object.__setattr__(summary, "kind", SegmentKind.SUMMARY)
    trajectory = make_trajectory([work, summary], name="a", reward=1.0)
    critique = learner().step(items_of(batch_of(trajectory)), 0)
    values = combine(critique.metrics)
    assert values["advantage/mean/summary"] == pytest.approx(critique.advantages[1][20])
    assert values["advantage/mean/exec"] == pytest.approx(critique.advantages[0][20:].mean())
    assert "advantage/mean/side" not in values


# Beside a policy


def test_the_policy_learns_from_the_critics_advantages_of_before_its_updates(tmp_path):
    batch = random_batch(num_groups=6, group_size=1)
    expected = learner().step(items_of(batch), 0)
    report = make_trainer(tmp_path).take_step(batch)
    for index, token_report in enumerate(report.token_reports):
        assert token_report.advantages == pytest.approx(expected.advantages[index], abs=1e-6)
        assert token_report.values == pytest.approx(expected.values[index], abs=1e-6)
    values = combine(report.metrics)
    assert values["loss/value"] == pytest.approx(combine(expected.metrics)["loss/value"])
    assert {"critic/value_mean", "return/mean", "grad/critic_norm", "loss/policy"} <= set(values)


def test_advantages_of_one_step_are_those_of_each_token(tmp_path):
    trainer = make_trainer(tmp_path, gae=GaeSettings(alpha=None, lam=0.5))
    report = trainer.take_step(batch_of(one_answer(answer=range(30, 36))))
    assert len(set(report.token_reports[0].advantages[20:])) == 6


def test_long_rollouts_lose_reward_before_the_critic_learns(tmp_path):
    trainer = make_trainer(tmp_path, overlong=OverlongConfig(max_tokens=4, cache_tokens=2))
    batch = batch_of(one_answer(), one_answer(name="b", answer=(30, 31)))
    values = combine(trainer.take_step(batch).metrics)
    assert values["return/min"] == pytest.approx(0.5)
    assert values["return/max"] == 1.0


def test_a_repeated_trajectory_counts_as_often_for_the_critic():
    results = []
    for trajectories, multiplicities in (
        ([one_answer()], [2]),
        ([one_answer(), one_answer(name="c")], None),
    ):
        critic = tiny_critic(dtype=torch.float64)
        group = make_group(
            [*trajectories, one_answer(name="b", reward=0.0, answer=(40,))],
            multiplicities=[*multiplicities, 1] if multiplicities else None,
        )
        learner(critic=critic).step(items_of(make_batch([group])), 0)
        results.append(state(critic))
    for name, value in results[0].items():
        torch.testing.assert_close(results[1][name], value, rtol=0, atol=1e-9, msg=name)


def test_the_digest_of_a_step_is_of_policy_and_critic(tmp_path):
    critic = tiny_critic()
    trainer = make_trainer(tmp_path, critic=critic)
    report = trainer.take_step(random_batch(group_size=1))
    assert (
        report.weights_sha256
        == weights_sha256(trainer.model, critic)
        != weights_sha256(trainer.model)
    )


@pytest.mark.parametrize("steps_before", [1, 2])
async def test_a_resumed_run_is_bit_identical(tmp_path, steps_before):
    batches = [random_batch(seed=s, step=s, version=s, group_size=1) for s in range(4)]
    straight = make_trainer(tmp_path)
    digests = [straight.take_step(batch).weights_sha256 for batch in batches]
    interrupted = make_trainer(tmp_path)
    for batch in batches[:steps_before]:
        interrupted.take_step(batch)
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    await interrupted.save(str(checkpoint))
    resumed = make_trainer(tmp_path, critic=tiny_critic(seed=9))
    resumed.load(str(checkpoint))
    assert [resumed.take_step(batch).weights_sha256 for batch in batches[steps_before:]] == digests[
        steps_before:
    ]


async def test_a_checkpoint_without_a_critic_is_refused(tmp_path):
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    await make_trainer(tmp_path).save(str(checkpoint))
    (checkpoint / "critic.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"has no critic\.safetensors"):
        make_trainer(tmp_path).load(str(checkpoint))


async def test_a_checkpoint_of_a_critic_that_trains_something_else_is_refused(tmp_path):
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    muon = OptimizerConfig(lr=1e-2)
    await make_trainer(tmp_path, optimizer=muon).save(str(checkpoint))
    with pytest.raises(CheckpointError, match="optimizer state does not fit"):
        make_trainer(tmp_path, optimizer=muon, trains="all").load(str(checkpoint))


@pytest.mark.parametrize("given", ["critic", "settings"])
def test_a_critic_and_its_settings_come_together(tmp_path, given):
    settings = PolicySettings(
        optimizer=ADAMW,
        num_steps=10,
        micro_batch_tokens=4096,
        critic=critic_settings() if given == "settings" else None,
    )
    with pytest.raises(ContractError, match="given together or not at all"):
        PolicyTrainer(
            tiny_model(),
            settings,
            loss=losses.double_sided,
            publish_directory=str(tmp_path),
            advantage_fn=tiny_critic() if given == "critic" else group_advantages,
        )


def test_recomputing_changes_no_bit(tmp_path):
    digests = []
    for activations in (ActivationConfig(), ActivationConfig(recomputed_layers="all")):
        critic = tiny_critic()
        learner(critic=critic, activations=activations).step(items_of(random_batch()), 0)
        digests.append(weights_sha256(critic))
    assert digests[0] == digests[1]


# Two processes


@pytest.mark.parametrize("count", [6, 1], ids=["two shards", "an empty shard"])
def test_two_processes_compute_what_one_does(pool, tmp_path, count):
    results = []
    for gradients in (in_this_process, pool.open):
        critic = tiny_critic(dtype=torch.float64)
        trainer = make_trainer(
            tmp_path, gradients=gradients, dtype=torch.float64, critic=critic, micro_batch_tokens=60
        )
        steps = [
            random_batch(seed=s, step=s, version=s, num_groups=count, group_size=1) for s in (0, 1)
        ]
        reports = [trainer.take_step(batch) for batch in steps]
        results.append(
            (reports, state(trainer.model) | {f"critic.{n}": v for n, v in state(critic).items()})
        )
    (reports, tensors), (others, other_tensors) = results
    for name, value in tensors.items():
        torch.testing.assert_close(other_tensors[name], value, rtol=0, atol=1e-9, msg=name)
    for one, two in zip(reports, others, strict=True):
        assert combine(two.metrics) == pytest.approx(combine(one.metrics), rel=1e-9, abs=1e-12)
        for expected, token_report in zip(one.token_reports, two.token_reports, strict=True):
            assert token_report.values == pytest.approx(expected.values, abs=1e-12)
            assert token_report.advantages == pytest.approx(expected.advantages, abs=1e-12)


def test_segments_of_a_rollout_meet_that_were_valued_in_two_processes(pool):
    """Two segments that share nothing are valued by two processes, and credited as one rollout."""
    first = make_segment([1] * 20, (5, 6, 7), [-4.0] * 3)
    second = make_segment([2] * 20, (8, 9), [-4.0] * 2, order=1)
    trajectory = make_trajectory([first, second], name="a", reward=1.0)
    critiques = []
    for gradients in (in_this_process, pool.open):
        own = learner(critic=tiny_critic(dtype=torch.float64), gradients=gradients)
        critiques.append(own.step(items_of(batch_of(trajectory)), 0))
    for left, right in zip(critiques[0].advantages, critiques[1].advantages, strict=True):
        assert right == pytest.approx(left, abs=1e-12)
    # lambda is 1 - 1 / (1.5 * 5): the first segment's last token is two trained tokens from the end.
    lam = 1 - 1 / 7.5
    last = critiques[0].values[0][22]
    assert critiques[0].advantages[0][22] == pytest.approx(lam**2 * (1.0 - last))


def test_steps_of_two_processes_are_bit_identical_every_time(pool, tmp_path):
    digests = [
        make_trainer(tmp_path, gradients=pool.open).take_step(random_batch()).weights_sha256
        for _ in range(2)
    ]
    assert digests[0] == digests[1]


def test_the_pool_forgets_what_is_not_kept_beside(pool):
    first = learner(gradients=pool.open)
    learner(gradients=pool.open)
    with pytest.raises(ContractError, match="was forgotten when another one was opened"):
        first.step(items_of(random_batch(group_size=1)), 0)


# What is refused


@pytest.mark.parametrize("where", ["here", "in two processes"])
def test_a_value_that_is_not_a_number_names_the_trajectory(pool, where):
    critic = tiny_critic()
    with torch.no_grad():
        critic.value_head.bias.fill_(math.inf)
    own = learner(critic=critic, gradients=pool.open if where != "here" else in_this_process)
    with pytest.raises(
        ContractError, match="trajectory a: the critic's value of token 20 in segment 0 is inf"
    ):
        own.step(items_of(batch_of(one_answer())), 0)


def test_a_reward_that_is_not_a_number_names_the_trajectory():
    with pytest.raises(
        ContractError, match="trajectory a: the critic's return of token 20 in segment 0 is nan"
    ):
        learner().step(items_of(batch_of(one_answer(reward=math.nan))), 0)


def test_a_gradient_that_overflows_is_refused_and_moves_nothing():
    critic = tiny_critic()
    before = state(critic)
    with pytest.raises(
        ContractError, match=r"gradient norm of the critic is (inf|nan) in step 0, update 0"
    ):
        learner(critic=critic, clip=None).step(items_of(batch_of(one_answer(reward=1e37))), 0)
    assert not moved(before, critic)


def test_a_segment_that_is_too_long_is_refused():
    with pytest.raises(ConfigError, match="more than micro_batch_tokens=16"):
        learner(micro_batch_tokens=16).step(items_of(batch_of(one_answer())), 0)


# Before a policy


def test_value_pre_training_leaves_the_policy_and_its_version_alone(tmp_path):
    trainer = value_trainer(tmp_path)
    before = state(trainer._policy)
    batch = random_batch(version=3)
    report = trainer.take_step(batch)
    assert report.policy_version == 3
    assert not moved(before, trainer._policy)
    assert report.num_trained_tokens == sum(
        t.num_trained_tokens for g in batch.groups for t in g.trajectories
    )
    assert combine(report.metrics)["train/num_tokens"] == report.num_trained_tokens
    other = value_trainer(tmp_path).take_step(random_batch(seed=1, version=3))
    assert other.weights_sha256 != report.weights_sha256


async def test_a_resumed_value_pre_training_is_bit_identical(tmp_path):
    batches = [random_batch(seed=s, step=s, version=3) for s in range(3)]
    straight = value_trainer(tmp_path)
    digests = [(await straight.step(batch)).weights_sha256 for batch in batches]
    interrupted = value_trainer(tmp_path)
    await interrupted.step(batches[0])
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    await interrupted.save(str(checkpoint))
    resumed = value_trainer(tmp_path, seed=8)
    resumed.load(str(checkpoint))
    assert [(await resumed.step(batch)).weights_sha256 for batch in batches[1:]] == digests[1:]


async def test_what_value_pre_training_publishes_is_the_policy(tmp_path):
    trainer = value_trainer(tmp_path)
    source = await trainer.publish()
    trainer.take_step(random_batch(version=3))
    assert (await trainer.publish()).sha256 == source.sha256


def test_a_batch_of_another_policy_is_refused(tmp_path):
    with pytest.raises(
        ContractError, match=r"weights of version 4 but the policy .* has version 3"
    ):
        value_trainer(tmp_path).take_step(random_batch(version=4))


def test_values_are_learned_of_what_is_left_of_a_reward_behind_its_length(tmp_path):
    overlong = OverlongConfig(max_tokens=4, cache_tokens=2)
    for limit, left in ((None, 1.0), (overlong, 0.5)):  # of an answer of 3 tokens
        batch = batch_of(one_answer(reward=1.0), version=3)
        report = value_trainer(tmp_path, overlong=limit).take_step(batch)
        assert combine(report.metrics)["return/mean"] == pytest.approx(left)
