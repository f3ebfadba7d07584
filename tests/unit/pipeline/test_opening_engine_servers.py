"""What a stage asks of the servers that its recipe names."""

import asyncio
import gc
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from fakes import FakeWorkerEngine
from longarc.config.engine import EngineConfig
from longarc.config.loader import load_settings
from longarc.config.model import LlamaConfig
from longarc.config.recipe import Recipe
from longarc.engine.embedded import EmbeddedEngine
from longarc.engine.remote import RemoteEngine
from longarc.engine.server import DoorSettings, EngineDoor
from longarc.engine.wire import EngineDescription
from longarc.errors import ConfigError, EngineFaultError, EngineLostError
from longarc.gateway.server import bound_socket, serving
from longarc.models.build import build_model
from longarc.models.hf_weights import save_pretrained_dir, save_weights
from longarc.pipeline.engines import engine_servers, stopped_or_failed
from longarc.pipeline.local import open_workspace
from longarc.pipeline.progress import ProgressLine
from longarc.pipeline.serve import ServeSettings, serve
from longarc.pipeline.serve_engine import EngineServerSettings, serve_engine
from longarc.pipeline.workspace import load_checkpoint
from longarc.records.sampling import Sampling
from longarc.runs.directory import RunDirectory
from model_cases import small_glm, small_llama
from token_samples import small_tokenizer

RECIPE = Path(__file__).parents[3] / "recipes" / "smoke.toml"
SERVER = EngineServerSettings(
    stage=None,
    attention=None,
    host="127.0.0.1",
    port=0,
    api_key="k",
    num_ranks=1,
    max_context_tokens=64,
    records_routing="experts",
    drain_s=0.0,
)


@pytest.fixture
def recipe():
    return load_settings(Recipe, RECIPE)


@pytest.fixture
def run(tmp_path, recipe):
    """Return a run whose stage ``sft`` is finished with version 3, attending sparsely."""
    model = build_model(small_glm(), seed=0)
    path = tmp_path / "run"
    with RunDirectory.create(path, recipe=recipe.model_dump(mode="json"), seeds={}) as opened:
        directory = opened.stage("sft")
        directory.set_final(
            directory.writer(keep_last=1).write(
                lambda place: save_weights(model, place / "model.safetensors"),
                kind="policy",
                stage="sft",
                step=1,
                policy_version=3,
                model=model.config.model_dump(mode="json"),
                tokenizer_sha256=None,
                info={"attention": "sparse"},
            )
        )
    return path


@pytest.fixture
def loaded(run):
    path = RunDirectory.look(run).stage("sft").final()
    assert path is not None
    return load_checkpoint(path)


@pytest.fixture
def described(loaded):
    return EngineDescription(
        model=loaded.model.config.model_dump(mode="json"),
        attention="sparse",
        max_context_tokens=512,
        num_ranks=2,
    )


@asynccontextmanager
async def opened(loaded, described, ranks, *, routing_replay="none"):
    door = EngineDoor(ranks, described, DoorSettings(api_key="k"))
    async with serving(door.app(), bound_socket()) as address:
        engine = EngineConfig(servers=(address,))
        async with engine_servers(
            engine, loaded, max_context_tokens=512, routing_replay=routing_replay, seed=0
        ) as router:
            yield router


async def test_every_rank_has_the_checkpoints_weights_before_the_stage_begins(
    loaded, described, monkeypatch
):
    monkeypatch.setenv("LONGARC_ENGINE_KEY", "k")
    ranks = FakeWorkerEngine(token_s=0), FakeWorkerEngine(token_s=0)
    async with opened(loaded, described, ranks) as router:
        async for piece in router.stream([1], Sampling(max_new_tokens=2), session_id="s"):
            assert piece.policy_version == 3
    for rank in ranks:
        assert rank.updates == [(str(loaded.path / "model.safetensors"), 3)]


@pytest.mark.parametrize(
    ("key", "change", "message"),
    [
        ("", {}, "LONGARC_ENGINE_KEY"),
        ("wrong", {}, "refuses the key"),
        ("k", {"attention": "dense"}, "attends dense, the checkpoint .* is to attend sparse"),
        ("k", {"max_context_tokens": 511}, "room for 511 tokens, the stage asks for 512"),
        ("k", {"model": {"family": "llama"}}, "serves another model"),
        (
            "k",
            {"weight_quantisation": "fp8"},
            "samples with weight_quantisation=.fp8., the recipe says .none.",
        ),
        (
            "k",
            {"cache_quantisation": "fp8"},
            "samples with cache_quantisation=.fp8., the recipe says .none.",
        ),
    ],
)
async def test_a_server_that_does_not_fit_is_refused_before_it_is_asked_for_anything(
    loaded, described, monkeypatch, key, change, message
):
    monkeypatch.setenv("LONGARC_ENGINE_KEY", key)
    ranks = FakeWorkerEngine(), FakeWorkerEngine()
    with pytest.raises(ConfigError, match=message):
        async with opened(loaded, replace(described, **change), ranks):
            pass
    assert [rank.updates for rank in ranks] == [[], []]


