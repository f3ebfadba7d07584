"""The supervised step: what each mode trains, and what cannot change the result."""

import math
import random

import pytest
import torch
from trainer_fixtures import TINY, TINY_LLAMA, tiny_model

from longarc.config.training import ActivationConfig, OptimizerConfig
from longarc.errors import CheckpointError, ConfigError, ContractError
from longarc.models import offload
from longarc.models.hf_weights import load_pretrained_dir, save_pretrained_dir
from longarc.models.layout import Layout
from longarc.models.projection import token_logprobs
from longarc.records.metric import combine
from longarc.trainer.packing import Document
from longarc.trainer.supervised import SupervisedSettings, SupervisedTrainer
from longarc.trainer.update import weights_sha256


def documents(*, seed=0, count=5):
    rng = random.Random(seed)
    return [
        Document(token_ids=[rng.randrange(64) for _ in range(rng.randrange(5, 40))])
        for _ in range(count)
    ]


def make_trainer(*, dtype=torch.float32, model=None, num_update_threads=1, **changes):
    values = {
        "optimizer": OptimizerConfig(lr=1e-2),
        "num_steps": 10,
        "micro_batch_tokens": 4096,
    }
    ticks = iter(range(1000))
    return SupervisedTrainer(
        model or tiny_model(dtype=dtype),
        SupervisedSettings(**(values | changes)),
        num_update_threads=num_update_threads,
        clock=lambda: float(next(ticks)),
    )


def weights(trainer):
    return {name: value.clone() for name, value in trainer.model.state_dict().items()}


def moved(before, after):
    return {name for name, value in before.items() if not torch.equal(value, after[name])}


def test_the_loss_is_the_mean_over_trained_tokens_and_falls():
    trainer = make_trainer()
    losses = [combine(trainer.step(documents()).metrics)["loss/lm_nats"] for _ in range(8)]
    assert 3.5 < losses[0] < 5.5  # ln 64 = 4.16
    assert losses[-1] < losses[0] - 1


def test_a_report_counts_tokens_steps_and_throughput():
    trainer = make_trainer()
    report = trainer.step([Document(token_ids=range(9)), Document(token_ids=range(5))])
    values = combine(report.metrics)
    assert (report.step, report.policy_version, report.num_trained_tokens) == (0, 1, 12)
    assert values["train/num_tokens"] == 12
    assert values["train/tokens_per_s"] == 12  # the injected clock ticks once
    assert values["router/max_load"] >= 1
    assert trainer.step(documents()).step == 1


def test_experts_are_trained_as_what_int4_leaves_of_them(tmp_path):
    trainer = make_trainer(int4_group_size=8)
    rounded = tmp_path / "rounded"
    save_pretrained_dir(trainer.model, rounded, experts="int4", int4_group_size=8)
    expected = make_trainer(model=load_pretrained_dir(rounded)).step(documents())
    assert (
        combine(trainer.step(documents()).metrics)["loss/lm_nats"]
        == (combine(expected.metrics)["loss/lm_nats"])
    )
    assert (
        combine(make_trainer().step(documents()).metrics)["loss/lm_nats"]
        != (combine(expected.metrics)["loss/lm_nats"])
    )


@pytest.mark.parametrize("mode", ["lm", "indexer_warmup"])
def test_recomputing_and_offloading_change_no_bit_of_the_weights(mode, monkeypatch):
    monkeypatch.setattr(offload, "MIN_BYTES", 1)
    attention = "sparse" if mode == "lm" else "dense"
    hashes, runs = [], []
    for activations in (
        ActivationConfig(),
        ActivationConfig(recomputed_layers="all", offloaded_layers=(0,)),
    ):
        trainer = make_trainer(
            mode=mode, attention=attention, micro_batch_tokens=64, activations=activations
        )
        count = []
        trainer.model.model.layers[1].register_forward_pre_hook(lambda *_, c=count: c.append(1))
        trainer.step(documents())
        hashes.append(weights_sha256(trainer.model))
        runs.append(len(count))
    assert hashes[0] == hashes[1]
    assert runs[1] == 2 * runs[0]


