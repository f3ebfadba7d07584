"""What an engine was routed to, on its way through gateway, log and ledger to a trainer that would choose otherwise."""

import asyncio
from dataclasses import replace

import pytest
import torch
from trainer_fixtures import make_batch, make_group, make_trajectory

from longarc.algos import losses
from longarc.config.engine import EngineConfig
from longarc.config.routing import RoutingConfig
from longarc.config.training import OptimizerConfig
from longarc.engine.embedded import EmbeddedEngine
from longarc.engine.remote import RemoteEngine
from longarc.engine.router import Router
from longarc.engine.server import DoorSettings, EngineDoor
from longarc.engine.wire import EngineDescription
from longarc.errors import ConfigError, ContractError
from longarc.gateway.core import Gateway
from longarc.gateway.server import bound_socket, serving
from longarc.models.build import build_model
from longarc.models.kernels.native import native
from longarc.records.metric import combine
from longarc.records.sampling import Sampling
from longarc.runs.codec import trajectory_body, trajectory_from_body
from longarc.tokens.glm import GlmFormat
from longarc.trainer.data_parallel import GradientPool
from longarc.trainer.policy import PolicySettings, PolicyTrainer
from model_cases import other_chooser, sharpened, small_glm
from token_samples import small_tokenizer, user

FORMAT = GlmFormat(small_tokenizer())
CONFIG = small_glm(
    vocab_size=FORMAT.tokenizer.vocab_size,
    num_hidden_layers=4,
    index_topk_pattern="FSFS",
    max_position_embeddings=512,
)
BOTH = "experts_and_keys"
TOLERANCE = 0.0 if native() else 1e-4


@pytest.fixture(scope="module")
def model():
    return sharpened(build_model(CONFIG, seed=0))


def open_engine(model, *, records=BOTH, **settings):
    return EmbeddedEngine(
        model,
        EngineConfig(max_running=4, **settings),
        max_context_tokens=400,
        records_routing=records,
    )


def session_of(engine, name="s", *, asks=True, seed=1):
    sampling = Sampling(max_new_tokens=20, seed=seed, returns_routing_from=0 if asks else None)
    return Gateway(engine, FORMAT).open(
        name, sampling=sampling, thinking=False, max_context_tokens=400
    )


async def talk(session):
    """Take two turns, and a third that edits the history behind the first."""
    opening = [user("Count the words, please, and tell me about the longest one of them.")]
    first = await session.chat(opening)
    behind = [*opening, first.message]
    await session.chat([*behind, user("And now the shortest?")])
    await session.chat([*behind, user("No, something else entirely.")])


def trained(model, segments, tmp_path, *, kept=BOTH, micro_batch_tokens=4096, repeats=2, **options):
    """Train a group on segments; return the largest difference to what the engine said."""
    members = [make_trajectory(segments, name=f"rl/{i}", reward=float(i)) for i in range(repeats)]
    members = [trajectory_from_body(trajectory_body(member)) for member in members]
    trainer = PolicyTrainer(
        model,
        PolicySettings(
            optimizer=OptimizerConfig(lr=1e-3),
            num_steps=4,
            micro_batch_tokens=micro_batch_tokens,
            routing_replay=kept,
        ),
        loss=losses.icepop,
        publish_directory=str(tmp_path),
        **options,
    )
    report = trainer.take_step(make_batch([make_group(members)]))
    return combine(report.metrics)["mismatch/max_abs_log_ratio"]


@pytest.mark.parametrize("micro_batch_tokens", [4096, 250])
def test_a_sessions_tokens_are_trained_with_the_engines_bits(model, tmp_path, micro_batch_tokens):
    async def go():
        async with open_engine(model) as engine:
            session = session_of(engine)
            await talk(session)
        return session

    session = asyncio.run(go())
    segments = session.segments()
    assert len(segments) == 2
    for segment in segments:
        assert all(segment.routing[:-1])
        assert segment.routing[-1] == b""
    restored = session_of(None)
    restored.restore(session.payloads())
    assert restored.segments() == segments
    sizes = {"micro_batch_tokens": micro_batch_tokens}
    trainer = other_chooser(model)
    assert trained(other_chooser(model), segments, tmp_path, kept="none", **sizes) > 1e-2
    assert trained(trainer, segments, tmp_path, **sizes) <= TOLERANCE


def test_processes_that_share_the_gradients_replay_their_documents(model, tmp_path):
    async def go():
        async with open_engine(model) as engine:
            sessions = [session_of(engine, str(seed), seed=seed) for seed in range(2)]
            for session in sessions:
                await talk(session)
        return [segment for session in sessions for segment in session.segments()]

    segments = asyncio.run(go())
    pool = GradientPool(2)
    pool.start()
    try:
        found = trained(other_chooser(model), segments, tmp_path, gradients=pool.open)
    finally:
        pool.close()
    assert found <= TOLERANCE


def test_a_turn_asks_for_what_the_turns_before_it_have_not(model):
    async def go():
        async with open_engine(model) as engine:
            session = session_of(engine)
            await talk(session)
        return session

    nodes = asyncio.run(go())._tree.nodes
    first, *others = ([len(n.context_ids), len(n.sampled_ids), len(n.routing)] for n in nodes)
    assert first[2] == first[0] + first[1] - 1
    for context, sampled, routed in others:
        assert routed == context + sampled


