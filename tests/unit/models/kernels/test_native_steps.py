"""Several decode steps in one call are the same steps one at a time, and end when they should."""

import pytest
import torch

from longarc.errors import ContractError
from longarc.models.build import build_model
from longarc.models.kernels.native import native
from longarc.models.kernels.steps import Draws, Interrupt
from longarc.models.kernels.vocabulary import sample_rows
from model_cases import sharpened, small_glm, small_llama, small_qwen

pytestmark = pytest.mark.skipif(native() is None, reason="the native kernels are not built")

SLOTS = [2, 0]
FIRST = torch.tensor([5, 9])
TEMPERATURES = torch.tensor([0.7, 0.0])
NUM_STEPS = 6


@pytest.fixture(params=["glm", "llama", "qwen"])
def model(request):
    config = {"glm": small_glm, "llama": small_llama, "qwen": small_qwen}[request.param]()
    return sharpened(build_model(config, seed=3))


def prefilled(model):
    cache = model.new_cache(3, 64)
    ids = torch.randint(0, 64, (50,), generator=torch.Generator().manual_seed(1))
    model.extend(ids, SLOTS, [0, 0], [30, 20], cache)
    return cache


def draws(stop_ids=((), ()), num_steps=NUM_STEPS) -> Draws:
    uniforms = torch.rand(num_steps, 2, dtype=torch.float64, generator=torch.Generator())
    return Draws(temperatures=TEMPERATURES, uniforms=uniforms, stop_ids=stop_ids)


def all_at_once(model, **settings):
    return prefilled(model).steps(
        FIRST, SLOTS, [30, 20], draws(**settings), Interrupt(), is_sparse=True
    )


def test_steps_are_bitwise_the_steps_one_at_a_time(model):
    cache, tokens, expected = prefilled(model), FIRST, []
    for step, uniforms in enumerate(draws().uniforms):
        hidden = model.extend(tokens, SLOTS, [30 + step, 20 + step], [1, 1], cache)
        logits = model.logits(hidden, cache)
        tokens, logprobs, _ = sample_rows(logits, TEMPERATURES, uniforms)
        expected.append((tokens, logprobs))
    found = all_at_once(model)
    assert torch.equal(found.tokens, torch.stack([tokens for tokens, _ in expected]))
    assert torch.equal(found.logprobs, torch.stack([logprobs for _, logprobs in expected]))
    assert found.is_finite.all()


def test_no_step_follows_one_that_draws_a_stop_id(model):
    free = all_at_once(model).tokens[:, 1].tolist()
    stopped = all_at_once(model, stop_ids=((-1,), (70, free[3])))
    assert stopped.tokens[:, 1].tolist() == free[: free.index(free[3]) + 1]


def test_an_interrupt_ends_the_call_after_one_step(model):
    interrupt = Interrupt()
    interrupt.set()
    cache = prefilled(model)
    assert len(cache.steps(FIRST, SLOTS, [30, 20], draws(), interrupt, is_sparse=True).tokens) == 1
    interrupt.clear()
    assert len(cache.steps(FIRST, SLOTS, [30, 20], draws(), interrupt, is_sparse=True).tokens) == 6


def test_logits_that_are_not_finite_end_the_call(model):
    with torch.no_grad():
        model.model.norm.weight[0] = float("nan")
    found = all_at_once(model)
    assert len(found.tokens) == 1
    assert not found.is_finite.any()


def test_steps_that_do_not_fit_the_cache_are_refused(model):
    with pytest.raises(ContractError, match="do not fit"):
        all_at_once(model, num_steps=35)
