"""Speculative decoding in the engine: whatever is drafted, a request gets what it asked for and nobody notices."""

import asyncio

import pytest
import torch

from engine_cases import LockStepEngine
from longarc.config.engine import EngineConfig
from longarc.engine.sampler import Stream, uniforms
from longarc.engine.token_text import TokenText
from longarc.errors import ConfigError, EngineFaultError
from longarc.models.build import build_model
from longarc.models.hf_weights import save_weights
from longarc.models.kernels.native import native
from longarc.models.layout import Layout
from longarc.models.projection import token_logprobs
from longarc.records.sampling import Sampling, WeightSource
from longarc.runs.checkpoint import file_sha256
from model_cases import apt_drafter, small_glm, small_llama

PROMPT = [5, 9, 2, 33, 17, 40, 8]
EAGER_TOO = pytest.mark.usefixtures("kernels")


@pytest.fixture(params=["native", "eager"])
def kernels(request, monkeypatch):
    """Run the test with the native kernels and without them."""
    if request.param == "eager":
        monkeypatch.setenv("LONGARC_NATIVE", "0")


def make_engine(
    model=None,
    *,
    drafts=4,
    least=0.0,
    context=160,
    text=None,
    attention="sparse",
    **settings,
):
    settings = {"cache_tokens": 2048, "max_running": 4, "max_prefill_tokens": 32, **settings}
    return LockStepEngine(
        apt_drafter() if model is None else model,
        EngineConfig(num_speculative_tokens=drafts, min_draft_probability=least, **settings),
        max_context_tokens=context,
        attention=attention,
        text=text,
    )


async def complete(engine, prompt=PROMPT, *, session="s", **sampling):
    sampling = {"max_new_tokens": 60, "seed": 5, **sampling}
    return [
        piece async for piece in engine.stream(prompt, Sampling(**sampling), session_id=session)
    ]


def ids_of(pieces):
    return [token for piece in pieces for token in piece.token_ids]


def logprobs_of(pieces):
    return [value for piece in pieces for value in piece.logprobs]


def both(pieces):
    return ids_of(pieces), logprobs_of(pieces)


@EAGER_TOO
@pytest.mark.parametrize("attention", ["sparse", "dense"])
async def test_greedy_output_is_that_without_drafts(attention):
    async with make_engine(drafts=0, attention=attention) as engine:
        plain = await complete(engine, temperature=0.0)
    for drafts, least in ((1, 0.0), (4, 0.0), (7, 0.02)):
        async with make_engine(drafts=drafts, least=least, attention=attention) as engine:
            pieces = await complete(engine, temperature=0.0)
            health = await engine.health()
        assert both(pieces) == both(plain)
        assert health.num_accepted[0] > 0
    assert len(set(ids_of(plain))) > 3


@EAGER_TOO
@pytest.mark.parametrize("extra", [{}, {"top_p": 0.9}, {"returns_raw_logprobs": True}])
async def test_reported_logprobs_are_the_ones_a_trainer_computes(extra):
    async with make_engine() as engine:
        pieces = await complete(engine, temperature=0.8, returns_kept_ids=True, **extra)
        health = await engine.health()
    ids, model = PROMPT + ids_of(pieces), apt_drafter()
    tokens = torch.tensor(ids)
    with torch.no_grad():
        hidden = model(tokens, Layout.documents([len(ids)])).hidden[:-1]
        plain, _ = token_logprobs(hidden, model.output_weight, tokens[1:], temperature=0.8)
        raw, _ = token_logprobs(hidden, model.output_weight, tokens[1:])
        rows = torch.log_softmax(hidden @ model.output_weight.T / 0.8, dim=-1)
    begin = len(PROMPT) - 1
    if "top_p" not in extra and native() is not None:
        assert logprobs_of(pieces) == plain[begin:].tolist()
    kept = [ids for piece in pieces for ids in piece.kept_ids]
    for row, (token, logprob) in enumerate(zip(ids_of(pieces), logprobs_of(pieces), strict=True)):
        among = torch.tensor(kept[row] or range(64))
        own = rows[begin + row]
        assert token in among
        assert logprob == pytest.approx(float(own[token] - own[among].logsumexp(0)), abs=1e-5)
    if extra == {"returns_raw_logprobs": True}:
        found = [value for piece in pieces for value in piece.raw_logprobs]
        assert found == pytest.approx(raw[begin:].tolist(), abs=1e-5)
    assert 0 < health.num_accepted[0] < health.num_drafted[0]