def test_over_http_and_behind_a_router_it_is_the_same(model, tmp_path):
    """Pieces come early, so that the router joins several."""

    async def go():
        async with open_engine(model) as own:
            here = session_of(own)
            await talk(here)
            description = EngineDescription(
                model={}, attention="sparse", max_context_tokens=400, num_ranks=1
            )
            door = EngineDoor([own], description, DoorSettings(api_key="k"))
            async with (
                serving(door.app(), bound_socket(), grace_s=1) as address,
                RemoteEngine(address, api_key="k") as remote,
                Router({"a": remote}, RoutingConfig(keep_every_tokens=3)) as router,
            ):
                there = session_of(router)
                await talk(there)
        return here.segments(), there.segments()

    here, there = asyncio.run(go())
    assert here == there
    assert trained(other_chooser(model), there, tmp_path) <= TOLERANCE


def test_experts_alone_take_fewer_bytes_and_are_replayed_alone(model, tmp_path):
    async def go():
        async with open_engine(model, records="experts") as engine:
            session = session_of(engine)
            await talk(session)
        return session.segments()

    segments = asyncio.run(go())
    assert {len(blob) for segment in segments for blob in segment.routing[:-1]} == {3 * 2}
    biased = other_chooser(model)
    indexers = {k: v for k, v in model.state_dict().items() if "indexer" in k}
    biased.load_state_dict(indexers, strict=False)
    assert trained(biased, segments, tmp_path, kept="experts") <= TOLERANCE
    with pytest.raises(ContractError, match=r"bytes, but this model's takes .* recorded for anoth"):
        trained(other_chooser(model), segments, tmp_path)


def test_tokens_without_routing_are_refused_by_name(model, tmp_path):
    async def go():
        async with open_engine(model, records="none") as engine:
            session = session_of(engine, asks=False)
            await talk(session)
        return session.segments()

    segments = asyncio.run(go())
    assert all(segment.routing is None for segment in segments)
    with pytest.raises(ContractError, match=r"rl/0: segment 0 has no routing to replay"):
        trained(other_chooser(model), segments, tmp_path)
    cut = replace(segments[0], routing=(b"",) * len(segments[0].token_ids))
    with pytest.raises(ContractError, match=r"trajectories \['rl/0'.*\]: .* has 0 bytes"):
        trained(other_chooser(model), [cut], tmp_path)


def test_routing_that_no_pass_can_have_chosen_is_refused_by_name(model, tmp_path):
    """As many bytes as there should be, but of something else."""

    async def go():
        async with open_engine(model, records="experts") as engine:
            session = session_of(engine)
            await talk(session)
        return session.segments()

    segment, *_ = asyncio.run(go())
    for blob, message in (
        (b"\xff" * 6, r"experts span 0\.\.255"),
        (b"\x01" * 6, "an expert twice"),
    ):
        damaged = replace(segment, routing=(*segment.routing[:5], blob, *segment.routing[6:]))
        with pytest.raises(ContractError, match=rf"trajectories \['rl/0', 'rl/1'\]: .*{message}"):
            trained(other_chooser(model), [damaged], tmp_path, kept="experts")


def test_a_model_that_chooses_nothing_is_refused_before_the_first_step(tmp_path):
    model = build_model(small_glm(first_k_dense_replace=3), seed=0)
    settings = PolicySettings(
        optimizer=OptimizerConfig(lr=1e-3),
        num_steps=4,
        micro_batch_tokens=64,
        routing_replay="experts",
    )
    with pytest.raises(ConfigError, match="no layer with experts"):
        PolicyTrainer(model, settings, loss=losses.icepop, publish_directory=str(tmp_path))


def test_what_a_teacher_scores_is_routed_by_the_teacher(model, tmp_path):
    """A teacher has other weights: the student's routing is none of its own."""
    seen = []

    async def go():
        async with open_engine(model) as engine:
            session = session_of(engine)
            await talk(session)
        return session.segments()

    segments = asyncio.run(go())
    teacher = sharpened(build_model(CONFIG, seed=4))
    forward = teacher.forward
    teacher.forward = lambda *args, **kwargs: (
        seen.append(kwargs.get("replayed")),
        forward(*args, **kwargs),
    )[1]
    trainer = PolicyTrainer(
        other_chooser(model),
        PolicySettings(
            optimizer=OptimizerConfig(lr=1e-3),
            num_steps=4,
            micro_batch_tokens=4096,
            routing_replay=BOTH,
        ),
        loss=losses.icepop,
        publish_directory=str(tmp_path),
        teachers={"math": teacher},
    )
    trajectory = make_trajectory(segments, name="rl/0", reward=None)
    report = trainer.take_step(make_batch([make_group([trajectory])]))
    assert seen == [None]
    assert combine(report.metrics)["mismatch/max_abs_log_ratio"] <= TOLERANCE
    assert torch.isfinite(teacher.output_weight).all()