@pytest.mark.parametrize(
    "changes",
    [{}, {"attention": "sparse"}, {"mode": "indexer_warmup"}],
    ids=["dense", "sparse", "warmup"],
)
def test_micro_batches_do_not_change_the_result(changes):
    results = []
    for micro_batch_tokens in (4096, 64, 39):
        optimizer = OptimizerConfig(lr=1e-2, use_muon=False, grad_clip=1e9)
        trainer = make_trainer(
            dtype=torch.float64,
            micro_batch_tokens=micro_batch_tokens,
            optimizer=optimizer,
            **changes,
        )
        norm = combine(trainer.step(documents()).metrics)["grad/norm"]
        results.append(weights(trainer) | {"norm": torch.tensor(norm)})
    for other in results[1:]:
        for name, value in results[0].items():
            torch.testing.assert_close(other[name], value, rtol=0, atol=1e-9, msg=name)


@pytest.mark.parametrize("mode", ["lm", "indexer_warmup"])
def test_two_layers_train_the_indexer_they_share_however_they_are_computed(mode, monkeypatch):
    monkeypatch.setattr(offload, "MIN_BYTES", 1)
    results = []
    for micro_batch_tokens, activations in (
        (4096, ActivationConfig()),
        (39, ActivationConfig()),
        (39, ActivationConfig(recomputed_layers=(1,), offloaded_layers="all")),
        (39, ActivationConfig(recomputed_layers=(0,), offloaded_layers=(1,))),
    ):
        config = TINY.model_copy(update={"index_topk_pattern": "FS"})
        trainer = make_trainer(
            model=tiny_model(config=config, dtype=torch.float64),
            mode=mode,
            attention="sparse" if mode == "lm" else "dense",
            micro_batch_tokens=micro_batch_tokens,
            activations=activations,
            optimizer=OptimizerConfig(lr=1e-2, use_muon=False, grad_clip=1e9),
        )
        before = weights(trainer)
        values = combine(trainer.step(documents()).metrics)
        names = {n for n in moved(before, weights(trainer)) if "indexer" in n}
        assert names == {n for n in before if n.startswith("model.layers.0.self_attn.indexer")}
        kept = {name: torch.tensor(values[name]) for name in ("grad/norm", "loss/indexer_kl_nats")}
        results.append(weights(trainer) | kept)
    for other in results[1:]:
        for name, value in results[0].items():
            torch.testing.assert_close(other[name], value, rtol=0, atol=1e-9, msg=name)
    assert all(torch.equal(results[1][name], results[2][name]) for name in results[1])


def norm_of_mean(loss_sum, count, model):
    parameters = list(model.parameters())
    grads = torch.autograd.grad(loss_sum / count, parameters, allow_unused=True)
    return torch.cat([g.flatten() for g in grads if g is not None]).norm().item()


def test_each_loss_is_divided_by_its_own_count():
    ids = list(range(20))
    model = tiny_model(dtype=torch.float64)
    packed = torch.tensor(ids[:-1]), Layout.documents([19])
    dense = model(*packed, attention="dense", indexer_loss="warmup")
    logprobs, _ = token_logprobs(dense.hidden[9:], model.output_weight, torch.tensor(ids[10:]))
    lm = norm_of_mean(-logprobs.sum(), 10, model)
    warmup = model(*packed, attention="dense", indexer_loss="warmup")
    kl = norm_of_mean(warmup.indexer_loss_sum, warmup.num_indexer_terms, model)
    sparse = model(*packed, attention="sparse", indexer_loss="sparse")
    sparse_kl = norm_of_mean(sparse.indexer_loss_sum, sparse.num_indexer_terms, model)

    def norm(**changes):
        trainer = make_trainer(dtype=torch.float64, **changes)
        document = Document(token_ids=ids, train_mask=[i >= 10 for i in ids])
        return combine(trainer.step([document]).metrics)["grad/norm"]

    assert norm() == pytest.approx(lm, rel=1e-9)
    assert norm(mode="indexer_warmup", indexer_loss_coeff=7.0) == pytest.approx(kl, rel=1e-9)
    alone = norm(attention="sparse", indexer_loss_coeff=0.0)
    both = norm(attention="sparse", indexer_loss_coeff=3.0)
    assert both == pytest.approx(math.hypot(alone, 3.0 * sparse_kl), rel=1e-9)


def test_the_same_documents_give_bit_identical_weights():
    trainers = [make_trainer(), make_trainer(), make_trainer(num_update_threads=2)]
    for trainer in trainers:
        trainer.step(documents())
    assert len({weights_sha256(trainer.model) for trainer in trainers}) == 1


