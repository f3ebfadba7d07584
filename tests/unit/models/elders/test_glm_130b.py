import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from longarc.errors import ContractError
from longarc.models.elders.glm_130b import (
    DeepNorm,
    GeGLU,
    init_deepnorm,
    residual_scale,
    shrink_gradient,
)


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def test_the_scales_of_glm_130b():
    assert residual_scale(70) == pytest.approx(11.832159566)  # sqrt(140)
    assert residual_scale(2) == 2.0


def test_deepnorm_is_the_norm_of_the_weighted_sum():
    norm = DeepNorm(3, num_layers=2, eps=0.0).double()
    with torch.no_grad():
        norm.norm.weight.copy_(torch.tensor([1.0, 2.0, 3.0]))
        norm.norm.bias.copy_(torch.tensor([0.0, 0.0, 1.0]))
    hidden, change = (
        torch.tensor([[1.0, 0.0, 2.0]]).double(),
        torch.tensor([[0.0, 2.0, 2.0]]).double(),
    )
    # 2 * hidden + change = (2, 2, 6): mean 10/3, deviations (-4/3, -4/3, 8/3), std sqrt(32/9) = 1.885618.
    deviations = torch.tensor([[-4.0, -4.0, 8.0]]).double() / 3
    normed = deviations / math.sqrt(32 / 9)
    expected = normed * torch.tensor([1.0, 2.0, 3.0]) + torch.tensor([0.0, 0.0, 1.0])
    torch.testing.assert_close(norm(hidden, change), expected, rtol=0, atol=1e-12)


def test_geglu_is_its_formula():
    feed_forward = GeGLU(4, 6).double()
    x = torch.randn(5, 4, generator=seeded(), dtype=torch.float64)
    gate = x @ feed_forward.gate_proj.weight.T + feed_forward.gate_proj.bias
    up = x @ feed_forward.up_proj.weight.T + feed_forward.up_proj.bias
    gelu = gate * 0.5 * (1 + torch.erf(gate / math.sqrt(2)))
    expected = (gelu * up) @ feed_forward.down_proj.weight.T + feed_forward.down_proj.bias
    torch.testing.assert_close(feed_forward(x), expected, rtol=0, atol=1e-12)


def test_init_scales_what_a_layer_adds_and_zeroes_biases():
    value, query = nn.Linear(300, 500), nn.Linear(300, 500)
    init_deepnorm([value], [query], num_layers=8, generator=seeded())
    xavier = math.sqrt(2 / (300 + 500))
    assert query.weight.std().item() == pytest.approx(xavier, rel=0.02)
    assert value.weight.std().item() == pytest.approx(xavier / 4, rel=0.02)
    assert not query.bias.any()
    assert not value.bias.any()


def stack_change(num_layers, *, deepnorm):
    """Return how far one step of SGD moves the output of a deep post-norm stack, in output norms."""
    feed_forwards = [GeGLU(32, 64) for _ in range(num_layers)]
    linears = [m for f in feed_forwards for m in (f.gate_proj, f.up_proj, f.down_proj)]
    if deepnorm:
        init_deepnorm(linears, [], num_layers=num_layers, generator=seeded())
        norms = [DeepNorm(32, num_layers=num_layers) for _ in range(num_layers)]
    else:
        init_deepnorm([], linears, num_layers=num_layers, generator=seeded())
        norms = [DeepNorm(32, num_layers=num_layers) for _ in range(num_layers)]
        for norm in norms:
            norm.alpha = 1.0
    generator = seeded(1)
    x = torch.randn(64, 32, generator=generator)
    direction = torch.randn(64, 32, generator=generator)

    def output():
        hidden = x
        for norm, feed_forward in zip(norms, feed_forwards, strict=True):
            hidden = norm(hidden, feed_forward(hidden))
        return hidden

    before = output()
    (before * direction).mean().backward()
    with torch.no_grad():
        for linear in linears:
            linear.weight -= linear.weight.grad
        return ((output() - before).norm() / before.norm()).item()


def test_a_step_moves_a_deep_stack_less_with_deepnorm_and_no_more_when_it_is_deeper():
    with_deepnorm = [stack_change(n, deepnorm=True) for n in (8, 64)]
    without = stack_change(64, deepnorm=False)
    assert with_deepnorm[1] < 2 * with_deepnorm[0]
    assert with_deepnorm[1] < without / 3


@given(
    values=st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=8),
    gradient_frac=st.floats(0, 1),
)
def test_shrinking_leaves_values_exactly_alone(values, gradient_frac):
    x = torch.tensor(values, requires_grad=True)
    assert torch.equal(shrink_gradient(x, gradient_frac=gradient_frac), x)


def test_shrinking_passes_a_tenth_of_the_gradient():
    embedding = nn.Embedding(5, 3)
    embedded = embedding(torch.tensor([1, 3, 1]))
    shrink_gradient(embedded).sum().backward()
    expected = torch.zeros(5, 3)
    expected[1], expected[3] = 0.2, 0.1
    torch.testing.assert_close(embedding.weight.grad, expected)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: residual_scale(0), "num_layers = 0"),
        (lambda: shrink_gradient(torch.ones(1), gradient_frac=1.5), "gradient_frac = 1.5"),
    ],
)
def test_wrong_numbers_are_refused(call, message):
    with pytest.raises(ContractError, match=message):
        call()
