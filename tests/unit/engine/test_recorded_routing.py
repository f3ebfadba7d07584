"""What an engine says its tokens were routed to: of the passes that drew them, and what a trainer needs for their bits.

The trainer of these tests has routers and indexers that choose otherwise; only what it replays can give it the engine's
log-probabilities. Biases of routers and weights of indexers are what may differ: they decide who is chosen, and no
number besides.
"""

import asyncio

import pytest
import torch

from engine_cases import LockStepEngine
from longarc.config.engine import EngineConfig
from longarc.config.routing import RoutingConfig
from longarc.engine.embedded import EmbeddedEngine
from longarc.engine.kept import KeptCompletion
from longarc.engine.router import Router
from longarc.errors import ConfigError, EngineRequestError
from longarc.models.build import build_model
from longarc.models.hf_weights import save_weights
from longarc.models.kernels.native import native
from longarc.models.layout import Layout
from longarc.models.projection import token_logprobs
from longarc.models.routed_rows import RoutingShape
from longarc.records.sampling import Sampling, WeightSource
from longarc.runs.checkpoint import file_sha256
from model_cases import apt_drafter, other_chooser, sharpened, small_glm, small_llama

BOTH = "experts_and_keys"
CONFIG = small_glm(num_hidden_layers=4, index_topk_pattern="FSFS")
PROMPT = [(7 * i) % 61 + 1 for i in range(40)]


@pytest.fixture(params=["native", "eager"])
def _path(request, monkeypatch):
    if request.param == "eager":
        monkeypatch.setenv("LONGARC_NATIVE", "0")


def model_of(version=0, config=CONFIG):
    return sharpened(build_model(config, seed=version))


def open_engine(model, *, kind=EmbeddedEngine, records=BOTH, attention="sparse", **settings):
    return kind(
        model,
        EngineConfig(**{"max_running": 4, "max_prefill_tokens": 32, **settings}),
        max_context_tokens=160,
        records_routing=records,
        attention=attention,
    )


def asking(num=30, **changes):
    return Sampling(
        **{"max_new_tokens": num, "returns_routing_from": 0, "seed": 3, "temperature": 0.8}
        | changes
    )


async def complete(engine, prompt, sampling, session_id="s"):
    stream = engine.stream(prompt, sampling, session_id=session_id)
    return [piece async for piece in stream]


def joined(pieces):
    ids = [t for piece in pieces for t in piece.token_ids]
    logprobs = [x for piece in pieces for x in piece.logprobs]
    return ids, logprobs, [blob for piece in pieces for blob in piece.routing]


@torch.no_grad()
def trainer_logprobs(model, prompt, ids, blobs, *, attention="sparse", kept=BOTH, temperature=0.8):
    """Return what the trainer computes of the sampled tokens; without blobs, with its own choices."""
    tokens = torch.tensor([*prompt, *ids])[:-1]
    shape = RoutingShape.of(model.config, kept, attention=attention)
    routing = None if blobs is None else shape.decode(blobs, range(len(blobs)))
    output = model(tokens, Layout.documents([len(tokens)]), replayed=routing, attention=attention)
    logprobs, _ = token_logprobs(
        output.hidden[len(prompt) - 1 :],
        model.output_weight,
        torch.tensor(ids),
        temperature=temperature,
    )
    return logprobs.tolist()


def assert_replays(model, prompt, pieces, **how):
    """The engine's bits come out of a trainer that chooses otherwise, and only by replay."""
    ids, logprobs, blobs = joined(pieces)
    assert len(blobs) == len(prompt) + len(ids) - 1
    trainer = other_chooser(model)
    # Torch's own products round a row otherwise in other company, with and without replay.
    tolerance = 0.0 if native() else 1e-5
    found = trainer_logprobs(trainer, prompt, ids, blobs, **how)
    assert found == pytest.approx(logprobs, rel=0, abs=tolerance)
    alone = trainer_logprobs(trainer, prompt, ids, None, **how)
    assert max(abs(a - b) for a, b in zip(alone, logprobs, strict=True)) > 1e-3


@pytest.mark.usefixtures("_path")
@pytest.mark.parametrize(("records", "attention"), [(BOTH, "sparse"), ("experts", "dense")])
def test_a_trainer_that_would_choose_otherwise_computes_the_same_bits(records, attention):
    async def go():
        model = model_of()
        async with open_engine(model, records=records, attention=attention) as engine:
            pieces = await complete(engine, PROMPT, asking())
        assert_replays(model, PROMPT, pieces, kept=records, attention=attention)

    asyncio.run(go())


@pytest.mark.usefixtures("_path")
def test_a_prompt_found_in_the_cache_has_its_choices_there():
    async def go():
        model = model_of()
        # Pages of 16: whole ones are shared, and the beginning of the one in which prompts part is copied.
        async with open_engine(model, page_tokens=16) as engine:
            quiet = Sampling(max_new_tokens=20, seed=1, temperature=0.8)
            first = joined(await complete(engine, PROMPT, quiet))
            assert first[2] == []
            longer = [*PROMPT, *first[0], 5, 6, 7]
            for prompt in ([*PROMPT[:37], 1, 2, 3], longer):
                pieces = await complete(engine, prompt, asking())
                assert pieces[0].num_cached_tokens >= 32
                assert_replays(model, prompt, pieces)

    asyncio.run(go())


def test_only_what_was_asked_for_is_returned_and_pieces_continue_one_another():
    async def go():
        model = model_of()
        async with open_engine(model) as engine:
            whole = joined(await complete(engine, PROMPT, asking()))
            pieces = await complete(
                engine, PROMPT, asking(returns_routing_from=25, stream_interval_tokens=4)
            )
        assert len(pieces) > 3
        assert [len(piece.routing) for piece in pieces[1:]] == [
            len(piece.token_ids) for piece in pieces[1:]
        ]
        assert joined(pieces) == (*whole[:2], whole[2][25:])

    asyncio.run(go())