def test_the_warm_up_moves_the_indexer_and_nothing_else():
    trainer = make_trainer(mode="indexer_warmup", router_bias_rate=0.5)
    before = weights(trainer)
    own = {name for name in before if "indexer" in name}
    losses = []
    for _ in range(12):
        metrics = combine(trainer.step(documents()).metrics)
        assert "loss/lm_nats" not in metrics
        assert (
            moved(before, weights(trainer)) <= own
        )  # in each step: a router's bias may swing back
        losses.append(metrics["loss/indexer_kl_nats"])
    assert moved(before, weights(trainer)) == own
    assert losses[-1] < losses[0]


def test_dense_training_and_a_coefficient_of_zero_leave_the_indexer_alone():
    for changes in ({}, {"attention": "sparse", "indexer_loss_coeff": 0.0}):
        trainer = make_trainer(optimizer=OptimizerConfig(lr=1e-2, weight_decay=0.1), **changes)
        before = weights(trainer)
        trainer.step(documents())
        names = moved(before, weights(trainer))
        assert names
        assert not any("indexer" in name for name in names)


def test_sparse_training_moves_model_and_indexer():
    trainer = make_trainer(attention="sparse")
    before = weights(trainer)
    values = combine(trainer.step(documents()).metrics)
    names = moved(before, weights(trainer))
    assert any("indexer.wk" in name for name in names)
    assert any("o_proj" in name for name in names)
    assert {"loss/lm_nats", "loss/indexer_kl_nats"} <= values.keys()


def test_router_biases_move_by_the_rate_or_not_at_all():
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    still, moving = make_trainer(router_bias_rate=0.0), make_trainer(router_bias_rate=0.5)
    for trainer in (still, moving):
        trainer.step(documents())
    assert not weights(still)[bias].any()
    assert weights(moving)[bias].abs().max() > 0.1


def test_masked_tokens_are_context_and_not_targets():
    ids = list(range(10))
    mask = [position >= 6 for position in range(10)]
    trainer = make_trainer()
    report = trainer.step([Document(token_ids=ids, train_mask=mask)])
    assert report.num_trained_tokens == 4


def test_a_model_without_experts_or_indexer_trains_too():
    trainer = make_trainer(model=tiny_model(config=TINY_LLAMA))
    losses = [combine(trainer.step(documents()).metrics)["loss/lm_nats"] for _ in range(5)]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("attention", ["dense", "sparse"])
def test_a_resumed_run_is_bit_identical(tmp_path, attention):
    straight = make_trainer(attention=attention)
    for step in range(4):
        report = straight.step(documents(seed=step))

    interrupted = make_trainer(attention=attention)
    for step in range(2):
        interrupted.step(documents(seed=step))
    interrupted.save(str(tmp_path))
    resumed = make_trainer(attention=attention, model=tiny_model(seed=99))
    resumed.load(str(tmp_path))
    for step in (2, 3):
        resumed_report = resumed.step(documents(seed=step))
    assert weights_sha256(resumed.model) == weights_sha256(straight.model)
    assert resumed_report.step == report.step
    assert resumed_report.policy_version == report.policy_version


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "trainer.json"])
@pytest.mark.parametrize("damage", ["missing", "truncated"])
def test_a_damaged_checkpoint_is_refused(tmp_path, name, damage):
    trainer = make_trainer()
    trainer.step(documents())
    trainer.save(str(tmp_path))
    path = tmp_path / name
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:5])
    with pytest.raises(CheckpointError, match="checkpoint"):
        make_trainer().load(str(tmp_path))


def test_a_checkpoint_of_another_mode_is_refused(tmp_path):
    trainer = make_trainer(mode="indexer_warmup")
    trainer.step(documents())
    trainer.save(str(tmp_path))
    with pytest.raises(CheckpointError, match="other trained parameters"):
        make_trainer().load(str(tmp_path))


def test_documents_without_a_trained_token_are_refused():
    with pytest.raises(ContractError, match="none of the 1 documents"):
        make_trainer().step([Document(token_ids=(1, 2), train_mask=(True, False))])


def test_a_document_longer_than_a_micro_batch_is_refused():
    with pytest.raises(ConfigError, match="micro_batch_tokens=4"):
        make_trainer(micro_batch_tokens=4).step(documents())


def test_damaged_weights_stop_the_run_before_they_spread():
    trainer = make_trainer()
    with torch.no_grad():
        trainer.model.get_parameter("lm_head.weight")[0, 0] = float("nan")
    before = weights(trainer)
    with pytest.raises(ContractError, match="loss of step 0 is nan"):
        trainer.step(documents())
    after = weights(trainer)
    assert all(torch.equal(before[n].nan_to_num(), after[n].nan_to_num()) for n in before)
