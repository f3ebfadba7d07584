"""The loss of a shared indexer: sums over heads, hidden keys, the gradient by finite differences."""

import torch

from longarc.algos.index_share import shared_index_loss


def inputs(layers=3, queries=4, keys=6):
    generator = torch.Generator().manual_seed(0)
    attention = torch.rand(layers, queries, keys, generator=generator, dtype=torch.float64)
    scores = torch.randn(queries, keys, generator=generator, dtype=torch.float64)
    is_hidden = torch.ones(queries, keys, dtype=torch.bool).triu(3)
    return attention.masked_fill(is_hidden, 0.0), scores.requires_grad_(), is_hidden


def test_the_gradient_is_that_of_the_value():
    attention, scores, is_hidden = inputs()
    assert torch.autograd.gradcheck(lambda z: shared_index_loss(attention, z, is_hidden), scores)


def test_it_is_the_mean_of_the_divergences_of_the_layers():
    attention, scores, is_hidden = inputs()
    apart = [shared_index_loss(layer[None], scores, is_hidden) for layer in attention]
    together = shared_index_loss(attention, scores, is_hidden)
    torch.testing.assert_close(together, torch.stack(apart).mean())


def test_the_number_of_heads_that_were_summed_does_not_matter():
    attention, scores, is_hidden = inputs()
    one = shared_index_loss(attention, scores, is_hidden)
    torch.testing.assert_close(shared_index_loss(8.0 * attention, scores, is_hidden), one)


def test_a_hidden_key_gets_no_gradient_whatever_its_score():
    attention, scores, is_hidden = inputs()
    poisoned = scores.detach().masked_fill(is_hidden, float("nan")).requires_grad_()
    loss = shared_index_loss(attention, poisoned, is_hidden)
    loss.backward()
    assert torch.equal(loss, shared_index_loss(attention, scores, is_hidden))
    assert not poisoned.grad[is_hidden].any()


def test_an_indexer_that_knows_the_mean_has_no_gradient():
    attention, _, is_hidden = inputs()
    mean = (attention / attention.sum(dim=-1, keepdim=True)).mean(dim=0)
    scores = mean.log().requires_grad_()
    shared_index_loss(attention, scores, is_hidden).backward()
    torch.testing.assert_close(scores.grad, torch.zeros_like(scores), rtol=0, atol=1e-12)


def test_a_query_that_sees_nothing_adds_nothing():
    attention, scores, is_hidden = inputs()
    attention[:, 2], is_hidden[2] = 0.0, True
    attention[:, 3] = 0.0  # sees keys, but attends to none
    loss = shared_index_loss(attention, scores, is_hidden)
    loss.backward()
    seen = shared_index_loss(attention[:, :2], scores[:2], is_hidden[:2])
    torch.testing.assert_close(loss, seen, rtol=0, atol=1e-12)
    assert torch.isfinite(scores.grad).all()
    assert not scores.grad[2:].any()
