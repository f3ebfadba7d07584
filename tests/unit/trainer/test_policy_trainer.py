"""The policy step: what it computes, what it refuses, and what cannot change it."""

import pytest
import torch
from trainer_fixtures import random_batch, tiny_model

from longarc.algos import losses
from longarc.config.training import OptimizerConfig
from longarc.trainer.policy import PolicySettings, PolicyTrainer


def settings(**changes):
    values = {
        "optimizer": OptimizerConfig(lr=1e-2),
        "num_steps": 10,
        "micro_batch_tokens": 4096,
    }
    return PolicySettings(**(values | changes))


def make_trainer(tmp_path, *, dtype=torch.float32, loss=losses.icepop, seed=0, **changes):
    options = {k: changes.pop(k) for k in ("teachers", "advantage_fn") if k in changes}
    return PolicyTrainer(
        tiny_model(seed=seed, dtype=dtype),
        settings(**changes),
        loss=loss,
        publish_directory=str(tmp_path),
        **options,
    )


def weights(trainer):
    return {k: v.clone() for k, v in trainer.model.state_dict().items()}


def test_the_same_batch_gives_bit_identical_weights(tmp_path):
    digests = [make_trainer(tmp_path).take_step(random_batch()).weights_sha256 for _ in range(2)]
    assert digests[0] == digests[1]


@pytest.mark.parametrize("reduction", ["token_mean", "sequence_mean"])
def test_micro_batches_do_not_change_the_result(tmp_path, reduction):
    results = []
    for micro_batch_tokens in (4096, 60, 30):
        trainer = make_trainer(
            tmp_path,
            dtype=torch.float64,
            micro_batch_tokens=micro_batch_tokens,
            reduction=reduction,
            optimizer=OptimizerConfig(lr=1e-2, use_muon=False, grad_clip=1e9),
        )
        trainer.take_step(random_batch())
        results.append(weights(trainer))
    for other in results[1:]:
        for name, value in results[0].items():
            torch.testing.assert_close(other[name], value, rtol=0, atol=1e-9, msg=name)