@EAGER_TOO
@pytest.mark.parametrize("least", [0.0, 0.2])
async def test_company_changes_nothing_for_a_request(least):
    asked = [
        {"seed": i, "max_new_tokens": 10 + 7 * i, **extra}
        for i, extra in enumerate([{}, {"top_k": 5}, {"temperature": 0.5}, {"min_p": 0.1}, {}, {}])
    ]
    prompts = [[7, 8, 9, *range(n)] for n in (3, 30, 17, 50, 11, 29)]
    async with make_engine(least=least) as engine:
        alone = [
            both(await complete(engine, p, session=f"a{i}", **sampling))
            for i, (p, sampling) in enumerate(zip(prompts, asked, strict=True))
        ]
    async with make_engine(least=least) as engine:
        together = await asyncio.gather(
            *(
                complete(engine, p, session=f"b{i}", **sampling)
                for i, (p, sampling) in enumerate(zip(prompts, asked, strict=True))
            )
        )
    for (ids, logprobs), pieces in zip(alone, together, strict=True):
        assert ids_of(pieces) == ids
        assert logprobs_of(pieces) == pytest.approx(logprobs, abs=1e-5)


@pytest.mark.parametrize("extra", [{}, {"top_k": 20}])
async def test_what_is_sampled_does_not_depend_on_how_it_is_handed_over(extra):
    async with make_engine() as engine:
        whole = await complete(engine, **extra)
        pieces = await complete(engine, stream_interval_tokens=1, **extra)
    assert both(pieces) == both(whole)
    sizes = [len(piece.token_ids) for piece in pieces]
    assert len(pieces[0].token_ids) == 1
    assert 1 < max(sizes) <= 5


@pytest.mark.parametrize("extra", [{}, {"top_k": 20}])
async def test_a_completion_that_went_on_elsewhere_at_a_piece_is_the_same(extra):
    async with make_engine() as engine:
        pieces = await complete(engine, stream_interval_tokens=9, **extra)
        whole = ids_of(pieces)
    begun = 0
    for piece in pieces[:-1]:
        begun += len(piece.token_ids)
        async with make_engine() as engine:
            rest = await complete(
                engine,
                PROMPT + whole[:begun],
                max_new_tokens=60 - begun,
                num_sampled_before=begun,
                **extra,
            )
        assert ids_of(rest) == whole[begun:]


@pytest.mark.parametrize("extra", [{}, {"top_k": 60}])
async def test_a_stop_id_ends_the_completion_inside_accepted_drafts(extra):
    async with make_engine() as engine:
        pieces = await complete(engine, stream_interval_tokens=1, **extra)
        free = ids_of(pieces)
        ends_inside = 0
        for stop_id in sorted(set(free)):
            stopped = await complete(engine, session="t", stop_ids=(stop_id,), **extra)
            assert ids_of(stopped) == free[: free.index(stop_id) + 1]
            assert stopped[-1].finish_reason == "stop"
            where = free.index(stop_id) + 1
            ends_inside += where not in round_ends(pieces)
        # What follows goes on from what the stopped ones left in the cache.
        assert ids_of(await complete(engine, session="u", **extra)) == free
    assert ends_inside > 3


def round_ends(pieces):
    ends, count = set(), 0
    for piece in pieces:
        count += len(piece.token_ids)
        ends.add(count)
    return ends


async def test_a_stop_string_ends_the_completion_inside_accepted_drafts():
    def token_bytes(token_id: int) -> bytes:
        return bytes([48 + token_id])

    async with make_engine(text=TokenText(token_bytes)) as engine:
        free = ids_of(await complete(engine))
        for end in range(3, 40):
            text = b"".join(map(token_bytes, free)).decode()
            stop = text[end - 2 : end]
            stopped = await complete(engine, session="t", stop_strings=(stop,))
            assert ids_of(stopped) == free[: text.index(stop) + 2]
            assert stopped[-1].finish_reason == "stop"


@EAGER_TOO
@pytest.mark.parametrize("extra", [{}, {"min_p": 1e-6}])
async def test_a_budget_ends_the_completion_inside_a_round(extra):
    async with make_engine() as engine:
        for budget in range(1, 9):
            pieces = await complete(engine, max_new_tokens=budget, **extra)
            assert len(ids_of(pieces)) == budget
            assert pieces[-1].finish_reason == "length"


async def test_drafts_never_reach_beyond_the_context():
    async with make_engine(context=40) as engine:
        pieces = await complete(engine, max_new_tokens=33)
        assert len(ids_of(pieces)) == 33
        assert len(ids_of(await complete(engine, max_new_tokens=33, top_k=63))) == 33


