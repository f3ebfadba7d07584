"""Products in bfloat16: what is rounded, in what order it is summed, and what that does not depend on."""

import pytest
import torch

from longarc.models.build import build_model
from longarc.models.kernels import rows, vocabulary
from longarc.models.kernels.native import native
from longarc.models.layout import Layout
from longarc.models.projection import project_logits, token_logprobs
from longarc.models.rounding import rounded
from model_cases import replay_in_random_company, sharpened, small_llama, small_qwen

needs_native = pytest.mark.skipif(native() is None, reason="the native kernels are not built")


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def chain(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return the sums as documented: pairs in order, the odd number of a pair first, rounded after each addition."""
    inputs = x.shape[1] + x.shape[1] % 2
    x_R, weight_R = (
        torch.nn.functional.pad(m.bfloat16().double(), (0, inputs - m.shape[1]))
        for m in (x, weight)
    )
    total = torch.zeros(len(x), len(weight))
    for first in range(0, inputs, 2):
        for k in (first + 1, first):
            total = (total.double() + x_R[:, k, None] * weight_R[None, :, k]).float()
    return total


@needs_native
@pytest.mark.parametrize(("inputs", "outputs"), [(1, 1), (7, 5), (32, 33), (65, 48), (96, 100)])
def test_sums_are_those_of_the_documented_order(inputs, outputs):
    x, weight = random(13, inputs), random(outputs, inputs, seed=1)
    assert torch.equal(rows.linear(x, weight, compute_dtype="bfloat16"), chain(x, weight))


@needs_native
@pytest.mark.parametrize("num_rows", [1, 2, 3, 5, 11, 12, 13, 37, 64])
def test_a_row_is_the_same_in_every_company(num_rows):
    x, weight = random(64, 70), random(50, 70, seed=1)
    whole = rows.linear(x, weight, compute_dtype="bfloat16")
    assert torch.equal(
        rows.linear(x[:num_rows], weight, compute_dtype="bfloat16"), whole[:num_rows]
    )
    assert torch.equal(
        rows.linear(x, weight[:num_rows], compute_dtype="bfloat16"), whole[:, :num_rows]
    )


@needs_native
def test_strides_of_the_weight_do_not_matter():
    x, weight = random(9, 66), random(40, 66, seed=1)
    across = weight.mT.contiguous().mT
    assert across.stride() != weight.stride()
    assert torch.equal(
        rows.linear(x, across, compute_dtype="bfloat16"),
        rows.linear(x, weight, compute_dtype="bfloat16"),
    )


@needs_native
def test_a_fault_is_handed_on():
    x, weight = random(4, 32), random(8, 32, seed=1)
    x[1, 3], x[2, 5] = float("nan"), float("inf")
    found = rows.linear(x, weight, compute_dtype="bfloat16")
    assert found.isfinite().all(dim=1).tolist() == [True, False, False, True]
    assert found[1].isnan().all()


def test_gradients_pass_the_rounding():
    x = random(5, 6).requires_grad_()
    rounded(x, "bfloat16").square().sum().backward()
    assert torch.equal(x.grad, 2 * x.detach().bfloat16().float())
    assert rounded(x, "float32") is x


@needs_native
def test_log_probabilities_are_those_of_the_logits_whether_the_weight_is_packed_or_not(monkeypatch):
    hidden, weight, targets = random(70, 24), random(300, 24, seed=1), torch.arange(70)
    logits = project_logits(hidden, weight, compute_dtype="bfloat16")
    packed, _ = token_logprobs(hidden, weight, targets, compute_dtype="bfloat16")
    monkeypatch.setattr(vocabulary, "PACKED_FLOATS", 0)
    sliced, _ = token_logprobs(hidden, weight, targets, compute_dtype="bfloat16")
    assert torch.equal(packed, sliced)
    expected = logits.double().log_softmax(dim=1).gather(1, targets[:, None])[:, 0]
    torch.testing.assert_close(packed.double(), expected, rtol=0, atol=1e-5)
    plain, _ = token_logprobs(hidden, weight, targets)
    assert not torch.equal(packed, plain)


CONFIGS = [
    small_llama(compute_dtype="bfloat16"),
    small_llama(compute_dtype="bfloat16", tie_word_embeddings=True, intermediate_size=70),
    small_qwen(compute_dtype="bfloat16", num_attention_heads=6, num_key_value_heads=1, head_dim=10),
]


@needs_native
@pytest.mark.parametrize("config", CONFIGS, ids=["llama", "tied", "qwen"])
@pytest.mark.parametrize("num_threads", [1, 2])
@torch.no_grad()
def test_decoding_and_training_compute_the_same_bits(config, num_threads):
    model = sharpened(build_model(config, seed=0))
    documents = [
        torch.randint(0, 64, (n,), generator=torch.Generator().manual_seed(n)) for n in (5, 33, 70)
    ]
    threads = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        found = torch.cat(replay_in_random_company(model, documents, seed=3))
        packed = model(torch.cat(documents), Layout.documents([len(d) for d in documents])).hidden
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(found, packed)


@needs_native
@pytest.mark.parametrize("config", CONFIGS, ids=["llama", "tied", "qwen"])
@torch.no_grad()
def test_the_eager_twin_rounds_alike(config, monkeypatch):
    model = sharpened(build_model(config, seed=0))
    ids, layout = torch.arange(60), Layout.documents([60])

    def logprobs():
        hidden = model(ids, layout).hidden
        return token_logprobs(
            hidden[:-1], model.output_weight, ids[1:], compute_dtype=model.compute_dtype
        )[0]

    found = logprobs()
    monkeypatch.setenv("LONGARC_NATIVE", "0")
    twin = logprobs()
    plain = build_model(config.model_copy(update={"compute_dtype": "float32"}), seed=0)
    plain.load_state_dict(model.state_dict())
    model = plain
    # What differs is the order of fp32 sums; where a sum lies between two numbers of bfloat16, that tips it over.
    assert (found - twin).abs().max() < 0.02
    assert (found - twin).abs().mean() < 0.2 * (found - logprobs()).abs().mean()


def test_gradients_of_a_model_are_near_those_of_float32(monkeypatch):
    ids, layout = torch.arange(40), Layout.documents([40])

    def gradient(compute_dtype, native_kernels):
        monkeypatch.setenv("LONGARC_NATIVE", native_kernels)
        model = build_model(small_llama(compute_dtype=compute_dtype), seed=0)
        hidden = model(ids, layout).hidden
        logprobs, _ = token_logprobs(
            hidden[:-1], model.output_weight, ids[1:], compute_dtype=model.compute_dtype
        )
        logprobs.sum().backward()
        return torch.cat([p.grad.flatten() for p in model.parameters()])

    exact = gradient("float32", "0")
    for native_kernels in "01":
        found = gradient("bfloat16", native_kernels)
        assert torch.cosine_similarity(found, exact, dim=0) > 0.999
