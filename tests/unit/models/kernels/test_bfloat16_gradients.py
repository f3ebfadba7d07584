"""Gradients of products in bfloat16: which numbers are rounded, and that sums and results are not."""

import pytest
import torch

from longarc.models.kernels import rows, vocabulary
from longarc.models.kernels.native import native
from longarc.models.projection import token_logprobs
from longarc.models.rounding import product

pytestmark = pytest.mark.skipif(native() is None, reason="the native kernels are not built")


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def rounded(x: torch.Tensor) -> torch.Tensor:
    return x.bfloat16().double()


def gradients(function, grad: torch.Tensor, *inputs: torch.Tensor) -> list[torch.Tensor]:
    """Return the gradients of the inputs for a gradient of the output."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    function(*leaves).backward(grad)
    return [leaf.grad for leaf in leaves]


def assert_sums_of_float32(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Assert what rounding to bfloat16 on the way would break by a factor of a hundred."""
    scale = max(1e-3, float(expected.abs().max()))
    torch.testing.assert_close(found.double() / scale, expected / scale, rtol=0, atol=2e-5)


def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return rows.linear(x, weight, compute_dtype="bfloat16")


@pytest.mark.parametrize(("inputs", "outputs"), [(1, 1), (7, 33), (65, 40), (30, 1100)])
@pytest.mark.parametrize("num_rows", [1, 2, 13, 600])
def test_both_gradients_are_products_of_rounded_factors_summed_in_float32(
    num_rows, inputs, outputs
):
    x, weight = random(num_rows, inputs), random(outputs, inputs, seed=1)
    grad = random(num_rows, outputs, seed=2)
    grad_x, grad_weight = gradients(linear, grad, x, weight)
    assert_sums_of_float32(grad_x, rounded(grad) @ rounded(weight))
    assert_sums_of_float32(grad_weight, rounded(grad).mT @ rounded(x))


def test_the_eager_twin_rounds_the_same_factors():
    x, weight, grad = random(33, 20), random(40, 20, seed=1), random(33, 40, seed=2)
    twin = gradients(lambda x, weight: product(x, weight, "bfloat16"), grad, x, weight)
    for ours, eager in zip(gradients(linear, grad, x, weight), twin, strict=True):
        assert_sums_of_float32(ours, eager.double())


def test_gradients_do_not_depend_on_the_number_of_threads():
    x, weight, grad = random(200, 70), random(90, 70, seed=1), random(200, 90, seed=2)
    alone = gradients(linear, grad, x, weight)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        together = gradients(linear, grad, x, weight)
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for a, b in zip(alone, together, strict=True))


def test_a_gradient_that_is_not_a_number_is_handed_on():
    x, weight, grad = random(4, 20), random(8, 20, seed=1), random(4, 8, seed=2)
    grad[1, 3], grad[2, 5] = float("nan"), float("inf")
    grad_x, grad_weight = gradients(linear, grad, x, weight)
    assert grad_x.isfinite().all(dim=1).tolist() == [True, False, False, True]
    assert (~grad_weight.isfinite()).any(dim=1).nonzero()[:, 0].tolist() == [3, 5]


def test_a_weight_that_heads_share_gets_a_gradient_for_each():
    x, weight = random(23, 3, 10), random(3, 17, 10, seed=1)
    grad = random(23, 3, 17, seed=2)
    found = gradients(rows.head_product, grad, x, weight)
    expected = gradients(lambda a, b: torch.einsum("thi,hoi->tho", a, b), grad, x, weight)
    for ours, reference in zip(found, expected, strict=True):
        assert_sums_of_float32(ours, reference.double())


@pytest.mark.parametrize("num_rows", [3, 530])
def test_the_feed_forward_is_as_near_to_exact_gradients_as_bfloat16_is(num_rows):
    x, gate, up = random(num_rows, 40), random(70, 40, seed=1) / 6, random(70, 40, seed=2) / 6
    down, grad = random(40, 70, seed=3) / 8, random(num_rows, 40, seed=4)

    def exact(x, gate, up, down):
        return (torch.nn.functional.silu(x @ gate.mT) * (x @ up.mT)) @ down.mT

    found = gradients(
        lambda *inputs: rows.feed_forward(*inputs, compute_dtype="bfloat16"),
        grad, x, gate, up, down,
    )  # fmt: skip
    expected = gradients(exact, grad.double(), *(t.double() for t in (x, gate, up, down)))
    for ours, reference in zip(found, expected, strict=True):
        error = (ours - reference).norm() / reference.norm()
        assert 1e-4 < error < 1e-2  # a number of bfloat16 is off by 2^-9 at most


@pytest.mark.parametrize("packed_floats", [0, 1 << 24])
def test_the_projection_is_as_near_to_exact_gradients_as_bfloat16_is(packed_floats, monkeypatch):
    monkeypatch.setattr(vocabulary, "PACKED_FLOATS", packed_floats)
    hidden, weight = random(70, 24), random(2100, 24, seed=1)
    targets, grad = torch.arange(70) * 7, random(70, seed=2)

    def logprobs(hidden, weight, compute_dtype):
        return vocabulary.token_logprobs(
            hidden,
            weight,
            targets,
            temperature=0.8,
            with_entropy=True,
            compute_dtype=compute_dtype,
        )[0]

    def exact(hidden, weight):
        logits = hidden @ weight.mT / 0.8
        return logits.log_softmax(dim=1).gather(1, targets[:, None])[:, 0]

    found = gradients(lambda *pair: logprobs(*pair, "bfloat16"), grad, hidden, weight)
    expected = gradients(exact, grad.double(), hidden.double(), weight.double())
    for ours, reference in zip(found, expected, strict=True):
        error = (ours - reference).norm() / reference.norm()
        assert 1e-4 < error < 2e-2
    for ours, reference in zip(
        gradients(lambda *pair: logprobs(*pair, "float32"), grad, hidden, weight),
        expected,
        strict=True,
    ):
        assert (ours - reference).norm() / reference.norm() < 1e-5


def test_the_eager_projection_rounds_the_same_factors(monkeypatch):
    hidden, weight = random(50, 24), random(300, 24, seed=1)
    grad = random(50, seed=2)

    def logprobs(hidden, weight):
        return token_logprobs(hidden, weight, torch.arange(50), compute_dtype="bfloat16")[0]

    ours = gradients(logprobs, grad, hidden, weight)
    monkeypatch.setenv("LONGARC_NATIVE", "0")
    for found, eager in zip(ours, gradients(logprobs, grad, hidden, weight), strict=True):
        # A probability that lies between two numbers of bfloat16 may tip to either.
        assert (found - eager).norm() / eager.norm() < 1e-3
