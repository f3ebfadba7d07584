"""Golden numbers of the distillation loss of an indexer that several layers share, float64."""

import json
from pathlib import Path

import pytest
import torch

from longarc.algos.index_share import shared_index_loss

CASES = json.loads((Path(__file__).parent / "data/indexcache_distill.json").read_text())["cases"]


def float64(values):
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize("case", [pytest.param(case, id=case["name"]) for case in CASES])
def test_value_and_gradient_match(case):
    attention = float64(case["attention_p"])[:, None]
    scores = float64(case["indexer_logits"])[None].requires_grad_()
    visible = torch.zeros(1, 5, dtype=torch.bool)
    loss = shared_index_loss(attention, scores, visible)
    loss.backward()
    assert loss.item() == pytest.approx(case["loss_multi"], abs=1e-12)
    torch.testing.assert_close(scores.grad[0], float64(case["grad_logits"]), rtol=0, atol=1e-12)

    average = shared_index_loss(attention.mean(dim=0, keepdim=True), scores.detach(), visible)
    assert average.item() == pytest.approx(case["loss_avg"], abs=1e-12)
    assert (loss - average).item() == pytest.approx(case["constant_gap"], abs=1e-12)