@pytest.mark.usefixtures("_path")
def test_preempted_sequences_keep_the_choices_that_drew_their_tokens():
    async def go():
        model = model_of()
        prompts = [[(i * 5 + k) % 61 + 1 for i in range(30)] for k in range(4)]
        async with open_engine(model, page_tokens=16, cache_tokens=176) as engine:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(complete(engine, prompt, asking(60), session_id=str(k)))
                    for k, prompt in enumerate(prompts)
                ]
            assert (await engine.health()).num_preemptions > 0
        for prompt, task in zip(prompts, tasks, strict=True):
            assert_replays(model, prompt, task.result())

    asyncio.run(go())


def published(model, path):
    save_weights(model, str(path))
    return WeightSource(path=str(path), sha256=file_sha256(path))


@pytest.mark.parametrize("on_update", ["continue", "recompute", "finish"])
def test_each_token_has_the_choices_of_the_weights_that_drew_it(tmp_path, on_update):
    """The sequence of before is replayed by its own weights, and what new ones drew by those, on the cache they had."""

    async def go():
        source = published(model_of(1), tmp_path / "1.safetensors")
        async with open_engine(model_of(0), kind=LockStepEngine) as engine:
            stream = engine.stream(
                PROMPT, asking(60, stream_interval_tokens=5, on_update=on_update), session_id="s"
            )
            pieces = [await anext(stream)]
            update = asyncio.create_task(engine.update_weights(source, policy_version=1))
            pieces += [piece async for piece in stream]
            await update
        return pieces

    pieces = asyncio.run(go())
    versions = [piece.policy_version for piece in pieces]
    assert set(versions) == ({0} if on_update == "finish" else {0, 1})
    num_before = versions.index(1) if 1 in versions else len(pieces)
    before, after = pieces[:num_before], pieces[num_before:]
    assert_replays(model_of(0), PROMPT, before)
    ids, _, blobs = joined(pieces)
    assert len(blobs) == len(PROMPT) + len(ids) - 1
    if on_update == "recompute":
        prompt = [*PROMPT, *joined(before)[0]]
        ids, _, blobs = joined(after)
        # Of what the new weights computed again nothing was kept: those choices drew no token of before.
        fresh = trainer_choices(model_of(1), [*prompt, *ids])
        assert blobs == fresh[len(prompt) - 1 :]
        assert joined(before)[2] == trainer_choices(model_of(0), prompt)


@torch.no_grad()
def trainer_choices(model, ids):
    """Return the blobs of what a pass over all but the last token chooses."""
    tokens = torch.tensor(ids[:-1])
    output = model(tokens, Layout.documents([len(tokens)]), records_routing=True)
    shape = RoutingShape.of(model.config, BOTH, attention="sparse")
    return shape.encode(output.routing.experts.numpy(), output.routing.keys.numpy(), 0)


@pytest.mark.usefixtures("_path")
@pytest.mark.parametrize("changes", [{}, {"top_p": 0.9}])
def test_drafts_that_were_refused_leave_no_choice(changes):
    async def go():
        model = apt_drafter(num_hidden_layers=4, index_topk_pattern="FSFS")
        async with open_engine(
            model, num_speculative_tokens=3, min_draft_probability=0.0
        ) as engine:
            pieces = await complete(engine, PROMPT, asking(50, **changes))
            health = await engine.health()
        assert 0 < sum(health.num_accepted) < sum(health.num_drafted)
        if not changes:
            assert_replays(model, PROMPT, pieces)
        ids, _, blobs = joined(pieces)
        # The same tokens without drafts: the same choices.
        assert blobs == trainer_choices(model, [*PROMPT, *ids])

    asyncio.run(go())


def test_what_goes_on_at_another_engine_has_every_choice_once():
    async def go():
        model = model_of()
        async with open_engine(model) as alone:
            expected = joined(await complete(alone, PROMPT, asking(60)))
        async with open_engine(model) as stays:
            leaves = open_engine(model)
            async with leaves, Router({"a": leaves}, RoutingConfig(keep_every_tokens=4)) as first:
                stream = first.stream(PROMPT, asking(60), session_id="s")
                begun = [await anext(stream) for _ in range(3)]
                await stream.aclose()
            kept = KeptCompletion(PROMPT, asking(60), keep_every_tokens=4)
            for piece in begun:
                kept.add(piece)
            rest = await complete(stays, *kept.request())
        assert joined([*begun, *rest]) == expected

    asyncio.run(go())


def test_an_engine_that_records_nothing_refuses_to_say_so_later():
    async def go():
        async with open_engine(model_of(), records="none") as engine:
            with pytest.raises(EngineRequestError, match="does not record what tokens are routed"):
                await complete(engine, PROMPT, asking())
        async with open_engine(model_of()) as engine:
            with pytest.raises(EngineRequestError, match="ask from 39 on at most"):
                await complete(engine, PROMPT, asking(returns_routing_from=40))

    asyncio.run(go())


@pytest.mark.parametrize(
    ("config", "records", "attention", "message"),
    [
        (small_llama(), "experts", "dense", "routing of a llama model cannot be recorded"),
        (CONFIG, BOTH, "dense", "attends to every key, so that none are selected"),
        (small_glm(first_k_dense_replace=3), "experts", "sparse", "no layer with experts"),
    ],
)
def test_what_a_model_does_not_choose_cannot_be_recorded(config, records, attention, message):
    with pytest.raises(ConfigError, match=message):
        open_engine(model_of(config=config), records=records, attention=attention)
