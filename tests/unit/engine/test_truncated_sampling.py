"""From a truncated draw to the trainer's ratio: the same distribution on both sides; and text that ends a completion."""

import asyncio

import pytest

from longarc.algos import losses
from longarc.config.engine import EngineConfig
from longarc.config.model import GlmMoeDsaConfig, LlamaConfig
from longarc.config.training import OptimizerConfig
from longarc.engine.embedded import EmbeddedEngine
from longarc.engine.stop_strings import StopStrings
from longarc.engine.token_text import TokenText
from longarc.errors import EngineError
from longarc.models.build import build_model
from longarc.models.kernels.native import native
from longarc.records.batch import Batch
from longarc.records.metric import combine
from longarc.records.outcome import Outcome
from longarc.records.sampling import Sampling
from longarc.records.segment import NOT_SAMPLED, Segment
from longarc.records.trajectory import Group, Trajectory
from longarc.trainer.policy import PolicySettings, PolicyTrainer

NANO = GlmMoeDsaConfig(
    vocab_size=64, index_topk=16, max_position_embeddings=256, initializer_range=0.2
)
LLAMA = LlamaConfig(
    vocab_size=64, hidden_size=48, max_position_embeddings=256, initializer_range=0.2
)
PROMPT = tuple(range(1, 25))


def token_bytes(token_id):
    """Spell a token: letters, and now and then two of them."""
    return [b"a", b"b", b"ab", b"\xe2\x82", b"\xac"][token_id % 5]


async def sampled(config, samplings, **options):
    """Return the joined pieces of each completion."""
    model = build_model(config, seed=0)
    settings = EngineConfig(max_running=8)
    async with EmbeddedEngine(model, settings, max_context_tokens=160, **options) as engine:

        async def one(index, sampling):
            stream = engine.stream(PROMPT, sampling, session_id=str(index))
            return [piece async for piece in stream]

        return await asyncio.gather(*(one(i, s) for i, s in enumerate(samplings)))


def joined(pieces, name):
    return tuple(value for piece in pieces for value in getattr(piece, name))


def trajectory(index, pieces):
    answer, pad = joined(pieces, "token_ids"), len(PROMPT)
    segment = Segment(
        token_ids=PROMPT + answer,
        is_sampled=(False,) * pad + (True,) * len(answer),
        train_mask=(False,) * pad + (True,) * len(answer),
        behaviour_logprobs=(0.0,) * pad + joined(pieces, "logprobs"),
        policy_versions=(NOT_SAMPLED,) * pad + (0,) * len(answer),
        kept_ids=((),) * pad + joined(pieces, "kept_ids"),
    )
    return Trajectory(
        id=f"rl/g/{index}",
        stage="rl",
        group_id="g",
        task_id="task",
        family="math",
        outcome=Outcome.COMPLETED,
        reward=float(index % 2),
        reward_parts={},
        segments=(segment,),
        messages=(),
        tools=(),
        num_turns=1,
        difficulty=0.0,
        started_at_s=0.0,
        duration_s=0.0,
    )


@pytest.mark.parametrize("config", [NANO, LLAMA])
@pytest.mark.parametrize("path", ["native", "eager"])
async def test_the_trainer_scores_under_the_distribution_that_was_drawn_from(
    config, path, tmp_path, monkeypatch
):
    if path == "eager":
        monkeypatch.setenv("LONGARC_NATIVE", "0")
    fields = {"max_new_tokens": 30, "temperature": 0.8, "returns_kept_ids": True}
    rules = ({"top_p": 0.8}, {"top_k": 6}, {"min_p": 0.2}, {})
    samplings = [Sampling(seed=i, **fields, **rules[i % 4]) for i in range(8)]
    trajectories = [trajectory(i, p) for i, p in enumerate(await sampled(config, samplings))]
    assert any(t.segments[0].kept_ids[-1] for t in trajectories)
    assert not any(trajectories[3].segments[0].kept_ids)

    trainer = PolicyTrainer(
        build_model(config, seed=0),
        PolicySettings(
            optimizer=OptimizerConfig(lr=1e-3),
            num_steps=1,
            micro_batch_tokens=512,
            temperature=0.8,
        ),
        loss=losses.icepop,
        publish_directory=str(tmp_path),
    )
    group = Group(
        id="g",
        task_id="task",
        family="math",
        trajectories=tuple(trajectories),
        multiplicities=(1,) * len(trajectories),
    )
    batch = Batch(stage="rl", step=0, groups=(group,), trainer_version=0, resets_optimizer=False)
    metrics = combine((await trainer.step(batch)).metrics)
    largest = metrics["mismatch/max_abs_log_ratio"]
    # With the native kernels both sides compute the same bits.
    assert largest == 0 if path == "native" and native() is not None else largest < 1e-5


async def test_asking_for_more_changes_no_token():
    plain = Sampling(max_new_tokens=20, temperature=0.7, seed=3)
    asks = Sampling(
        max_new_tokens=20,
        temperature=0.7,
        seed=3,
        returns_raw_logprobs=True,
        returns_kept_ids=True,
        stream_interval_tokens=3,
    )
    one, other = await sampled(NANO, [plain, asks])
    assert joined(one, "token_ids") == joined(other, "token_ids")
    assert joined(one, "logprobs") == joined(other, "logprobs")
    assert joined(other, "kept_ids") == ((),) * 20
    assert len(joined(other, "raw_logprobs")) == 20
    assert joined(one, "kept_ids") == joined(one, "raw_logprobs") == ()


async def test_a_stop_string_ends_the_completion_with_the_token_that_spells_it():
    free = Sampling(max_new_tokens=60, seed=1)
    stops = Sampling(max_new_tokens=60, seed=1, stop_strings=("zz", "bab"))
    whole, cut = await sampled(NANO, [free, stops], text=TokenText(token_bytes))
    ids, found = joined(whole, "token_ids"), joined(cut, "token_ids")
    length = next(n for n in range(1, 61) if b"bab" in b"".join(token_bytes(i) for i in ids[:n]))
    assert found == ids[:length]
    assert cut[-1].finish_reason == "stop"


async def test_stop_strings_without_the_text_of_tokens_are_refused():
    with pytest.raises(EngineError, match=r"stop_strings=\['x'\].*with text"):
        await sampled(NANO, [Sampling(max_new_tokens=4, stop_strings=("x",))])


@pytest.mark.parametrize(
    ("strings", "tokens", "ends_at"),
    [
        (("ab",), [b"a", b"b"], 1),
        (("ab",), [b"xaby"], 0),
        (("aab",), [b"a", b"a", b"a", b"b"], 3),
        (("\u20ac",), [b"\xe2\x82", b"\xac"], 1),
        (("long one", "a"), [b"x", b"a"], 1),
        (("a",), [b"b", b"", b"c"], None),
    ],
)
def test_a_stop_string_is_found_wherever_tokens_cut_it(strings, tokens, ends_at):
    watch = StopStrings(strings, tokens.__getitem__)
    found = [i for i in range(len(tokens)) if watch.is_completed_by(i)]
    assert found[:1] == ([] if ends_at is None else [ends_at])