async def test_a_server_has_to_record_what_the_stage_replays(loaded, described, monkeypatch):
    monkeypatch.setenv("LONGARC_ENGINE_KEY", "k")
    records = replace(described, records_routing="experts")
    ranks = FakeWorkerEngine(), FakeWorkerEngine()
    message = r"records_routing='none', .* start it with --records-routing experts"
    with pytest.raises(ConfigError, match=message):
        async with opened(loaded, described, ranks, routing_replay="experts"):
            pass
    for replay in ("none", "experts"):
        async with opened(loaded, records, ranks, routing_replay=replay):
            pass


async def test_routing_that_no_server_could_say_in_one_piece_is_refused(
    loaded, described, monkeypatch
):
    monkeypatch.setenv("LONGARC_ENGINE_KEY", "k")
    # Two experts in each of two layers are four bytes, eight in base64, in quotes with a comma.
    monkeypatch.setattr("longarc.pipeline.engines.MAX_LINE_BYTES", 512 * (8 + 3) - 1)
    ranks = FakeWorkerEngine(), FakeWorkerEngine()
    records = replace(described, records_routing="experts")
    with pytest.raises(ConfigError, match=r"'experts': .*max_context_tokens=512 .*shorten"):
        async with opened(loaded, records, ranks, routing_replay="experts"):
            pass
    with pytest.raises(ConfigError, match="at once at most; replay 'experts', shorten"):
        async with opened(loaded, records, ranks, routing_replay="experts_and_keys"):
            pass
    monkeypatch.setattr("longarc.pipeline.engines.MAX_LINE_BYTES", 512 * (8 + 3))
    async with opened(loaded, records, ranks, routing_replay="experts"):
        pass


async def test_a_server_that_is_not_there_stops_the_stage(loaded, monkeypatch):
    monkeypatch.setenv("LONGARC_ENGINE_KEY", "k")
    with bound_socket() as free:
        address = f"http://127.0.0.1:{free.getsockname()[1]}"
    routed = EngineConfig(servers=(address,))
    with pytest.raises(
        EngineLostError,
        match=r"cannot be reached.*start this one .*or take it out of engine\.servers",
    ):
        async with engine_servers(
            routed, loaded, max_context_tokens=512, routing_replay="none", seed=0
        ):
            pass


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"stage": "distill"},
            r"--stage 'distill' of .* cannot be served: finished training stages are \['sft'\]",
        ),
        ({"attention": "dense"}, "its checkpoints know how they attend"),
        ({"num_ranks": 100_000}, r"--ranks 100000: at most \d+ here, where \d+ cores"),
        (
            {"max_context_tokens": 999_999},
            r"--max-context-tokens 999999 is more than the \d+ tokens that the model was made for",
        ),
    ],
)
async def test_a_run_says_what_of_it_can_be_served(run, recipe, change, message):
    with pytest.raises(ConfigError, match=message):
        await serve_engine(run, recipe, replace(SERVER, **change), stop=None, on_ready=print)


async def test_a_hugging_face_directory_is_served(tmp_path):
    model = build_model(small_glm(), seed=0)
    save_pretrained_dir(model, tmp_path)
    stop, ready = asyncio.Event(), asyncio.get_running_loop().create_future()
    settings = replace(SERVER, attention="sparse", num_ranks=2)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(
            serve_engine(tmp_path, None, settings, stop=stop, on_ready=ready.set_result)
        )
        async with RemoteEngine(await ready, api_key="k", rank=1) as engine:
            described = await engine.describe()
            scores = await engine.score([1, 2, 3])
        stop.set()
    assert described.model == model.config.model_dump(mode="json")
    assert (described.attention, described.max_context_tokens, described.num_ranks) == (
        "sparse",
        64,
        2,
    )
    assert len(scores) == 3


async def test_a_hugging_face_directory_is_served_with_all_the_context_that_is_asked_for(tmp_path):
    longest = EngineConfig().cache_tokens + 1000
    save_pretrained_dir(build_model(small_llama(max_position_embeddings=longest), seed=0), tmp_path)
    stop, ready = asyncio.Event(), asyncio.get_running_loop().create_future()
    settings = replace(SERVER, max_context_tokens=longest, records_routing="none")
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(
            serve_engine(tmp_path, None, settings, stop=stop, on_ready=ready.set_result)
        )
        async with RemoteEngine(await ready, api_key="k") as engine:
            described = await engine.describe()
        stop.set()
    assert described.max_context_tokens == longest


