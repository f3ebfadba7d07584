"""Training transformers' layers: supervised and policy steps, the optimizer's rules, and what is refused."""

import asyncio

import pytest
import torch
from trainer_fixtures import make_batch, make_group, make_segment, make_trajectory

from longarc.algos import losses
from longarc.config.model import AttentionPattern
from longarc.config.training import ActivationConfig, OptimizerConfig
from longarc.errors import ConfigError, ContractError
from longarc.models import offload
from longarc.models.add_mtp import with_mtp
from longarc.models.build import build_model
from longarc.models.conversion import to_hybrid
from longarc.models.hf_weights import load_weights
from longarc.models.layout import Layout
from longarc.models.projection import token_logprobs
from longarc.records.metric import combine
from longarc.trainer.data_parallel import GradientPool
from longarc.trainer.draft_objective import DraftObjective
from longarc.trainer.optim_rules import AdamWRule, MuonRule, parameter_rule
from longarc.trainer.packing import Document
from longarc.trainer.policy import PolicySettings, PolicyTrainer
from longarc.trainer.supervised import SupervisedSettings, SupervisedTrainer
from longarc.trainer.update import weights_sha256
from transformers_cases import FAMILIES, small, spread

pytest.importorskip("transformers")
DOCUMENTS = [Document(token_ids=[(7 * i + k) % 64 for i in range(9 + 5 * k)]) for k in range(5)]


def supervised(model, *, gradients=None, **changes):
    values = {"optimizer": OptimizerConfig(lr=1e-2), "num_steps": 10, "micro_batch_tokens": 64}
    options = {} if gradients is None else {"gradients": gradients}
    settings = SupervisedSettings(**(values | {"attention": "dense"} | changes))
    return SupervisedTrainer(model, settings, **options)


def losses_of(trainer, count):
    return [combine(trainer.step(DOCUMENTS).metrics)["loss/lm_nats"] for _ in range(count)]


@pytest.mark.parametrize("family", FAMILIES)
def test_supervised_steps_lower_the_loss_and_move_every_weight(family):
    model = spread(build_model(small(family, carries_mtp="moe" in family), seed=1))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    first, *_, last = losses_of(supervised(model, router_bias_rate=1e-2), 8)
    assert 4 < first < 6  # ln 64 = 4.16
    assert last < first - 1
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]) == name.startswith("mtp."), name


def test_balancing_moves_the_router_bias_against_the_load():
    model = build_model(small("glm4_moe", n_routed_experts=4, num_experts_per_tok=1), seed=1)
    ids = torch.arange(40)
    load = model(ids, Layout.documents([40])).expert_counts[0]
    assert load.sum() == 40
    supervised(model, router_bias_rate=1e-2).step([Document(token_ids=ids.tolist())])
    bias = model.model.layers[1].mlp.gate.e_score_correction_bias
    sign = (load.float().mean() - load).sign()
    torch.testing.assert_close(bias, 1e-2 * (sign - sign.mean()))


@pytest.mark.parametrize("family", ["glm4", "glm4_moe"])
def test_recomputing_and_offloading_change_no_bit(family, monkeypatch, tmp_path):
    monkeypatch.setattr(offload, "MIN_BYTES", 1)
    monkeypatch.setattr(offload, "MOUNTS", tmp_path / "no mounts")
    hashes = set()
    for choice in ({}, {"recomputed_layers": "all"}, {"offloaded_layers": "all"}):
        trainer = supervised(
            spread(build_model(small(family), seed=1)), activations=ActivationConfig(**choice)
        )
        losses_of(trainer, 2)
        hashes.add(weights_sha256(trainer.model))
    assert len(hashes) == 1


