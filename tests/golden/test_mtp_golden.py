"""Golden numbers of the TV losses of multi-token prediction: values and gradients, float64."""

import json
from pathlib import Path

import pytest
import torch

from longarc.algos.mtp import (
    acceptance,
    end_to_end_tv_loss,
    expected_accepted,
    single_step_tv,
)

CASES = {
    case["name"]: case
    for case in json.loads((Path(__file__).parent / "data/mtp_tv.json").read_text())["cases"]
}
WITH_GRADIENT = [name for name in CASES if name != "perfect_draft"]  # at p = q there are several


def float64(values):
    return torch.tensor(values, dtype=torch.float64)


def inputs(name):
    case = CASES[name]
    return case, float64(case["target_p"]), float64(case["draft_logits"]).requires_grad_()


@pytest.mark.parametrize("name", CASES)
def test_values_match(name):
    case, target, logits = inputs(name)
    alpha = acceptance(target, logits)
    everywhere = torch.ones_like(alpha, dtype=torch.bool)
    torch.testing.assert_close(alpha, float64(case["alpha"]), rtol=0, atol=1e-12)
    torch.testing.assert_close(
        single_step_tv(alpha, everywhere), float64(case["d_tv"]), rtol=0, atol=1e-12
    )
    expected = expected_accepted(alpha, everywhere).item()
    assert expected == pytest.approx(case["expected_accepted"], abs=1e-12)
    loss = end_to_end_tv_loss(target, logits).item()
    assert loss == pytest.approx(case["e2e_loss"], abs=1e-12)


@pytest.mark.parametrize("name", WITH_GRADIENT)
def test_gradients_match(name):
    case, target, logits = inputs(name)
    (single,) = torch.autograd.grad((1 - acceptance(target, logits)).sum(), logits)
    torch.testing.assert_close(single, float64(case["per_step_grad_d_tv"]), rtol=0, atol=1e-12)
    (whole,) = torch.autograd.grad(end_to_end_tv_loss(target, logits), logits)
    torch.testing.assert_close(whole, float64(case["e2e_grad_logits"]), rtol=0, atol=1e-12)
