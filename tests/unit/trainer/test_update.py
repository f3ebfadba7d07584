"""Schedule, division, clipping and digest of one optimizer step."""

import math

import pytest
import torch
from torch import nn
from trainer_fixtures import tiny_model

from longarc.config.training import OptimizerConfig
from longarc.errors import ContractError
from longarc.trainer.update import (
    clip_gradients,
    divide_gradients,
    learning_rate,
    weights_sha256,
)


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [1.0, 2.0, 2.0, 2.0]),
        ("cosine", [1.0, 2.0, 1.1, 0.2]),
        ("linear", [1.0, 2.0, 1.1, 0.2]),
    ],
)
def test_the_rate_follows_the_schedule_of_the_config(schedule, expected):
    config = OptimizerConfig(lr=2.0, schedule=schedule, min_lr_frac=0.1, warmup_steps=2)
    rates = [learning_rate(step, config, num_steps=4) for step in range(4)]
    assert rates == pytest.approx(expected)


def parameters(*grads):
    out = []
    for grad in grads:
        parameter = nn.Parameter(torch.zeros(len(grad)))
        parameter.grad = torch.tensor(grad)
        out.append(parameter)
    return [*out, nn.Parameter(torch.zeros(1))]  # one without a gradient


def test_gradients_are_divided_once_and_clipped_by_their_global_norm():
    grads = parameters([6.0, 0.0], [8.0])
    divide_gradients(grads, 2.0)
    assert clip_gradients(grads, max_norm=1.0) == 5.0
    torch.testing.assert_close(grads[0].grad, torch.tensor([0.6, 0.0]))
    torch.testing.assert_close(grads[1].grad, torch.tensor([0.8]))
    assert clip_gradients(grads, max_norm=2.0) == pytest.approx(1.0)
    torch.testing.assert_close(grads[1].grad, torch.tensor([0.8]))


def test_a_norm_that_is_not_finite_is_returned_and_nothing_is_scaled():
    grads = parameters([math.inf, 1.0])
    assert clip_gradients(grads, max_norm=1.0) == math.inf
    assert grads[0].grad.tolist() == [math.inf, 1.0]
    assert clip_gradients(parameters()[-1:], max_norm=1.0) == 0.0


@pytest.mark.parametrize("normaliser", [0.0, -1.0, math.nan])
def test_a_step_without_anything_to_average_over_is_refused(normaliser):
    with pytest.raises(ContractError, match="no token of the batch is trained"):
        divide_gradients(parameters([1.0]), normaliser)


def test_the_digest_sees_every_parameter_and_buffer_and_one_bit():
    model = tiny_model()
    digests = {weights_sha256(model)}
    assert weights_sha256(tiny_model()) in digests
    for name in ("lm_head.weight", "model.layers.1.mlp.gate.e_score_correction_bias"):
        value = model.state_dict()[name].view(-1)
        value[-1] = torch.nextafter(value[-1], torch.tensor(9.0))
        digests.add(weights_sha256(model))
    assert len(digests) == 3
