"""The native decoder: notices new weights, agrees with the eager path, keeps its numbers on two threads."""

import pytest
import torch

from longarc.errors import ContractError
from longarc.models.build import build_model
from longarc.models.cache import PagedCache
from longarc.models.kernels.decode import NativeDecoder
from longarc.models.kernels.native import native
from longarc.models.projection import project_logits, token_logprobs
from model_cases import YARN, sharpened, small_glm, small_llama, small_qwen

pytestmark = pytest.mark.skipif(native() is None, reason="the native kernels are not built")

CASES = {
    "glm": small_glm(index_topk=200),
    "odd glm": small_glm(
        index_topk=200, index_n_heads=3, index_head_dim=10, kv_lora_rank=20, n_shared_experts=0
    ),
    "shared glm": small_glm(num_hidden_layers=4, index_topk_pattern="FSSF", index_topk=200),
    "llama": small_llama(),
    "odd llama": small_llama(num_attention_heads=5, num_key_value_heads=1, head_dim=20),
    "tied llama": small_llama(tie_word_embeddings=True),
    "yarn glm": small_glm(index_topk=200, rope_scaling=YARN),
    "qwen2": small_llama(attention_bias="inputs"),
    "qwen3 with biases and yarn": small_qwen(),
    "odd qwen3": small_qwen(num_attention_heads=5, num_key_value_heads=1, head_dim=20),
}


@pytest.fixture(params=CASES)
def model(request):
    model = build_model(CASES[request.param], seed=3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("_proj.bias", "q_norm.weight", "k_norm.weight")):
                parameter += torch.linspace(-0.3, 0.3, len(parameter))
    return model


def run(model, cache, ids, *, attention="sparse"):
    """Fill two slots with prompts, then append single tokens."""
    first = model.extend(ids[:50], [2, 0], [0, 0], [30, 20], cache, attention=attention)
    later = [
        model.extend(
            ids[50 + 2 * i : 52 + 2 * i],
            [0, 2],
            [20 + i, 30 + i],
            [1, 1],
            cache,
            attention=attention,
        )
        for i in range(5)
    ]
    return torch.cat([first, *later])


def make_ids() -> torch.Tensor:
    return torch.randint(0, 64, (60,), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("attention", ["sparse", "dense"])
def test_the_native_cache_computes_what_the_eager_one_does(model, attention, monkeypatch):
    ours = model.new_cache(3, 64)
    assert isinstance(ours, NativeDecoder)
    found = run(model, ours, make_ids(), attention=attention)
    monkeypatch.setenv("LONGARC_NATIVE", "0")
    eager = model.new_cache(3, 64)
    assert type(eager) is PagedCache
    torch.testing.assert_close(
        found, run(model, eager, make_ids(), attention=attention), atol=1e-5, rtol=1e-5
    )


def test_changed_weights_are_packed_again(model):
    cache = model.new_cache(3, 64)
    run(model, cache, make_ids())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    assert torch.equal(
        run(model, cache, make_ids()), run(model, model.new_cache(3, 64), make_ids())
    )


def test_logits_of_the_cache_are_the_trainers_and_follow_the_weights(model):
    cache = model.new_cache(3, 64)
    for _ in range(2):
        hidden = run(model, cache, make_ids())
        assert torch.equal(model.logits(hidden, cache), project_logits(hidden, model.output_weight))
        with torch.no_grad():
            model.output_weight.mul_(0.5)


def test_two_threads_decode_the_same_numbers(model):
    sharpened(model)
    one = run(model, model.new_cache(3, 64), make_ids())
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        two = run(model, model.new_cache(3, 64), make_ids())
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(one, two)


@pytest.mark.parametrize("pattern", ["FFF", "FSF", "FSS"])
def test_a_long_prompt_in_chunks_is_a_long_prompt_at_once(pattern):
    model = sharpened(build_model(small_glm(index_topk_pattern=pattern), seed=3))
    ids = torch.randint(0, 64, (230,), generator=torch.Generator().manual_seed(1))
    whole = model.extend(ids, [0], [0], [230], model.new_cache(1, 230))
    cache = model.new_cache(1, 230)
    pieces = [
        model.extend(ids[start:stop], [0], [start], [stop - start], cache)
        for start, stop in ((0, 1), (1, 100), (100, 101), (101, 230))
    ]
    assert torch.equal(torch.cat(pieces), whole)


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("ends_only", [False, True])
def test_prompts_that_threads_share_give_the_same_numbers(model, threads, ends_only):
    """Long prompts go through the layers in chunks, of which a thread takes every other one."""
    sharpened(model)
    counts = [210, 1, 70, 130]
    ids = torch.randint(0, 64, (sum(counts),), generator=torch.Generator().manual_seed(1))

    def extend(**options):
        cache = model.new_cache(4, 232)
        new = model.extend(ids, [3, 0, 2, 1], [0] * 4, counts, cache, **options)
        then = model.extend(torch.arange(4), [3, 0, 2, 1], counts, [1] * 4, cache)
        return new, then

    expected, expected_then = extend()
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        new, then = extend(ends_only=ends_only)
    finally:
        torch.set_num_threads(before)
    ends = torch.tensor(counts).cumsum(0) - 1
    assert torch.equal(new, expected[ends] if ends_only else expected)
    assert torch.equal(then, expected_then)


def test_other_dtypes_take_the_eager_path():
    model = build_model(small_glm(), seed=3, dtype=torch.float64)
    assert type(model.new_cache(1, 16)) is PagedCache


@pytest.mark.parametrize("token", [-1, 64])
def test_ids_outside_the_vocabulary_are_refused(model, token):
    cache = model.new_cache(1, 8)
    with pytest.raises(ContractError, match="vocabulary"):
        model.extend(torch.tensor([3, token]), [0], [0], [2], cache)
    with pytest.raises(ContractError, match="vocabulary"):
        token_logprobs(torch.zeros(1, 32), model.output_weight, torch.tensor([token]))


def test_a_cache_does_not_outlive_the_dtype_of_its_model(model):
    cache = model.new_cache(1, 8)
    model.to(torch.float64)
    with pytest.raises(ContractError, match="make a new cache"):
        model.extend(torch.tensor([3]), [0], [0], [1], cache)


@pytest.mark.parametrize("name", ["q_b_proj", "q_proj", "o_proj", "down_proj"])
def test_a_fault_in_the_weights_reaches_the_logits(model, name):
    broken = [p for n, p in model.named_parameters() if name in n]
    if not broken:
        pytest.skip("this family has no such weight")
    with torch.no_grad():
        broken[0].fill_(float("nan"))
    cache = model.new_cache(1, 8)
    hidden = model.extend(torch.tensor([3, 4]), [0], [0], [2], cache)
    assert not torch.isfinite(model.logits(hidden, cache)).any()