def test_two_processes_take_the_step_of_one():
    models = [spread(build_model(small("glm4_moe"), seed=1)) for _ in range(2)]
    pool = GradientPool(2)
    try:
        alone, shared = supervised(models[0]), supervised(models[1], gradients=pool.open)
        assert losses_of(alone, 2) == pytest.approx(losses_of(shared, 2), abs=1e-5)
    finally:
        pool.close()
    for name, tensor in models[0].state_dict().items():
        torch.testing.assert_close(models[1].state_dict()[name], tensor, rtol=0, atol=2e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_policy_step_raises_what_was_rewarded_and_publishes_it(family, tmp_path):
    config = small(family, carries_mtp="moe" in family)
    model = spread(build_model(config, seed=1))
    prompt, answers = [3, 1, 4, 1, 5], [[9, 2, 6], [5, 3, 5]]

    def logprobs(of, answer):
        whole = torch.tensor([*prompt, *answer])
        with torch.no_grad():
            hidden = of(whole, Layout.documents([len(whole)])).hidden
            return token_logprobs(hidden[:-1], of.output_weight, whole[1:])[0][4:].tolist()

    before = [logprobs(model, answer) for answer in answers]
    trajectories = [
        make_trajectory([make_segment(prompt, a, b)], name=f"g/{i}", reward=1.0 - i)
        for i, (a, b) in enumerate(zip(answers, before, strict=True))
    ]
    trainer = PolicyTrainer(
        model,
        PolicySettings(
            optimizer=OptimizerConfig(lr=1e-2),
            num_steps=3,
            micro_batch_tokens=64,
            attention="dense",
        ),
        loss=losses.icepop,
        publish_directory=str(tmp_path),
    )
    report = asyncio.run(trainer.step(make_batch([make_group(trajectories)])))
    assert combine(report.metrics)["mismatch/max_abs_log_ratio"] < 1e-5
    after = [logprobs(model, answer) for answer in answers]
    assert sum(after[0]) - sum(before[0]) > sum(after[1]) - sum(before[1])
    engine_model = build_model(config, seed=9)
    load_weights(engine_model, asyncio.run(trainer.publish()).path)
    assert logprobs(engine_model, answers[0]) == after[0]


def test_muon_takes_matrices_by_head_half_and_expert():
    config = small("glm4_moe_lite")
    model = build_model(config, seed=0)
    rules = {
        name.removeprefix("model.layers.1."): parameter_rule(
            name, tuple(parameter.shape), config, use_muon=True
        )
        for name, parameter in model.named_parameters()
    }
    assert rules["self_attn.q_b_proj.weight"] == MuonRule(num_blocks=4, rows=(20,))
    assert rules["self_attn.kv_b_proj.weight"] == MuonRule(num_blocks=4, rows=(12, 10))
    assert rules["mlp.experts.gate_up_proj"] == MuonRule(num_blocks=6, rows=(16, 16))
    assert rules["mlp.experts.down_proj"] == MuonRule(num_blocks=6, rows=(32,))
    assert rules["mlp.shared_experts.up_proj.weight"] == MuonRule(num_blocks=1, rows=(16,))
    assert rules["mlp.gate.weight"] == AdamWRule(is_decayed=True, is_embedding=False)
    assert rules["lm_head.weight"] == AdamWRule(is_decayed=False, is_embedding=True)

    dense = small("glm4")
    shape = (2 * 48, 32)
    rule = parameter_rule("model.layers.0.mlp.gate_up_proj.weight", shape, dense, use_muon=True)
    assert rule == MuonRule(num_blocks=1, rows=(48, 48))
    bias = parameter_rule("model.layers.0.self_attn.q_proj.bias", (32,), dense, use_muon=True)
    assert bias == AdamWRule(is_decayed=False, is_embedding=False)


def test_what_cannot_act_on_these_layers_is_refused_where_it_is_asked_for():
    model = build_model(small("glm4_moe", carries_mtp=True), seed=0)
    ids, layout = torch.arange(9), Layout.documents([9])
    with pytest.raises(ContractError, match="int4_group_size=8 rounds routed experts of LongArc"):
        model(ids, layout, int4_group_size=8)
    with pytest.raises(
        ContractError, match="indexer_loss='sparse' trains indexers, but a glm4_moe"
    ):
        model(ids, layout, indexer_loss="sparse")
    with pytest.raises(ConfigError, match="pattern='FS' replaces attention, but the layers of a"):
        to_hybrid(model, AttentionPattern(layers="FS"))
    with pytest.raises(ConfigError, match="a glm4_moe model has no layer for multi-token"):
        with_mtp(model, seed=0)
    with pytest.raises(ContractError, match="a glm4_moe model has no MTP layer to train"):
        supervised(model, drafts=DraftObjective(loss="cross_entropy")).step(DOCUMENTS)
