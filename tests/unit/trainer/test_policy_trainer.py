"""The policy step: what it computes, what it refuses, and what cannot change it."""

import asyncio
import hashlib
import math
import threading
from pathlib import Path

import pytest
import torch
from trainer_fixtures import (
    TINY,
    make_batch,
    make_group,
    make_segment,
    make_trajectory,
    random_batch,
    tiny_model,
)

from longarc.algos import losses
from longarc.algos.advantages import group_advantages
from longarc.algos.token_loss import TokenLoss
from longarc.config.stages import OverlongConfig
from longarc.config.training import ActivationConfig, OptimizerConfig
from longarc.errors import CheckpointError, ConfigError, ContractError, ResourceError
from longarc.models import offload
from longarc.models.fp8 import round_to_fp8
from longarc.models.hf_weights import load_weights
from longarc.models.layout import Layout
from longarc.models.projection import token_logprobs
from longarc.models.threads import set_compute_threads
from longarc.records.metric import combine
from longarc.records.outcome import Outcome
from longarc.trainer.baselines import RunningBaselines
from longarc.trainer.optim import MuonAdamW
from longarc.trainer.policy import PolicySettings, PolicyTrainer
from longarc.trainer.update import weights_sha256

ADAMW = OptimizerConfig(lr=1e-2, use_muon=False, grad_clip=1e9, weight_decay=0.0)


def make_trainer(tmp_path, *, dtype=torch.float32, loss=losses.icepop, seed=0, **changes):
    options = {k: changes.pop(k) for k in ("teachers", "advantage_fn") if k in changes}
    values = {"optimizer": OptimizerConfig(lr=1e-2), "num_steps": 10, "micro_batch_tokens": 4096}
    ticks = iter(range(1000))
    return PolicyTrainer(
        tiny_model(seed=seed, dtype=dtype),
        PolicySettings(**(values | changes)),
        loss=loss,
        publish_directory=str(tmp_path),
        clock=lambda: float(next(ticks)),
        **options,
    )


def weights(trainer):
    return {name: value.clone() for name, value in trainer.model.state_dict().items()}


def assert_same_weights(left, right, *, atol=1e-9):
    for name, value in left.items():
        torch.testing.assert_close(right[name], value, rtol=0, atol=atol, msg=name)


def grad_norm(model):
    grads = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    return torch.cat(grads).norm().item()


def score(model, token_ids, *, temperature=1.0):
    """Log-probabilities of tokens 1.. of one sequence that stands alone."""
    ids = torch.tensor(token_ids)
    hidden = model(ids, Layout.documents([len(ids)])).hidden
    return token_logprobs(hidden[:-1], model.output_weight, ids[1:], temperature=temperature)[0]


def on_policy(batch, model):
    """Replace the recorded log-probabilities by the model's own."""
    groups = []
    for group in batch.groups:
        members = []
        for trajectory in group.trajectories:
            (segment,) = trajectory.segments
            start = segment.is_sampled.index(True)
            logprobs = score(model, segment.token_ids)[start - 1 :].tolist()
            new = make_segment(segment.token_ids[:start], segment.token_ids[start:], logprobs)
            members.append(make_trajectory([new], name=trajectory.id, reward=trajectory.reward))
        groups.append(make_group(members, name=group.id))
    return make_batch(groups)


def two_answers(lengths, rewards, *, multiplicities=None, names=("a", "b")):
    prompt = tuple(range(20))
    members = [
        make_trajectory(
            [make_segment(prompt, range(30, 30 + n), [-4.0] * n)], name=name, reward=reward
        )
        for name, n, reward in zip(names, lengths, rewards, strict=True)
    ]
    return make_group(members, multiplicities=multiplicities)


# What a step computes


