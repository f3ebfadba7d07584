"""Who cannot be computed ends alone, and what it is told says where the numbers went wrong."""

import asyncio
import re

import pytest
import torch

from engine_cases import LockStepEngine
from longarc.config.engine import EngineConfig
from longarc.config.model import AttentionPattern
from longarc.engine.faults import fault_of
from longarc.engine.pages import Ids
from longarc.errors import EngineFaultError, EngineLostError
from longarc.models.build import build_model
from longarc.models.conversion import hybrid_config
from longarc.records.sampling import Sampling
from model_cases import sharpened, small_glm, small_llama

CONFIGS = {
    "glm": small_glm(),
    "llama": small_llama(),
    "hybrid": hybrid_config(
        small_llama(num_hidden_layers=4),
        AttentionPattern(layers="FSGD", window=16, chunk_tokens=16),
    ),
}
POISON = 63
"""Token of the prompt with which no pass over it can be computed."""


@pytest.fixture(params=CONFIGS)
def model(request):
    return sharpened(build_model(CONFIGS[request.param], seed=3))


def open_engine(model, **settings):
    settings = {"max_running": 8, "max_prefill_tokens": 64, **settings}
    return LockStepEngine(model, EngineConfig(**settings), max_context_tokens=96)


async def complete(engine, prompt, *, session="s", **sampling):
    asked = Sampling(**{"max_new_tokens": 12, "seed": 5, **sampling})
    pieces = [piece async for piece in engine.stream(prompt, asked, session_id=session)]
    return [token for piece in pieces for token in piece.token_ids]


def together(engine, prompts):
    return asyncio.gather(
        *(complete(engine, p, session=f"{i}", seed=i) for i, p in enumerate(prompts)),
        return_exceptions=True,
    )


def poisoned_prefill(model):
    """Let every pass over prompts fail in which the poison is."""
    extend = model.extend

    def broken(token_ids, *args, **kwargs):
        if kwargs.get("ends_only") and POISON in token_ids:
            raise OverflowError("poison")
        return extend(token_ids, *args, **kwargs)

    model.extend = broken


PROMPTS = [[i + 1, *range(10 + i)] for i in range(5)]


@pytest.mark.parametrize("guilty", [{2}, {0, 4}, set(range(5))])
async def test_a_prompt_that_cannot_be_computed_ends_alone(model, guilty):
    async with open_engine(model) as engine:
        expected = await together(engine, PROMPTS)
    poisoned_prefill(model)
    prompts = [[*p, POISON] if i in guilty else p for i, p in enumerate(PROMPTS)]
    async with open_engine(model) as engine:
        found = await together(engine, prompts)
        assert engine.failure is None
        assert await complete(engine, [1, 2])
        health = await engine.health()
    for i, result in enumerate(found):
        if i in guilty:
            assert type(result) is EngineFaultError
            assert re.search(
                rf"session {i} could not be computed.*OverflowError: poison", str(result)
            )
        else:
            assert result == expected[i]
    assert (health.num_running, health.num_used_pages) == (0, 0)


async def test_a_sequence_whose_decoding_raises_ends_alone_with_the_tokens_it_has(
    model, monkeypatch
):
    from longarc.engine import computing

    async with open_engine(model) as engine:
        expected = await together(engine, PROMPTS)
    decode = computing.decode

    def broken(model, cache, requests, **kwargs):
        if any(r.session_id == "3" and r.num_sampled >= 4 for r in requests):
            raise OverflowError("poison")
        return decode(model, cache, requests, **kwargs)

    monkeypatch.setattr("longarc.engine.computing.decode", broken)
    tokens = []

    async def watched():
        asked = Sampling(max_new_tokens=12, seed=3, stream_interval_tokens=1)
        async for piece in engine.stream(PROMPTS[3], asked, session_id="3"):
            tokens.extend(piece.token_ids)

    async with open_engine(model) as engine:
        others = [complete(engine, p, session=f"{i}", seed=i) for i, p in enumerate(PROMPTS)]
        others[3].close()
        found = await asyncio.gather(*others[:3], watched(), others[4], return_exceptions=True)
        assert engine.failure is None
    assert type(found[3]) is EngineFaultError
    # Where it had to begin again, the pass over its tokens drew one more before decoding raised.
    assert tokens == expected[3][: len(tokens)]
    assert len(tokens) in (4, 5)
    assert [found[i] for i in (0, 1, 2, 4)] == [expected[i] for i in (0, 1, 2, 4)]


