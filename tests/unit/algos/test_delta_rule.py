import pytest
import torch
from transformers.models.qwen3_next.modeling_qwen3_next import torch_recurrent_gated_delta_rule

from longarc.algos.delta_rule import chunk_parts, chunk_step, delta_rule_step

HEADS, KEY, VALUE = 3, 5, 4


def inputs(num_tokens, *, dtype=torch.float64, decay=None, beta=None, seed=0):
    """Queries, keys, values, logarithms of decays, betas; heads first."""
    draw = torch.Generator().manual_seed(seed)
    query, key = (
        torch.nn.functional.normalize(
            torch.randn(HEADS, num_tokens, KEY, generator=draw, dtype=torch.float64), dim=-1
        ).to(dtype)
        for _ in range(2)
    )
    value = torch.randn(HEADS, num_tokens, VALUE, generator=draw, dtype=torch.float64).to(dtype)
    rates = torch.rand(2, HEADS, num_tokens, generator=draw, dtype=torch.float64).to(dtype)
    log_decay = -3 * rates[0] if decay is None else torch.full_like(rates[0], decay).log()
    betas = rates[1] if beta is None else torch.full_like(rates[1], beta)
    return query, key, value, log_decay, betas


def by_token(values):
    memory = values[0].new_zeros(HEADS, KEY, VALUE)
    reads = []
    for token in zip(*(x.unbind(1) for x in values), strict=True):
        read, memory = delta_rule_step(*token, memory)
        reads.append(read)
    return torch.stack(reads, dim=1), memory


def by_chunk(values, size):
    memory = values[0].new_zeros(HEADS, KEY, VALUE)
    reads = []
    for chunk in zip(*(x.split(size, dim=1) for x in values), strict=True):
        read, memory = chunk_step(chunk_parts(*chunk), memory)
        reads.append(read)
    return torch.cat(reads, dim=1), memory


def test_a_step_is_the_published_recurrence():
    query, key, value, log_decay, beta = (x[0, 0] for x in inputs(1))
    state = torch.randn(VALUE, KEY, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    identity = torch.eye(KEY, dtype=torch.float64)
    expected = log_decay.exp() * state @ (identity - beta * torch.outer(key, key))
    expected += beta * torch.outer(value, key)
    read, memory = delta_rule_step(query, key, value, log_decay, beta, state.mT)
    torch.testing.assert_close(memory.mT, expected, rtol=0, atol=1e-14)
    torch.testing.assert_close(read, expected @ query, rtol=0, atol=1e-14)


@pytest.mark.parametrize(("decay", "beta"), [(None, None), (1.0, 1.0), (0.9, 1.9)])
@pytest.mark.parametrize("size", [1, 3, 8, 41])
def test_chunks_of_any_size_are_the_recurrence(size, decay, beta):
    values = inputs(41, decay=decay, beta=beta)
    for chunked, expected in zip(by_chunk(values, size), by_token(values), strict=True):
        torch.testing.assert_close(chunked, expected, rtol=0, atol=1e-11)


def test_gradients_of_chunks_are_those_of_the_recurrence():
    values = [x.requires_grad_() for x in inputs(23)]
    weight = torch.randn(HEADS, 23, VALUE, dtype=torch.float64)
    expected = torch.autograd.grad((by_token(values)[0] * weight).sum(), values)
    found = torch.autograd.grad((by_chunk(values, 8)[0] * weight).sum(), values)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)


def test_gradients_are_those_of_finite_differences():
    values = [x[:2].requires_grad_() for x in inputs(5)]
    memory = torch.randn(2, KEY, VALUE, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda *given: chunk_step(chunk_parts(*given[:5]), given[5]), (*values, memory)
    )


def test_it_is_what_transformers_computes():
    values = inputs(30, dtype=torch.float32)
    query, key, value, log_decay, beta = (x.transpose(0, 1)[None] for x in values)
    theirs, memory = torch_recurrent_gated_delta_rule(
        query * KEY**0.5, key, value, log_decay, beta, output_final_state=True
    )
    read, ours = by_chunk(values, 8)
    torch.testing.assert_close(read.transpose(0, 1)[None], theirs, rtol=0, atol=1e-5)
    torch.testing.assert_close(ours[None], memory, rtol=0, atol=1e-5)


def test_padding_changes_nothing():
    values = inputs(6)
    padded = [
        torch.nn.functional.pad(x, (0, 0, 0, 4)[: 2 * (x.dim() - 1)] if x.dim() == 3 else (0, 4))
        for x in values
    ]
    memory = torch.randn(HEADS, KEY, VALUE, dtype=torch.float64)
    read, after = chunk_step(chunk_parts(*padded), memory)
    expected, expected_after = chunk_step(chunk_parts(*values), memory)
    torch.testing.assert_close(read[:, :6], expected, rtol=0, atol=1e-13)
    torch.testing.assert_close(after, expected_after, rtol=0, atol=1e-13)


def test_a_strong_decay_is_finite_in_forward_and_backward():
    values = [x.requires_grad_() for x in inputs(64, decay=1e-30)]
    read, _ = by_chunk(values, 64)
    grads = torch.autograd.grad(read.sum(), values)
    assert all(bool(x.isfinite().all()) for x in (read, *grads))


def test_some_of_the_chunks_are_the_parts_of_some_of_the_chunks():
    values = inputs(6)
    some = chunk_parts(*values).rows(slice(1, 3))
    expected = chunk_parts(*(x[1:3] for x in values))
    memory = torch.randn(2, KEY, VALUE, dtype=torch.float64)
    for ours, theirs in zip(chunk_step(some, memory), chunk_step(expected, memory), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-13)