def test_a_step_with_shared_prompts_is_the_policy_gradient_of_each_sequence_alone(tmp_path):
    trainer = make_trainer(tmp_path, dtype=torch.float64, optimizer=ADAMW)
    reference = tiny_model(dtype=torch.float64)
    batch = on_policy(random_batch(), reference)
    report = trainer.take_step(batch)

    total, num_tokens = 0.0, 0
    for group in batch.groups:
        advantages = group_advantages([t.reward for t in group.trajectories])
        for trajectory, advantage in zip(group.trajectories, advantages, strict=True):
            (segment,) = trajectory.segments
            mask = torch.tensor(segment.train_mask[1:])
            total = total - (score(reference, segment.token_ids)[mask] * advantage).sum()
            num_tokens += int(mask.sum())
    (total / num_tokens).backward()
    for name, parameter in reference.named_parameters():
        parameter.requires_grad_("indexer" not in name)
    # AdamW's first step forgives a wrong divisor; the norm does not.
    assert combine(report.metrics)["grad/norm"] == pytest.approx(grad_norm(reference), abs=1e-9)
    MuonAdamW(reference, TINY, ADAMW).step(1e-2)
    assert_same_weights(reference.state_dict(), weights(trainer))


@pytest.mark.parametrize("reduction", ["token_mean", "sequence_mean", "segment_mean", "group_mean"])
def test_micro_batches_do_not_change_the_result(tmp_path, reduction):
    results = []
    for micro_batch_tokens in (4096, 60, 30):
        trainer = make_trainer(
            tmp_path,
            dtype=torch.float64,
            micro_batch_tokens=micro_batch_tokens,
            reduction=reduction,
            optimizer=ADAMW,
        )
        norm = combine(trainer.take_step(random_batch()).metrics)["grad/norm"]
        results.append(weights(trainer) | {"norm": torch.tensor(norm)})
    assert_same_weights(results[0], results[1])
    assert_same_weights(results[0], results[2])


EVERY_LOSS = [
    (losses.icepop, {}),
    (losses.double_sided, {}),
    (losses.ppo_clip, {}),
    (losses.behaviour_ppo, {}),
    (losses.cispo, {"eps_high": 0.01}),
    (losses.gspo, {"eps_low": 0.05, "eps_high": 0.05}),
    (losses.opsm, {"delta": 1.0}),
    (losses.truncated, {"cap": 1.02}),
    (losses.masked, {"low": 0.95, "high": 1.05}),
    (losses.masked_by_sequence, {"low": 0.8, "high": 1.2}),
    (losses.masked_by_geometric_mean, {"low": 0.95, "high": 1.05}),
]


@pytest.mark.parametrize(("loss", "settings"), EVERY_LOSS, ids=lambda x: getattr(x, "__name__", ""))
def test_no_loss_depends_on_micro_batches_and_its_settings_do_something(tmp_path, loss, settings):
    results = []
    for micro_batch_tokens, own in ((4096, settings), (30, settings), (4096, {})):
        trainer = make_trainer(
            tmp_path,
            dtype=torch.float64,
            loss=loss,
            loss_settings=own,
            micro_batch_tokens=micro_batch_tokens,
            optimizer=ADAMW,
        )
        report = trainer.take_step(random_batch(num_groups=4))
        results.append((weights(trainer), combine(report.metrics)))
    (whole, metrics), (split, others), (_, by_default) = results
    assert_same_weights(whole, split)
    for name in ("grad/norm", "loss/policy", "loss/rejected_frac"):
        assert others[name] == pytest.approx(metrics[name], abs=1e-9), name
    if settings:
        assert metrics["grad/norm"] != pytest.approx(by_default["grad/norm"], abs=1e-6)


def test_a_running_mean_goes_on_where_its_checkpoint_was_made(tmp_path):
    directory = tmp_path / "checkpoint"
    directory.mkdir()
    single = [random_batch(seed=i, num_groups=5, group_size=1, step=i, version=i) for i in range(3)]
    trainer = make_trainer(tmp_path, advantage_fn=RunningBaselines(4))
    for batch in single[:2]:
        trainer.take_step(batch)
    asyncio.run(trainer.save(str(directory)))
    expected = trainer.take_step(single[2]).weights_sha256

    resumed = make_trainer(tmp_path, advantage_fn=RunningBaselines(4), seed=1)
    resumed.load(str(directory))
    assert resumed.take_step(single[2]).weights_sha256 == expected
    forgetful = make_trainer(tmp_path, advantage_fn=RunningBaselines(4), seed=1)
    (directory / "baselines.json").write_text("{}")
    forgetful.load(str(directory))
    assert forgetful.take_step(single[2]).weights_sha256 != expected