async def test_where_nothing_can_be_computed_it_is_the_engine(model, monkeypatch):
    def broken(*_, **__):
        raise OverflowError("too large")

    monkeypatch.setattr("longarc.engine.computing.decode", broken)
    async with open_engine(model) as engine:
        found = await together(engine, PROMPTS)
        await engine.failed()
    kinds = [type(result) for result in found]
    assert kinds.count(EngineFaultError) == 1
    assert kinds.count(EngineLostError) == len(PROMPTS) - 1


# ----------------------------------------------------------------------------- layers by name


def where(model, tokens, attention="sparse"):
    ids: Ids = torch.tensor(tokens).numpy()
    return fault_of(model, ids, attention=attention)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("model.embed_tokens.weight", r"that of the embedding, whose weight weight holds"),
        (
            "model.layers.1.self_attn.o_proj.weight",
            r"that of the attention of layer 1, whose weight o_proj.weight holds numbers",
        ),
        (
            "model.layers.0.mlp.down_proj.weight",
            r"that of the feed-forward of layer 0, whose weight down_proj.weight holds",
        ),
        (
            "model.layers.1.input_layernorm.weight",
            r"that of the norm input_layernorm of layer 1, whose weight weight holds",
        ),
        ("model.norm.weight", r"that of the final norm, whose weight weight holds"),
    ],
)
def test_the_first_part_with_numbers_that_are_not_finite_is_named(model, name, message):
    weight = dict(model.named_parameters())[name]
    with torch.no_grad():
        weight.view(-1)[3] = float("nan")
    # Token 0 and its neighbours: an embedding is looked at only in its rows.
    assert re.search(message, where(model, [0, 1, 2, 3]))


def test_an_expert_and_a_head_are_named_too():
    model = sharpened(build_model(small_glm(), seed=3))
    with torch.no_grad():
        model.model.layers[2].mlp.experts.down_proj[:, 0, 0] = float("inf")
    assert "feed-forward of layer 2, whose weight experts.down_proj holds" in where(model, [1, 2])
    model = sharpened(build_model(small_glm(), seed=3))
    with torch.no_grad():
        model.lm_head.weight[7, 0] = float("inf")
    assert "that of the head, whose weight weight holds" in where(model, [1, 2])


def test_weights_that_are_finite_and_too_large_are_told_apart(model):
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight.fill_(3e38) if hasattr(
            model.model.layers[1].mlp, "down_proj"
        ) else model.model.layers[1].mlp.experts.down_proj.fill_(3e38)
    found = where(model, [1, 2, 3, 4])
    assert re.search(r"layer 1.* whose weights are finite: its numbers grew too large", found)


def test_where_the_tokens_give_finite_numbers_the_cache_is_named(model):
    assert "rows of the cache are at fault" in where(model, [1, 2, 3])


def test_a_pass_that_cannot_be_made_says_so_and_raises_nothing(model):
    assert "which layer it is cannot be said" in where(model, [1] * 300)


async def test_the_request_is_told_the_layer_and_the_others_go_on(model):
    healthy = model.model.embed_tokens.weight[POISON].clone()
    with torch.no_grad():
        model.model.embed_tokens.weight[POISON] = float("inf")
    async with open_engine(model) as engine:
        prompts = [p if i != 2 else [*p, POISON] for i, p in enumerate(PROMPTS)]
        found = await together(engine, prompts)
        with torch.no_grad():
            model.model.embed_tokens.weight[POISON] = healthy
        again = await complete(engine, prompts[2], seed=2)
    assert type(found[2]) is EngineFaultError
    assert re.search(
        r"not finite at token 0 of session 2, policy version 0: the first output .* that of the embedding",
        str(found[2]),
    )
    assert all(len(found[i]) == 12 for i in (0, 1, 3, 4))
    assert len(again) == 12
