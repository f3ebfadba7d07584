"""A cache rounded to FP8: which numbers are rounded and how, by both paths, and what becomes of the policy."""

import pytest
import torch

from engine_cases import LockStepEngine
from longarc.algos.fp8 import fp8_rounded_rows
from longarc.config.engine import EngineConfig
from longarc.config.model import AttentionPattern
from longarc.errors import ConfigError
from longarc.models.build import build_model
from longarc.models.cache import PagedCache
from longarc.models.conversion import hybrid_config
from longarc.models.kernels.paged_tables import BlockedPagedCache
from longarc.models.layout import Layout
from longarc.models.projection import token_logprobs
from longarc.records.sampling import Sampling
from model_cases import sharpened, small_glm, small_llama

CONFIGS = {"glm": small_glm(), "llama": small_llama()}
PROMPT = list(range(1, 41))


@pytest.fixture(params=CONFIGS)
def config(request):
    return CONFIGS[request.param]


def model_of(config):
    return sharpened(build_model(config, seed=3)).eval().requires_grad_(False)


def cache_of(model, *, is_rounded, is_native=True):
    if is_native:
        cache = model.new_cache(1, 64)
        if not isinstance(cache, BlockedPagedCache):
            pytest.skip("native kernels are not built")
    else:
        cache = PagedCache(
            model.cache_widths(),
            model.new_cache(1, 64).shape,
            layers=model.cache_layers(),
            num_layers=model.config.num_hidden_layers,
            dtype=torch.float32,
            device=torch.device("cpu"),
        )
    if is_rounded:
        cache.rounding = model.fp8_rows()
    return cache


def first_rows(cache):
    """The rows of the prompt in the first layer, which depend on nothing that was cached: kind -> [head, token, number]."""
    if not isinstance(cache, BlockedPagedCache):
        return {
            name: cache.table(name, 0)[: len(PROMPT)]
            for name in cache._rows
            if 0 in cache._place[name]
        }
    rows = {}
    for name, table in cache.layer(0).items():
        page = table[0]
        if cache._tables[name].is_blocked:
            page = page.transpose(-1, -2).flatten(1, 2)
        rows[name] = page[:, : len(PROMPT)]
    return rows


@pytest.mark.parametrize("is_native", [True, False])
def test_rows_are_rounded_as_the_formula_says_bit_for_bit(config, is_native):
    model = model_of(config)
    seen = {}
    for is_rounded in (False, True):
        cache = cache_of(model, is_rounded=is_rounded, is_native=is_native)
        model.extend(torch.tensor(PROMPT), [0], [0], [len(PROMPT)], cache)
        seen[is_rounded] = first_rows(cache)
    for name, whole in seen[False].items():
        if config.family == "llama":
            head = model.fp8_rows()[name].block_size
            expected = fp8_rounded_rows(whole, block_size=head)
        else:
            width = {"latents": config.kv_lora_rank, "latent": config.kv_lora_rank}.get(name)
            expected = whole.clone()
            expected[..., :width] = fp8_rounded_rows(whole[..., :width])
        assert torch.equal(seen[True][name], expected), name
        assert not torch.equal(seen[True][name], whole), name


def test_tokens_computed_together_or_one_by_one_leave_the_same_states(config):
    model = model_of(config)
    together = model.extend(
        torch.tensor(PROMPT), [0], [0], [len(PROMPT)], cache_of(model, is_rounded=True)
    )
    cache = cache_of(model, is_rounded=True)
    alone = [
        model.extend(torch.tensor([token]), [0], [position], [1], cache)
        for position, token in enumerate(PROMPT)
    ]
    assert torch.equal(together, torch.cat(alone))


def scored(model, ids):
    whole = torch.tensor(PROMPT + ids)
    hidden = model(whole, Layout.documents([len(whole)])).hidden
    return token_logprobs(hidden[:-1], model.output_weight, whole[1:])[0][len(PROMPT) - 1 :]


@pytest.mark.parametrize(("quantisation", "differs"), [("none", False), ("fp8", True)])
async def test_a_policy_with_a_rounded_cache_is_another_than_the_trainers(
    config, quantisation, differs
):
    settings = EngineConfig(max_running=4, cache_quantisation=quantisation)
    async with LockStepEngine(model_of(config), settings, max_context_tokens=128) as engine:
        asked = Sampling(max_new_tokens=80, seed=5)
        pieces = [piece async for piece in engine.stream(PROMPT, asked, session_id="s")]
    ids = [token for piece in pieces for token in piece.token_ids]
    logprobs = torch.tensor([value for piece in pieces for value in piece.logprobs])
    log_ratio = scored(model_of(config), ids) - logprobs
    k3 = (log_ratio.expm1() - log_ratio).mean()
    assert (log_ratio.abs().mean() > 1e-3) == (k3 > 1e-6) == differs
    assert differs or log_ratio.abs().max() < 5e-5


async def test_the_cache_of_other_models_is_refused():
    layers = "S" + "F" * (small_llama().num_hidden_layers - 1)
    model = build_model(hybrid_config(small_llama(), AttentionPattern(layers=layers)), seed=3)
    with pytest.raises(
        ConfigError, match=r"cache_quantisation='fp8': the cache of a .* is not rounded"
    ):
        LockStepEngine(
            model, EngineConfig(max_running=4, cache_quantisation="fp8"), max_context_tokens=64
        )