def test_what_length_costs_is_reported(tmp_path):
    overlong = OverlongConfig(max_tokens=10, cache_tokens=8)
    trainer = make_trainer(tmp_path, overlong=overlong)
    report = trainer.take_step(make_batch([two_answers((2, 8), (1.0, 1.0))]))
    metrics = combine(report.metrics)
    assert metrics["train/length_penalty"] == pytest.approx((0 - 6 / 8) / 2)
    assert metrics["train/reward/math"] == 1.0
    assert "train/length_penalty" not in combine(
        make_trainer(tmp_path).take_step(random_batch()).metrics
    )


def test_the_same_batch_gives_bit_identical_weights(tmp_path):
    digests = [make_trainer(tmp_path).take_step(random_batch()).weights_sha256 for _ in range(2)]
    assert digests[0] == digests[1]


@pytest.mark.parametrize(("reduction", "loss"), [("token_mean", 0.6), ("sequence_mean", 0.0)])
@pytest.mark.parametrize("micro_batch_tokens", [4096, 28])
def test_the_mean_is_over_the_tokens_or_the_trajectories_of_the_whole_step(
    tmp_path, reduction, loss, micro_batch_tokens
):
    trainer = make_trainer(
        tmp_path,
        loss=losses.ppo_clip,
        reduction=reduction,
        micro_batch_tokens=micro_batch_tokens,
        advantage_fn=lambda rewards: torch.tensor(rewards, dtype=torch.float64),
    )
    report = trainer.take_step(make_batch([two_answers((2, 8), (1.0, -1.0))]))
    assert combine(report.metrics)["loss/policy"] == pytest.approx(loss, abs=1e-6)


@pytest.mark.parametrize("reduction", ["token_mean", "sequence_mean"])
def test_a_repeated_member_counts_as_if_it_stood_there_twice(tmp_path, reduction):
    results = []
    for group in (
        two_answers((3, 5), (1.0, 0.0), multiplicities=(2, 1)),
        make_group(
            [
                *two_answers((3, 5), (1.0, 0.0)).trajectories,
                two_answers((3, 5), (1.0, 0.0), names=("c", "d")).trajectories[0],
            ]
        ),
    ):
        trainer = make_trainer(tmp_path, dtype=torch.float64, optimizer=ADAMW, reduction=reduction)
        norm = combine(trainer.take_step(make_batch([group])).metrics)["grad/norm"]
        results.append(weights(trainer) | {"norm": torch.tensor(norm)})
    assert_same_weights(*results)


def test_groups_are_normalised_by_themselves(tmp_path):
    trainer = make_trainer(tmp_path, num_token_reports=4)
    easy = two_answers((2, 2), (10.0, 11.0))
    hard = two_answers((2, 2), (0.0, 1.0), names=("c", "d"))
    report = trainer.take_step(make_batch([easy, hard]))
    last = [r.advantages[-1] for r in report.token_reports]
    assert last == pytest.approx([-0.7071, 0.7071, -0.7071, 0.7071], abs=1e-3)


def test_all_segments_of_a_trajectory_get_its_advantage_and_shared_history_is_context(tmp_path):
    first = make_segment(range(20), (30, 31), [-4.0, -4.0])
    second = make_segment((*range(20), 30, 31, 40), (50,), [-4.0], order=1)
    long = make_trajectory([first, second], name="long", reward=1.0)
    short = make_trajectory([make_segment(range(20), (60,), [-4.0])], name="short", reward=0.0)
    trainer = make_trainer(tmp_path, reduction="sequence_mean")
    report = trainer.take_step(make_batch([make_group([long, short])]))
    assert report.num_trained_tokens == 4
    assert [r.segment_order for r in report.token_reports] == [0, 1, 0]
    assert report.token_reports[1].advantages[:-1] == (0.0,) * 23
    assert report.token_reports[0].advantages[-1] == report.token_reports[1].advantages[-1] > 0


