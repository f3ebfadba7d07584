"""What the TV losses are for: a draft that cannot be the main model is accepted more often."""

import pytest
import torch

from longarc.algos.mtp import acceptance, chained, end_to_end_tv, expected_accepted


def rank_two_draft(loss_of, target, *, steps=150):
    """Train logits of rank 2 for many contexts; return the acceptances of each."""
    generator = torch.Generator().manual_seed(1)
    contexts = torch.randn(len(target), 2, generator=generator, dtype=torch.float64)
    words = torch.randn(2, target.shape[1], generator=generator, dtype=torch.float64)
    parameters = [contexts.requires_grad_(), words.requires_grad_()]
    optimizer = torch.optim.Adam(parameters, lr=0.05)
    for step in range(steps):
        logits = contexts @ words
        optimizer.zero_grad()
        # All start from cross-entropy: a TV loss is flat while hardly anything is accepted.
        (cross_entropy if step < steps // 3 else loss_of)(target, logits).backward()
        optimizer.step()
    return acceptance(target, (contexts @ words).detach())


def cross_entropy(target, logits):
    return -(target * logits.log_softmax(dim=-1)).sum(dim=-1).mean()


def single_step(target, logits):
    return (1 - acceptance(target, logits)).mean()


def end_to_end(target, logits):
    """Contexts in pairs: a first draft, and the second one that needs it."""
    alpha = acceptance(target, logits).view(2, -1)
    return end_to_end_tv(alpha, torch.ones_like(alpha, dtype=torch.bool)).mean()


@pytest.mark.parametrize("loss_of", [single_step, end_to_end])
def test_a_draft_of_little_capacity_is_accepted_more_often_under_tv(loss_of):
    generator = torch.Generator().manual_seed(0)
    target = (2 * torch.randn(40, 50, generator=generator, dtype=torch.float64)).softmax(dim=-1)
    everywhere = torch.ones(2, 20, dtype=torch.bool)
    worth = {
        name: expected_accepted(rank_two_draft(loss, target).view(2, -1), everywhere).mean().item()
        for name, loss in (("text", cross_entropy), ("tv", loss_of))
    }
    assert worth["tv"] > worth["text"] + 0.02


def test_a_chain_lists_for_each_target_the_steps_from_it_on():
    steps = torch.tensor([[1, 2, 3], [4, 5, 6], [7, 8, 9], [10, 11, 12]])
    assert chained(steps, fill=0).tolist() == [[1, 2, 3], [5, 6, 0], [9, 0, 0], [0, 0, 0]]
