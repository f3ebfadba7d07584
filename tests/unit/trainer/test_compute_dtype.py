"""Training with products in fp32 and in bf16: what falls, what stays fp32, and what the engine sees of it."""

import pytest
import torch
from trainer_fixtures import TINY_LLAMA, tiny_model

from longarc.config.training import OptimizerConfig
from longarc.models.kernels.native import native
from longarc.models.layout import Layout
from longarc.records.metric import combine
from longarc.trainer.packing import Document
from longarc.trainer.supervised import SupervisedSettings, SupervisedTrainer
from model_cases import replay_in_random_company

DTYPES = ["float32", "bfloat16"]


def make_trainer(compute_dtype, **optimizer):
    config = TINY_LLAMA.model_copy(
        update={"compute_dtype": compute_dtype, "num_hidden_layers": 2, "initializer_range": 0.1}
    )
    settings = {"lr": 1e-2, "use_muon": False, "weight_decay": 0.0} | optimizer
    return SupervisedTrainer(
        tiny_model(config=config),
        SupervisedSettings(
            optimizer=OptimizerConfig(**settings), num_steps=20, micro_batch_tokens=64
        ),
        clock=lambda: 0.0,
    )


def documents():
    return [Document(token_ids=[(a * i * i + i) % 64 for i in range(40)]) for a in range(1, 5)]


def losses(trainer, num_steps):
    reports = [trainer.step(documents()) for _ in range(num_steps)]
    return [combine(report.metrics)["loss/lm_nats"] for report in reports]


def test_the_loss_falls_alike_in_both():
    curves = {dtype: losses(make_trainer(dtype), 12) for dtype in DTYPES}
    for curve in curves.values():
        assert curve[-1] < curve[0] - 1
    apart = [abs(a - b) for a, b in zip(*curves.values(), strict=True)]
    assert 0 < max(apart) < 0.05


@pytest.mark.parametrize("compute_dtype", DTYPES)
def test_an_update_that_bfloat16_could_not_hold_is_not_lost(compute_dtype):
    trainer = make_trainer(compute_dtype, lr=1e-6)
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    losses(trainer, 1)
    for name, parameter in trainer.model.named_parameters():
        assert parameter.dtype is torch.float32
        assert parameter.grad is None or parameter.grad.dtype is torch.float32
        moved = (parameter - before[name]).abs()
        assert 0 < moved.max() < 2e-6, name
    assert any(
        torch.equal(p.bfloat16(), before[name].bfloat16())
        for name, p in trainer.model.named_parameters()
    )


@pytest.mark.skipif(native() is None, reason="the native kernels are not built")
@pytest.mark.parametrize("compute_dtype", DTYPES)
def test_after_training_engine_and_trainer_still_compute_the_same_bits(compute_dtype):
    trainer = make_trainer(compute_dtype)
    losses(trainer, 3)
    sequences = [torch.tensor(document.token_ids) for document in documents()]
    layout = Layout.documents([len(ids) for ids in sequences])
    packed = trainer.model(torch.cat(sequences), layout).hidden
    found = torch.cat(replay_in_random_company(trainer.model, sequences, seed=1))
    assert torch.equal(found, packed)