def test_a_segment_without_trained_tokens_is_left_out(tmp_path):
    side = make_segment(range(25), (), [], order=1)
    work = make_segment(range(20), (30, 31), [-4.0, -4.0])
    member = make_trajectory([side, work], name="a", reward=1.0)
    other = make_trajectory([make_segment(range(20), (60,), [-4.0])], name="b", reward=0.0)
    report = make_trainer(tmp_path).take_step(make_batch([make_group([member, other])]))
    assert [(r.trajectory_id, r.segment_order) for r in report.token_reports] == [
        ("a", 0),
        ("b", 0),
    ]


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_logprobs_are_those_of_the_sampled_distribution_before_the_step(tmp_path, temperature):
    expected = score(tiny_model(), (*range(20), 30, 31), temperature=temperature)[-2:]
    trainer = make_trainer(tmp_path, temperature=temperature)
    report = trainer.take_step(make_batch([two_answers((2, 3), (1.0, 0.0))]))
    got = report.token_reports[0].policy_logprobs
    assert got[:20] == (0.0,) * 20
    assert got[20:] == pytest.approx(expected.tolist(), abs=1e-5)


def test_an_engine_that_agrees_has_no_mismatch_and_one_that_does_not_is_measured(tmp_path):
    batch = on_policy(random_batch(), tiny_model())
    exact = combine(make_trainer(tmp_path).take_step(batch).metrics)
    assert exact["mismatch/max_abs_log_ratio"] < 1e-5
    assert exact["ratio/p50"] == pytest.approx(1.0, abs=1e-4)

    off = combine(make_trainer(tmp_path).take_step(random_batch()).metrics)
    assert off["mismatch/max_abs_log_ratio"] > off["mismatch/mean_abs_log_ratio"] > 0.01
    assert off["mismatch/k3_nats"] > 1e-4 > 1e-9 > exact["mismatch/k3_nats"] >= 0


def test_rollouts_in_fp8_show_in_the_mismatch(tmp_path):
    rounded = tiny_model()
    round_to_fp8(rounded)
    values = combine(make_trainer(tmp_path).take_step(on_policy(random_batch(), rounded)).metrics)
    assert values["mismatch/mean_abs_log_ratio"] > 1e-4
    assert values["mismatch/k3_nats"] > 1e-9


def test_mismatch_is_measured_on_fresh_tokens_only_and_lag_on_all(tmp_path):
    trainer = make_trainer(tmp_path)
    trainer.policy_version = 3
    fresh = random_batch(seed=1, num_groups=1, version=3)
    old = random_batch(seed=2, num_groups=1, version=1)
    report = trainer.take_step(make_batch([*fresh.groups, *old.groups], version=3))
    values = combine(report.metrics)
    assert values["lag/max_token_steps"] == 2
    assert 0 < values["lag/mean_token_steps"] < 2
    num_fresh = sum(t.num_trained_tokens for t in fresh.groups[0].trajectories)
    assert len(report.histograms["mismatch/log_ratio"]) == num_fresh
    assert set(report.histograms["lag/steps"]) == {0.0, 2.0}

    trainer.policy_version = 9
    stale = trainer.take_step(make_batch(old.groups, version=9))
    assert "mismatch/max_abs_log_ratio" not in combine(stale.metrics)
    assert "mismatch/log_ratio" not in stale.histograms