async def test_the_next_turn_pays_only_for_new_tokens():
    prompt = list(range(1, 41))
    async with make_engine() as engine:
        first = ids_of(await complete(engine, prompt, max_new_tokens=30))
        second = await complete(engine, [*prompt, *first, 3, 4])
        assert second[0].num_cached_tokens >= len(prompt) + len(first) - 1
    async with make_engine() as engine:
        fresh = await complete(engine, [*prompt, *first, 3, 4])
    assert both(second) == both(fresh)


async def test_a_group_computes_its_prompt_once_and_drafts_from_it():
    prompt = list(range(1, 61))
    async with make_engine() as engine:
        group = await asyncio.gather(
            *(complete(engine, prompt, session=f"g{i}", seed=i) for i in range(4))
        )
    assert sorted(pieces[0].num_cached_tokens for pieces in group) == [0, 59, 59, 59]
    for seed, pieces in enumerate(group):
        async with make_engine() as engine:
            assert both(await complete(engine, prompt, seed=seed)) == both(pieces)


@pytest.mark.parametrize("extra", [{}, {"top_k": 30}])
async def test_preemption_changes_nothing(extra):
    prompts = [[i, *range(20)] for i in range(4)]
    async with make_engine(cache_tokens=160, page_tokens=16) as engine:
        pressed = await asyncio.gather(
            *(complete(engine, p, session=f"s{i}", **extra) for i, p in enumerate(prompts))
        )
        assert (await engine.health()).num_preemptions > 0
    async with make_engine() as engine:
        for prompt, pieces in zip(prompts, pressed, strict=True):
            assert both(await complete(engine, prompt, **extra)) == both(pieces)


async def test_weights_change_between_rounds_and_the_rest_is_sampled_by_the_new_ones(tmp_path):
    path = tmp_path / "new.safetensors"
    save_weights(apt_drafter(seed=4), str(path))
    source = WeightSource(path=str(path), sha256=file_sha256(path))
    async with make_engine() as engine:
        pieces = []
        asked = Sampling(max_new_tokens=100, stream_interval_tokens=4, seed=3)
        async for piece in engine.stream(PROMPT, asked, session_id="s"):
            pieces.append(piece)
            if len(pieces) == 2:
                await engine.update_weights(source, policy_version=7)
        # What a new request drafts from are rows of new weights alone.
        after = await complete(engine)
    versions = [piece.policy_version for piece in pieces]
    assert set(versions) == {0, 7}
    assert versions == sorted(versions)
    assert len(ids_of(pieces)) == 100
    async with make_engine(apt_drafter(seed=4)) as engine:
        assert both(await complete(engine)) == both(after)


@pytest.mark.parametrize("extra", [{}, {"top_k": 50}])
@pytest.mark.parametrize("on_update", ["recompute", "finish"])
async def test_a_sequence_begins_again_or_ends_with_its_weights_as_it_asked(
    on_update, extra, tmp_path
):
    path = tmp_path / "new.safetensors"
    save_weights(apt_drafter(seed=4), str(path))
    source = WeightSource(path=str(path), sha256=file_sha256(path))
    async with make_engine() as engine:
        undisturbed = ids_of(await complete(engine, **extra))
        pieces = []
        asked = Sampling(
            max_new_tokens=60, stream_interval_tokens=4, seed=5, on_update=on_update, **extra
        )
        async for piece in engine.stream(PROMPT, asked, session_id="t"):
            pieces.append(piece)
            if len(pieces) == 2:
                await engine.update_weights(source, policy_version=1)
    num_old = sum(len(piece.token_ids) for piece in pieces if piece.policy_version == 0)
    found = ids_of(pieces)
    assert found[:num_old] == undisturbed[:num_old]
    if on_update == "finish":
        assert num_old == 60
        return
    assert 0 < num_old < 60
    async with make_engine(apt_drafter(seed=4)) as engine:
        rest = await complete(
            engine,
            PROMPT + found[:num_old],
            max_new_tokens=60 - num_old,
            num_sampled_before=num_old,
            **extra,
        )
    assert ids_of(rest) == found[num_old:]


async def test_an_update_of_the_same_weights_changes_nothing(tmp_path):
    path = tmp_path / "same.safetensors"
    save_weights(apt_drafter(), str(path))
    source = WeightSource(path=str(path), sha256=file_sha256(path))
    async with make_engine() as engine:
        whole = await complete(engine)
        pieces = []
        asked = Sampling(max_new_tokens=60, stream_interval_tokens=4, seed=5)
        async for piece in engine.stream(PROMPT, asked, session_id="t"):
            pieces.append(piece)
            await engine.update_weights(source, policy_version=len(pieces))
    assert both(pieces) == both(whole)


