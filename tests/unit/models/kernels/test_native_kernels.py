"""The native kernels against their eager twins: values, gradients, ties, independence of company."""

import pytest
import torch
import torch.nn.functional as F

from longarc.algos.selection import select_keys
from longarc.models.build import build_model
from longarc.models.decoder_base import Decoder
from longarc.models.kernels import attention, mixture, rows, vocabulary
from longarc.models.kernels.native import native
from longarc.models.layers import Rotation
from longarc.models.layout import Layout, Span
from longarc.models.moe import Experts, Router
from longarc.models.projection import token_logprobs
from model_cases import sharpened, small_glm, small_llama

pytestmark = pytest.mark.skipif(native() is None, reason="the native kernels are not built")

FOREST = Layout((Span(9), Span(20, 0), Span(31, 0), Span(17), Span(12, 1), Span(1)))


@pytest.fixture
def eager(monkeypatch):
    """Return a function that runs another one without the kernels."""

    def run(function, *arguments):
        with monkeypatch.context() as patch:
            patch.setenv("LONGARC_NATIVE", "0")
            assert native() is None
            return function(*arguments)

    return run


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def gradients(function, *inputs: torch.Tensor) -> list[torch.Tensor]:
    """Return outputs and input gradients of ``function`` under a fixed random weighting of its output."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    output = function(*leaves)
    (output * random(*output.shape, seed=9)).sum().backward()
    return [output.detach(), *(leaf.grad for leaf in leaves)]


def assert_same(ours, reference) -> None:
    for a, b in zip(ours, reference, strict=True):
        scale = max(1.0, float(b.abs().max()))
        torch.testing.assert_close(a / scale, b / scale, atol=1e-5, rtol=0)


def step(model: Decoder, attention_kind: str, indexer_loss: str) -> dict[str, torch.Tensor]:
    """Run one forward and backward pass; return log-probabilities, entropies and all gradients."""
    ids = torch.randint(0, 64, (FOREST.num_tokens,), generator=torch.Generator().manual_seed(1))
    output = model(ids, FOREST, attention=attention_kind, indexer_loss=indexer_loss)
    logprobs, entropy = token_logprobs(
        output.hidden[:-1], model.output_weight, ids[1:], temperature=0.7, with_entropy=True
    )
    model.zero_grad()
    ((logprobs * random(*logprobs.shape)).sum() + output.indexer_loss_sum).backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"logprobs": logprobs.detach(), "entropy": entropy, **found}


@pytest.mark.parametrize(
    ("config", "attention_kind", "indexer_loss"),
    [
        (small_glm(index_topk=1000), "sparse", "none"),
        (small_glm(index_topk=1000), "sparse", "sparse"),
        (small_glm(), "dense", "none"),
        (small_glm(), "dense", "warmup"),
        (
            small_glm(num_attention_heads=6, n_shared_experts=0, norm_topk_prob=False),
            "dense",
            "none",
        ),
        (small_llama(), "sparse", "none"),
        (small_llama(num_attention_heads=5, num_key_value_heads=1, head_dim=20), "sparse", "none"),
        (small_llama(tie_word_embeddings=True), "sparse", "none"),
    ],
)
def test_a_training_step_gives_the_eager_numbers(config, attention_kind, indexer_loss, eager):
    model = build_model(config, seed=3)
    ours = step(model, attention_kind, indexer_loss)
    reference = eager(step, model, attention_kind, indexer_loss)
    assert ours.keys() == reference.keys()
    assert_same(ours.values(), reference.values())


def test_a_sparse_step_gives_the_eager_numbers_where_selections_agree(eager):
    model = build_model(small_glm(), seed=3)
    assert_same(
        step(model, "sparse", "none").values(), eager(step, model, "sparse", "none").values()
    )


@pytest.mark.parametrize(("num_in", "num_out"), [(1, 1), (7, 33), (16, 32), (40, 65), (129, 30)])
@pytest.mark.parametrize("num_rows", [1, 5, 12, 37, 600])
def test_products_of_any_shape_agree_with_torch(num_rows, num_in, num_out):
    x, weight = random(num_rows, num_in), random(num_out, num_in, seed=1)
    assert_same(gradients(rows.linear, x, weight), gradients(F.linear, x, weight))


def test_a_product_per_head_agrees_with_torch():
    x, weight = random(23, 3, 10), random(3, 17, 10, seed=1)
    reference = gradients(lambda a, b: torch.einsum("thi,hoi->tho", a, b), x, weight)
    assert_same(gradients(rows.head_product, x, weight), reference)


@pytest.mark.parametrize("width", [3, 16, 40])
def test_norms_agree_with_torch(width):
    x, weight, bias = random(21, width), random(width, seed=1), random(width, seed=2)
    assert_same(
        gradients(lambda a, w: rows.rms_norm(a, w, 1e-5), x, weight),
        gradients(lambda a, w: F.rms_norm(a, (width,), w, 1e-5), x, weight),
    )
    normed = rows.layer_norm(x, weight, bias, 1e-6)
    assert_same([normed], [F.layer_norm(x, (width,), weight, bias, 1e-6)])


@pytest.mark.parametrize("interleaved", [True, False])
def test_rotation_agrees_with_its_eager_twin(interleaved, eager):
    positions = torch.arange(0, 900, 30)
    rotation = Rotation(positions, width=12, base=1e4, interleaved=interleaved, dtype=torch.float32)
    x = random(30, 3, 20)[..., 4:16]
    assert_same(gradients(rotation.apply, x), eager(gradients, rotation.apply, x))


@pytest.mark.parametrize("width", [5, 48])
def test_the_feed_forward_agrees_with_torch(width):
    x, gate, up = random(19, 10), random(width, 10, seed=1), random(width, 10, seed=2)
    down = random(10, width, seed=3)
    reference = gradients(lambda a, g, u, d: (F.silu(a @ g.T) * (a @ u.T)) @ d.T, x, gate, up, down)
    assert_same(gradients(rows.feed_forward, x, gate, up, down), reference)


def test_experts_and_router_agree_with_their_eager_twins(eager):
    config = small_glm(n_routed_experts=5, num_experts_per_tok=3, routed_scaling_factor=1.7)
    router, experts = Router(config), Experts(config)
    router.e_score_correction_bias += 0.1 * random(5)
    x = random(41, config.hidden_size)

    def mixed(x, gate, gate_up, down):
        router.weight, experts.gate_up_proj, experts.down_proj = map(
            torch.nn.Parameter, (gate, gate_up, down)
        )
        chosen, weights = router(x)
        counts = torch.bincount(chosen.flatten(), minlength=5)
        output = experts(x, chosen, weights, counts)
        (output * random(*output.shape, seed=9)).sum().backward()
        return [
            output.detach(),
            x.grad,
            router.weight.grad,
            experts.gate_up_proj.grad,
            experts.down_proj.grad,
        ]

    inputs = (random(5, 32, seed=1), random(5, 48, 32, seed=2), random(5, 32, 24, seed=3))
    ours = mixed(x.clone().requires_grad_(), *inputs)
    assert_same(ours, eager(mixed, x.clone().requires_grad_(), *inputs))


def test_equal_router_scores_go_to_the_lower_expert():
    chosen, weights = mixture.route(
        torch.zeros(2, 6), torch.zeros(6), num_chosen=3, normalise=True, scale=3.0
    )
    assert chosen.tolist() == [[0, 1, 2]] * 2
    torch.testing.assert_close(weights, torch.ones(2, 3))


@pytest.mark.parametrize("num_heads", [1, 3, 4, 6])
@pytest.mark.parametrize("num_selected", [1, 7, 16])
def test_selection_keeps_the_tie_rule(num_heads, num_selected):
    # Small whole numbers: scores are exact in any order of summation, and tie often.
    generator = torch.Generator().manual_seed(num_heads)
    query = torch.randint(-2, 3, (70, num_heads, 5), generator=generator).float()
    weight = torch.randint(-1, 3, (70, num_heads), generator=generator).float()
    key = torch.randint(-2, 3, (70, 5), generator=generator).float()
    runs = attention.FlatRuns.of([(0, 70, 0, torch.arange(70))])
    found = attention.select(runs, query, weight, key, num_selected=num_selected)

    scores = (torch.einsum("qji,pi->qjp", query, key).relu() * weight[..., None]).sum(1)
    scores = scores.masked_fill(torch.ones(70, 70, dtype=torch.bool).triu(1), float("-inf"))
    assert found.tolist() == select_keys(scores, num_selected=num_selected).tolist()


@pytest.mark.parametrize("num_rows", [1, 2, 3, 5, 7, 13, 17])
@pytest.mark.parametrize("num_outputs", [1, 7, 8, 9, 16, 33, 48])
def test_a_product_of_few_rows_is_that_of_many(num_rows, num_outputs):
    """Where a compiler decides about fused multiply-adds, it decides by the shape of the tile."""
    x, weight = random(64, 20), random(num_outputs, 20, seed=1)
    assert torch.equal(rows.linear(x[:num_rows], weight), rows.linear(x, weight)[:num_rows])


def test_a_row_does_not_depend_on_its_company():
    model = sharpened(build_model(small_glm(), seed=3))
    ids = torch.randint(0, 64, (90,), generator=torch.Generator().manual_seed(1))
    alone = model(ids[:50], Layout.documents([50])).hidden
    together = model(torch.cat([ids[50:], ids[:50]]), Layout.documents([40, 50])).hidden
    assert torch.equal(alone, together[40:])


@pytest.mark.parametrize("config", [small_glm(), small_llama()])
def test_two_threads_compute_the_same_hidden_states(config):
    model = sharpened(build_model(config, seed=3))
    ids = torch.randint(0, 64, (FOREST.num_tokens,), generator=torch.Generator().manual_seed(1))
    one = model(ids, FOREST).hidden
    reference = step(model, "sparse", "none")
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        two = model(ids, FOREST).hidden
        assert_same(step(model, "sparse", "none").values(), reference.values())
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(one, two)


def test_sampled_and_scored_log_probabilities_are_bitwise_equal():
    hidden, weight = random(50, 24), random(333, 24, seed=1)
    logits = rows.linear(hidden, weight)
    uniforms = torch.rand(50, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    tokens, sampled, finite = vocabulary.sample_rows(logits, torch.full((50,), 0.8), uniforms)
    scored, _ = token_logprobs(hidden, weight, tokens, temperature=0.8)
    assert finite.all()
    assert torch.equal(sampled, scored)