def test_a_report_has_rewards_by_family_entropy_and_throughput(tmp_path):
    report = make_trainer(tmp_path).take_step(random_batch(families=("math", "code")))
    values = combine(report.metrics)
    assert 0 <= values["train/reward/math"] <= 1
    assert 0 <= values["train/reward/code"] <= 1
    assert 0 < values["policy/entropy_nats"] < math.log(64)
    assert (
        values["train/tokens_per_s"] == report.num_trained_tokens
    )  # the injected clock ticks once
    assert 0 <= values["loss/rejected_frac"] <= 1
    assert values["train/lr"] == 1e-2


def test_the_indexer_is_frozen_and_the_rest_moves(tmp_path):
    trainer = make_trainer(tmp_path, optimizer=OptimizerConfig(lr=1e-2, weight_decay=0.5))
    before = weights(trainer)
    trainer.take_step(random_batch())
    moved = {n for n, v in weights(trainer).items() if not torch.equal(v, before[n])}
    assert not any("indexer" in name or "bias" in name for name in moved)
    assert any("experts" in name for name in moved)
    named = trainer.model.named_parameters()
    assert not any(p.requires_grad for name, p in named if "indexer" in name)


def test_router_balancing_is_off_unless_asked_for(tmp_path):
    trainer = make_trainer(tmp_path, router_bias_rate=0.5)
    trainer.take_step(random_batch())
    assert weights(trainer)["model.layers.1.mlp.gate.e_score_correction_bias"].any()


def test_a_push_resets_the_moments_before_the_step(tmp_path):
    def second_step(*, resets_optimizer, forget):
        trainer = make_trainer(tmp_path, dtype=torch.float64)
        trainer.take_step(random_batch())
        if forget:
            trainer._optimizer.reset()
        batch = random_batch(seed=1, step=1, version=1)
        trainer.take_step(
            make_batch(batch.groups, step=1, version=1, resets_optimizer=resets_optimizer)
        )
        return weights(trainer)

    reset = second_step(resets_optimizer=True, forget=False)
    assert_same_weights(reset, second_step(resets_optimizer=False, forget=True), atol=0)
    kept = second_step(resets_optimizer=False, forget=False)
    assert not torch.equal(kept["lm_head.weight"], reset["lm_head.weight"])


def test_training_on_one_reward_makes_the_rewarded_answer_likelier(tmp_path):
    trainer = make_trainer(tmp_path, loss=losses.double_sided, optimizer=OptimizerConfig(lr=2e-3))
    logprobs = []
    for step in range(3):
        group = on_policy(make_batch([two_answers((3, 3), (1.0, 0.0))]), trainer.model).groups[0]
        report = trainer.take_step(make_batch([group], step=step, version=step))
        logprobs.append(sum(report.token_reports[0].policy_logprobs))
    assert logprobs[0] < logprobs[1] < logprobs[2]


@pytest.mark.parametrize("publishes_first", [False, True])
def test_a_trainer_keeps_its_threads_whatever_an_engine_sets_for_itself(tmp_path, publishes_first):
    seen = []

    def watching_loss(inputs):
        seen.append(torch.get_num_threads())
        return losses.ppo_clip(inputs)

    trainer = make_trainer(tmp_path, loss=watching_loss)  # this thread has 1
    if publishes_first:  # its thread is there before the engine's
        asyncio.run(trainer.publish())
    engine = threading.Thread(target=set_compute_threads, args=(2,))
    engine.start()
    engine.join()
    asyncio.run(trainer.step(random_batch()))
    assert seen == [1]


# Distillation


def test_distillation_moves_towards_the_teacher_of_each_family(tmp_path):
    teachers = {"math": tiny_model(seed=7), "code": tiny_model(seed=8)}
    trainer = make_trainer(tmp_path, teachers=teachers, optimizer=OptimizerConfig(lr=3e-3))
    batch = random_batch(num_groups=4, group_size=1, families=("math", "code"))
    report = trainer.take_step(batch)
    for token_report, family in zip(
        report.token_reports, ("math", "code", "math", "code"), strict=True
    ):
        trajectory = next(
            t for g in batch.groups for t in g.trajectories if t.id == token_report.trajectory_id
        )
        assert trajectory.family == family
        ids = trajectory.segments[0].token_ids
        gap = score(teachers[family], ids) - score(tiny_model(), ids)
        assert token_report.advantages[20:] == pytest.approx(gap[19:].tolist(), abs=1e-4)
    values = combine(report.metrics)
    assert {"distill/kl_nats", "distill/kl_nats/math", "distill/kl_nats/code"} <= values.keys()