@EAGER_TOO
@pytest.mark.parametrize("extra", [{}, {"top_k": 20}])
async def test_logits_that_are_not_finite_fault_the_request_and_not_the_engine(extra):
    model = apt_drafter()
    async with make_engine(model) as engine:
        free = ids_of(await complete(engine, **extra))
        healthy = model.model.embed_tokens.weight[free[20]].clone()
        model.model.embed_tokens.weight[free[20]] = float("nan")
        with pytest.raises(EngineFaultError, match="not finite"):
            await complete(engine, [3, 4, *PROMPT], session="t", **extra)
        model.model.embed_tokens.weight[free[20]] = healthy
        assert ids_of(await complete(engine, session="u", **extra)) == free


@EAGER_TOO
@pytest.mark.parametrize("extra", [{}, {"top_k": 20}, {"temperature": 0.0}])
async def test_an_mtp_layer_that_is_broken_costs_its_drafts_and_nothing_else(extra):
    model = apt_drafter()
    model.mtp.eh_proj.weight.data.fill_(float("nan"))
    async with make_engine(model) as engine:
        pieces = await complete(engine, **extra)
        health = await engine.health()
    assert len(ids_of(pieces)) == 60
    assert sum(health.num_accepted) == 0
    if "temperature" in extra:
        async with make_engine(drafts=0) as engine:
            assert both(await complete(engine, **extra)) == both(pieces)


@EAGER_TOO
@pytest.mark.parametrize("extra", [{}, {"top_k": 60}, {"temperature": 0.0}])
async def test_a_chain_ends_before_it_becomes_unlikely_and_behind_a_stop_id(extra):
    async def drafted(**settings):
        stop_ids = settings.pop("stop_ids", ())
        async with make_engine(**settings) as engine:
            await complete(engine, stop_ids=stop_ids, max_new_tokens=40, **extra)
            return (await engine.health()).num_drafted

    full, some, none = [await drafted(least=least) for least in (0.0, 0.02, 1.0)]
    assert len({*full}) <= 4  # what a budget takes off at the end
    assert some[0] > some[1] > 0
    assert some[3] * full[0] < full[3] * some[0]
    assert not any(none)
    # Every id ends the completion, so the first draft is the last one.
    assert (await drafted(stop_ids=tuple(range(64))))[1:] == (0, 0, 0)


@pytest.mark.skipif(native() is None, reason="the native kernels were not built")
@pytest.mark.parametrize(
    "extra", [{}, {"temperature": 0.6, "stop_ids": (11,)}, {"temperature": 0.0}]
)
async def test_the_rounds_in_torch_keep_what_the_native_ones_keep(extra):
    # Who asks for raw log-probabilities goes through the rounds in torch.
    async with make_engine(least=0.1) as engine:
        fast = await complete(engine, **extra)
        counts = (await engine.health()).num_accepted
    async with make_engine(least=0.1) as engine:
        slow = await complete(engine, returns_raw_logprobs=True, **extra)
        assert (await engine.health()).num_accepted == counts
    assert both(slow) == both(fast)


async def test_health_counts_drafts_by_depth():
    async with make_engine(drafts=3) as engine:
        assert (await engine.health()).num_drafted == (0, 0, 0)
        pieces = await complete(engine, stream_interval_tokens=1)
        await complete(engine, top_k=10, max_new_tokens=5)
        health = await engine.health()
    assert health.num_drafted[0] >= len(pieces) - 2
    for drafted, accepted in zip(health.num_drafted, health.num_accepted, strict=True):
        assert 0 < accepted < drafted
    assert list(health.num_accepted) == sorted(health.num_accepted, reverse=True)
    expected = 1 + sum(health.num_accepted) / health.num_drafted[0]
    assert health.accept_length_tokens == expected
    async with make_engine(drafts=0) as engine:
        await complete(engine)
        health = await engine.health()
    assert health.num_drafted == health.num_accepted == ()
    assert health.accept_length_tokens == 0.0


@pytest.mark.parametrize("config", [small_glm(), small_llama()])
def test_a_model_that_cannot_draft_is_refused(config):
    with pytest.raises(ConfigError, match=r"num_speculative_tokens=4.*no MTP layer"):
        make_engine(build_model(config, seed=0))


def test_streams_of_a_seed_have_numbers_of_their_own():
    numbers = {float(uniforms([3], [7], stream)[0]) for stream in Stream}
    assert len(numbers) == 3
    assert uniforms([3], [7])[0] == uniforms([3], [7], Stream.TOKEN)[0]