async def test_a_wait_that_was_stopped_leaves_nothing_that_nobody_asked_for():
    said: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, what: said.append(what["message"]))
    engines = [
        EmbeddedEngine(build_model(small_llama(), seed=0), EngineConfig(), max_context_tokens=64)
        for _ in range(2)
    ]
    stop = asyncio.Event()
    stop.set()
    await stopped_or_failed(stop, engines)
    gc.collect()
    assert said == []
    for engine in engines:
        await engine.close()


async def test_a_hugging_face_directory_has_no_stages(tmp_path):
    with pytest.raises(ConfigError, match="which is no run"):
        await serve_engine(tmp_path, None, replace(SERVER, stage="sft"), stop=None, on_ready=print)


@contextmanager
def broken_steps():
    """Let no decode step succeed."""

    def broken(*_, **__):
        raise OverflowError("too large")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("longarc.engine.decoding.Decoding.decode", broken)
        yield


async def test_sparse_attention_is_refused_where_the_model_has_none(tmp_path):
    model = LlamaConfig(vocab_size=64, hidden_size=48, max_position_embeddings=256)
    save_pretrained_dir(build_model(model, seed=0), tmp_path)
    sparse = replace(SERVER, attention="sparse")
    with pytest.raises(ConfigError, match=r"--attention sparse: .* holds a llama model, which has"):
        await serve_engine(tmp_path, None, sparse, stop=None, on_ready=print)


@pytest.mark.parametrize("attention", [None, "dense", "sparse"])
async def test_a_model_that_could_attend_sparsely_does_so_only_if_asked_and_says_it(
    tmp_path, caplog, attention
):
    save_pretrained_dir(build_model(small_glm(), seed=0), tmp_path)
    stop, ready = asyncio.Event(), asyncio.get_running_loop().create_future()
    settings = replace(SERVER, attention=attention)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(
            serve_engine(tmp_path, None, settings, stop=stop, on_ready=ready.set_result)
        )
        async with RemoteEngine(await ready, api_key="k") as engine:
            described = await engine.describe()
        stop.set()
    assert described.attention == (attention or "dense")
    assert ("it attends densely; give --attention sparse" in caplog.text) == (attention is None)


async def test_a_server_whose_engines_have_all_failed_ends_and_says_why(tmp_path):
    save_pretrained_dir(build_model(small_glm(), seed=0), tmp_path)
    ready = asyncio.get_running_loop().create_future()
    serving_it = asyncio.ensure_future(
        serve_engine(tmp_path, None, SERVER, stop=asyncio.Event(), on_ready=ready.set_result)
    )
    with broken_steps():
        async with RemoteEngine(await ready, api_key="k") as engine:
            with pytest.raises(EngineFaultError, match="OverflowError: too large"):
                async for _ in engine.stream([1], Sampling(max_new_tokens=3), session_id="s"):
                    pass
        with pytest.raises(EngineLostError, match="OverflowError: too large"):
            await serving_it


async def test_a_server_with_one_engine_left_goes_on_and_says_at_its_end_that_one_failed(tmp_path):
    save_pretrained_dir(build_model(small_glm(), seed=0), tmp_path)
    stop, ready = asyncio.Event(), asyncio.get_running_loop().create_future()
    settings = replace(SERVER, num_ranks=2)
    serving_it = asyncio.ensure_future(
        serve_engine(tmp_path, None, settings, stop=stop, on_ready=ready.set_result)
    )
    address, asked = await ready, Sampling(max_new_tokens=3)
    async with (
        RemoteEngine(address, api_key="k") as broken,
        RemoteEngine(address, api_key="k", rank=1) as left,
    ):
        with broken_steps():
            with pytest.raises(EngineFaultError):
                async for _ in broken.stream([1], asked, session_id="s"):
                    pass
            # Its request is answered first; then the engine finds that it cannot compute anybody's.
            while (await broken.health()).is_ready:
                pass
        pieces = [piece async for piece in left.stream([1], asked, session_id="s")]
    stop.set()
    with pytest.raises(EngineLostError, match="OverflowError: too large"):
        await serving_it
    assert pieces[-1].finish_reason == "length"


@pytest.fixture
def workspace(run, recipe):
    """Open the run, whose tokenizer is copied into it."""
    small_tokenizer().save(run / "tokenizer.json")
    with open_workspace(recipe, run, resume=True, progress=ProgressLine()) as opened:
        yield opened


CHAT = ServeSettings(
    stage=None,
    host="127.0.0.1",
    port=0,
    api_key="k",
    temperature=1.0,
    max_new_tokens=8,
    max_context_tokens=None,
)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (999_999, "--max-context-tokens 999999 is more than the"),
        (3, r"a session of 3 tokens \(--max-context-tokens\)"),
    ],
)
async def test_a_chat_server_names_the_option_of_a_context_that_cannot_be(
    workspace, asked, message
):
    with pytest.raises(ConfigError, match=message):
        await serve(workspace, replace(CHAT, max_context_tokens=asked), on_ready=print)