def test_a_teacher_reads_the_families_it_teaches_and_no_other(tmp_path):
    teachers = {"math": tiny_model(seed=7), "code": tiny_model(seed=8)}
    rows = dict.fromkeys(teachers, 0)
    for family, teacher in teachers.items():

        def count(_, inputs, family=family):
            rows[family] += len(inputs[0])

        teacher.register_forward_pre_hook(count)
    trainer = make_trainer(tmp_path, teachers=teachers)
    batch = random_batch(num_groups=5, group_size=1, families=("math", "code"))
    trainer.take_step(batch)
    for family, num_rows in rows.items():
        segments = [
            s
            for g in batch.groups
            for t in g.trajectories
            for s in t.segments
            if t.family == family
        ]
        assert num_rows <= sum(len(s.token_ids) for s in segments)


def test_a_teacher_that_is_the_student_teaches_nothing(tmp_path):
    trainer = make_trainer(tmp_path, teachers={"math": tiny_model()}, optimizer=ADAMW)
    before = weights(trainer)
    report = trainer.take_step(random_batch(group_size=1))
    assert combine(report.metrics)["distill/kl_nats"] == 0.0
    assert_same_weights(before, weights(trainer), atol=0)


def test_distillation_needs_no_reward(tmp_path):
    bare = make_trajectory([make_segment(range(20), (1, 2), [-4.0, -4.0])], name="x", reward=None)
    trainer = make_trainer(tmp_path, teachers={"math": tiny_model(seed=7)})
    assert trainer.take_step(make_batch([make_group([bare])])).num_trained_tokens == 2


def test_a_family_without_a_teacher_is_refused(tmp_path):
    trainer = make_trainer(tmp_path, teachers={"math": tiny_model()})
    with pytest.raises(ConfigError, match=r"\['code'\] have no teacher"):
        trainer.take_step(random_batch(families=("code",)))


# What a step refuses


def poisoned(value, *, field):
    group = two_answers((2, 2), (1.0, 0.0))
    good, _ = group.trajectories
    if field == "behaviour":
        bad = make_trajectory(
            [make_segment(range(20), (5, 6), [-1.0, value])], name="bad", reward=0.0
        )
    else:
        bad = make_trajectory(
            [make_segment(range(20), (5, 6), [-1.0, -1.0])], name="bad", reward=value
        )
    return make_batch([make_group([good, bad])])


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_a_logprob_that_is_not_a_number_names_the_trajectory_and_token(tmp_path, value):
    trainer = make_trainer(tmp_path)
    before = weights(trainer)
    with pytest.raises(ContractError, match="trajectory bad: behaviour_logprobs of token 21"):
        trainer.take_step(poisoned(value, field="behaviour"))
    assert_same_weights(before, weights(trainer), atol=0)
    assert trainer.policy_version == 0


def test_a_reward_that_is_not_a_number_names_a_trajectory_of_its_group(tmp_path):
    with pytest.raises(ContractError, match="advantages of token 20"):
        make_trainer(tmp_path).take_step(poisoned(math.nan, field="reward"))


def test_damaged_weights_are_found_in_the_forward_pass(tmp_path):
    trainer = make_trainer(tmp_path)
    with torch.no_grad():
        trainer.model.get_parameter("model.norm.weight")[0] = math.nan
    with pytest.raises(ContractError, match="policy_logprobs of token 20"):
        trainer.take_step(random_batch())


