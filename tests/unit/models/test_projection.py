import os

import pytest
import torch

from longarc.models import projection
from longarc.models.kernels import vocabulary
from longarc.models.projection import token_logprobs
from model_cases import LargestTensor
from peak_memory import measured_alone, peak_bytes


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["native", "eager"])
def test_a_token_that_cannot_occur_adds_nothing_to_the_entropy(dtype):
    hidden, weight, targets, _ = inputs()
    hidden = hidden.detach().abs().to(dtype)
    banned, allowed = weight.detach().to(dtype), weight.detach()[:-1].to(dtype)
    banned[-1] = float("-inf")
    targets = targets.clamp_max(9)
    ours = token_logprobs(hidden, banned, targets, with_entropy=True)
    expected = token_logprobs(hidden, allowed, targets, with_entropy=True)
    torch.testing.assert_close(ours, expected)


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
    with LargestTensor() as largest:
        logprobs, _ = token_logprobs(hidden, weight, targets, chunk_tokens=32, with_entropy=True)
        logprobs.sum().backward()
    assert largest.numel <= 400 * 6


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_a_weight_too_large_to_be_packed_gives_the_same_numbers(temperature, monkeypatch):
    generator = torch.Generator().manual_seed(2)
    hidden = torch.randn(300, 24, generator=generator, requires_grad=True)
    weight = torch.randn(2600, 24, generator=generator, requires_grad=True)
    targets = torch.randint(0, 2600, (300,), generator=generator)
    grad = torch.randn(300, generator=generator)
    results = []
    for limit in (1 << 24, 0):
        monkeypatch.setattr(vocabulary, "PACKED_FLOATS", limit)
        logprobs, entropy = token_logprobs(
            hidden, weight, targets, temperature=temperature, with_entropy=True
        )
        results.append([logprobs, entropy, *torch.autograd.grad(logprobs, [hidden, weight], grad)])
    (logprobs, entropy, grad_hidden, grad_weight), others = results
    assert torch.equal(others[0], logprobs)
    assert torch.equal(others[1], entropy)
    assert torch.equal(others[3], grad_weight)
    torch.testing.assert_close(others[2], grad_hidden)  # summed slice by slice


def test_chunks_shrink_with_the_vocabulary(monkeypatch):
    assert projection.chunk_size(154_880) * 154_880 * 4 <= 1 << 27  # GLM-5's logits in 128 MiB
    monkeypatch.setattr(projection, "LOGIT_FLOATS", 100_000)
    sizes = [projection.chunk_size(vocab) for vocab in (100, 1000, 2000, 1_000_000)]
    assert sizes == [512, 96, 32, 32]


def peaks_of_projection(num_tokens):
    """Return the peaks [bytes] of forward and backward above inputs and gradients, by kernels; V = 70,000.

    Width and chunks are small, because they cost time; a weight that counts as too large to be packed is worked
    on in slices, like that of a wide model.
    """
    vocabulary.PACKED_FLOATS = 0
    projection.LOGIT_FLOATS = 96 * 70_000
    hidden = torch.randn(num_tokens, 16, requires_grad=True)
    weight = torch.randn(70_000, 16, requires_grad=True)
    targets = torch.zeros(num_tokens, dtype=torch.long)

    def step(rows, vocab):
        logprobs, _ = token_logprobs(
            hidden[:rows], weight[:vocab], targets[:rows], with_entropy=True
        )
        logprobs.sum().backward()

    peaks = {}
    for native in "10":
        os.environ["LONGARC_NATIVE"] = native
        step(32, 100)  # loads libraries and kernels
        hidden.grad = weight.grad = None
        peak = peak_bytes(lambda: step(num_tokens, 70_000))
        peaks[native] = peak - hidden.nbytes - weight.nbytes
    return peaks


def test_the_peak_does_not_grow_with_tokens_times_vocabulary():
    few, many = (measured_alone(peaks_of_projection, n) for n in (250, 1000))
    for native in "10":
        assert many[native] < few[native] + 20e6
        assert many[native] < 1000 * 70_000 * 4 / 2  # the logits alone would be twice as large
