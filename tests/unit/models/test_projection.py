import pytest
import torch

from longarc.models.projection import token_logprobs


def inputs(tokens=23, vocab=11):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, 6, generator=generator, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(vocab, 6, generator=generator, dtype=torch.float64, requires_grad=True)
    return hidden, weight, torch.randint(0, vocab, (tokens,), generator=generator), generator


@pytest.mark.parametrize("chunk_tokens", [1, 7, 512])
def test_values_entropy_and_gradients_are_those_of_log_softmax(chunk_tokens):
    hidden, weight, targets, generator = inputs()
    grad = torch.randn(23, generator=generator, dtype=torch.float64)
    logprobs, entropy = token_logprobs(
        hidden, weight, targets, temperature=0.6, chunk_tokens=chunk_tokens, with_entropy=True
    )
    table = (hidden @ weight.T / 0.6).log_softmax(dim=1)
    expected = table.gather(1, targets[:, None])[:, 0]

    torch.testing.assert_close(logprobs, expected)
    torch.testing.assert_close(entropy, -(table.exp() * table).sum(dim=1))
    assert not entropy.requires_grad
    for got, want in zip(
        torch.autograd.grad(logprobs, [hidden, weight], grad),
        torch.autograd.grad(expected, [hidden, weight], grad),
        strict=True,
    ):
        torch.testing.assert_close(got, want)


def test_only_what_needs_a_gradient_gets_one():
    hidden, weight, targets, _ = inputs()
    logprobs, entropy = token_logprobs(hidden.detach(), weight, targets)
    assert entropy is None
    logprobs.sum().backward()
    assert weight.grad is not None


def test_a_token_scores_alike_in_any_chunk():
    hidden, weight, targets, _ = inputs(tokens=100, vocab=301)
    hidden, weight = hidden.detach().float(), weight.detach().float()
    whole, _ = token_logprobs(hidden, weight, targets)
    pieces = [token_logprobs(hidden[i : i + 1], weight, targets[i : i + 1])[0] for i in range(100)]
    assert torch.equal(torch.cat(pieces), whole)


def test_logits_of_all_tokens_never_exist_at_once():
    hidden, weight, targets, _ = inputs(tokens=400, vocab=50)
    sizes = []

    class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor):
                sizes.append(out.numel())
            return out

    with Sizes():
        logprobs, _ = token_logprobs(hidden, weight, targets, chunk_tokens=32, with_entropy=True)
        logprobs.sum().backward()
    assert max(sizes) <= 400 * 6