def bad_gradient(inputs):
    """Finite loss whose gradient is infinite at the token with behaviour log-probability -4.5."""
    is_bad = inputs.behaviour_logprobs == -4.5
    gap = torch.where(is_bad, inputs.policy_logprobs - inputs.proximal_logprobs, 1.0)
    return TokenLoss(
        loss_sum=gap.sqrt().sum(),
        normaliser=inputs.token_weights.sum(),
        num_rejected=inputs.token_weights.new_zeros(()),
    )


def test_a_gradient_that_is_not_finite_names_its_trajectory(tmp_path):
    good = make_trajectory([make_segment(range(20), (1, 2), [-4.0] * 2)], name="good", reward=0.0)
    bad = make_trajectory([make_segment(range(20), (3, 4), [-4.0, -4.5])], name="bad", reward=1.0)
    trainer = make_trainer(tmp_path, loss=bad_gradient)
    before = weights(trainer)
    with pytest.raises(ContractError, match=r"gradient norm of step 0 is .* from trajectory bad"):
        trainer.take_step(make_batch([make_group([good, bad])]))
    assert_same_weights(before, weights(trainer), atol=0)


def infinite_loss(inputs):
    return TokenLoss(
        loss_sum=inputs.policy_logprobs.sum() * math.inf,
        normaliser=inputs.token_weights.sum(),
        num_rejected=inputs.token_weights.new_zeros(()),
    )


def broken_loss(inputs):
    raise IndexError("off by one")


def test_a_users_loss_that_fails_stops_the_run_with_its_reason(tmp_path):
    with pytest.raises(ContractError, match=r"the loss is .*inf.* \['rl/0/0'"):
        make_trainer(tmp_path, loss=infinite_loss).take_step(random_batch())
    with pytest.raises(ContractError, match="policy loss failed: IndexError: off by one"):
        make_trainer(tmp_path, loss=broken_loss).take_step(random_batch())


def test_a_batch_for_other_weights_is_refused(tmp_path):
    with pytest.raises(ContractError, match="version 2 but the trainer has version 0"):
        make_trainer(tmp_path).take_step(random_batch(version=2))


def test_a_batch_that_trains_nothing_is_refused(tmp_path):
    with pytest.raises(ContractError, match="no trained token"):
        make_trainer(tmp_path).take_step(make_batch([]))


@pytest.mark.parametrize("reward", [None, 0.0])
def test_an_environments_fault_is_never_trained_on(tmp_path, reward):
    segment = make_segment(range(20), (1,), [-1.0])
    crashed = make_trajectory([segment], name="c", reward=reward, outcome=Outcome.ENV_CRASHED)
    for teachers in (None, {"math": tiny_model()}):
        with pytest.raises(ContractError, match="trajectory c ended as env_crashed"):
            make_trainer(tmp_path, teachers=teachers).take_step(make_batch([make_group([crashed])]))


def test_a_trajectory_without_a_reward_is_refused(tmp_path):
    bare = make_trajectory([make_segment(range(20), (1,), [-1.0])], name="bare", reward=None)
    with pytest.raises(ContractError, match="trajectory bare has no reward"):
        make_trainer(tmp_path).take_step(make_batch([make_group([bare])]))


@pytest.mark.parametrize("multiplicities", [(1,), (1, 0)])
def test_a_group_with_wrong_multiplicities_is_refused(tmp_path, multiplicities):
    group = two_answers((2, 2), (1.0, 0.0), multiplicities=multiplicities)
    with pytest.raises(ContractError, match="multiplicities"):
        make_trainer(tmp_path).take_step(make_batch([group]))


def test_a_segment_that_starts_with_a_trained_token_is_refused(tmp_path):
    headless = make_trajectory([make_segment((), (1, 2), [-1.0] * 2)], name="h", reward=0.0)
    with pytest.raises(ContractError, match="trajectory h: segment 0 trains on its first token"):
        make_trainer(tmp_path).take_step(make_batch([make_group([headless])]))


def test_settings_that_the_loss_does_not_take_are_refused_at_once(tmp_path):
    with pytest.raises(ConfigError, match=r"beta.*it takes"):
        make_trainer(tmp_path, loss_settings={"beta": 2.0})
    trainer = make_trainer(tmp_path, loss_settings={"low": 1.0, "high": 1.0})
    assert combine(trainer.take_step(random_batch()).metrics)["loss/rejected_frac"] == 1.0


def test_greedy_rollouts_cannot_be_trained_on(tmp_path):
    with pytest.raises(ConfigError, match="temperature=0"):
        make_trainer(tmp_path, temperature=0.0)


# Weights in and out


async def test_published_weights_are_whole_verified_and_only_the_newest_two_are_kept(tmp_path):
    trainer = make_trainer(tmp_path)
    sources = [await trainer.publish()]
    for step in range(3):
        await trainer.step(random_batch(step=step, version=step))
        sources.append(await trainer.publish())
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "weights-00000002.safetensors",
        "weights-00000003.safetensors",
    ]
    newest = Path(sources[-1].path)
    assert hashlib.sha256(newest.read_bytes()).hexdigest() == sources[-1].sha256
    reader = tiny_model(seed=5)
    load_weights(reader, newest)
    assert_same_weights(weights(trainer), reader.state_dict(), atol=0)


async def test_publishing_the_same_version_twice_keeps_its_file(tmp_path):
    trainer = make_trainer(tmp_path)
    first, second = await trainer.publish(), await trainer.publish()
    assert first == second
    assert Path(first.path).is_file()


def test_a_missing_publish_directory_is_refused_at_the_start(tmp_path):
    with pytest.raises(ResourceError, match="does not exist"):
        make_trainer(tmp_path / "nowhere")


async def test_a_disk_that_cannot_be_written_is_a_resource_error(tmp_path):
    directory = tmp_path / "gone"
    directory.mkdir()
    trainer = make_trainer(directory)
    directory.rmdir()
    with pytest.raises(ResourceError, match="cannot publish"):
        await trainer.publish()
    with pytest.raises(ResourceError, match="cannot write the checkpoint"):
        await trainer.save(str(directory))


async def test_a_resumed_run_is_bit_identical(tmp_path):
    straight = make_trainer(tmp_path)
    for step in range(3):
        report = await straight.step(random_batch(seed=step, step=step, version=step))

    interrupted = make_trainer(tmp_path)
    await interrupted.step(random_batch(seed=0))
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    await interrupted.save(str(checkpoint))
    resumed = make_trainer(tmp_path, seed=9)
    resumed.load(str(checkpoint))
    for step in (1, 2):
        again = await resumed.step(random_batch(seed=step, step=step, version=step))
    assert again.weights_sha256 == report.weights_sha256
    assert again.policy_version == 3


def test_a_checkpoint_of_another_optimizer_is_refused(tmp_path):
    trainer = make_trainer(tmp_path, optimizer=ADAMW)
    with pytest.raises(CheckpointError, match="is incomplete"):
        trainer.load(str(tmp_path))


async def test_a_cancelled_step_is_finished_before_anything_is_saved(tmp_path):
    expected = make_trainer(tmp_path).take_step(random_batch()).weights_sha256
    trainer = make_trainer(tmp_path)
    step = asyncio.create_task(trainer.step(random_batch()))
    await asyncio.sleep(0)
    step.cancel()
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    await trainer.save(str(checkpoint))
    resumed = make_trainer(tmp_path, seed=9)
    resumed.load(str(checkpoint))
    assert resumed.policy_version == 1
    assert weights_sha256(resumed.model) == expected


def test_recomputing_and_offloading_change_no_bit_of_the_weights(tmp_path, monkeypatch):
    monkeypatch.setattr(offload, "MIN_BYTES", 1)
    hashes = []
    for policy in ({}, {"recomputed_layers": 2, "offloaded_layers": "all"}):
        trainer = make_trainer(tmp_path, activations=ActivationConfig(**policy))
        hashes.append(trainer.take_step(random_batch()).weights_sha256)
    assert hashes[0] == hashes[1]
