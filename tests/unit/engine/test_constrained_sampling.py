"""Answers under a JSON schema, from the draw to the trainer's ratio: the same ids on both sides, wherever it was drawn."""

import asyncio
import json
from dataclasses import replace

import pytest

from longarc.algos import losses
from longarc.config.engine import EngineConfig
from longarc.config.model import GlmMoeDsaConfig, LlamaConfig
from longarc.config.routing import RoutingConfig
from longarc.config.training import OptimizerConfig
from longarc.engine.embedded import EmbeddedEngine
from longarc.engine.router import Router
from longarc.engine.token_text import TokenText
from longarc.errors import ContractError, EngineRequestError
from longarc.models.build import build_model
from longarc.models.kernels.native import native
from longarc.records.batch import Batch
from longarc.records.constraint import ConstrainedSpan, Constraint
from longarc.records.metric import combine
from longarc.records.outcome import Outcome
from longarc.records.sampling import Sampling
from longarc.records.segment import NOT_SAMPLED, Segment
from longarc.records.trajectory import Group, Trajectory
from longarc.tokens.grammar import Grammars
from longarc.tokens.tokenizer import Tokenizer
from longarc.trainer.policy import PolicySettings, PolicyTrainer

TEXTS = ['{"name": "abc", "tags": [true, false], "age": 12} the quick brown fox </think>'] * 50
SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["left", "right"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
        "name": {"type": "string", "maxLength": 6},
    },
    "required": ["kind", "age", "name"],
    "additionalProperties": False,
}
PROMPT = tuple(range(1, 25))
LONG = 260


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.train(TEXTS, vocab_size=300)


def models(tokenizer):
    # More ids than the tokenizer has, as many models have.
    fields = {"vocab_size": tokenizer.vocab_size + 4, "max_position_embeddings": 512}
    return {
        "glm": GlmMoeDsaConfig(index_topk=16, initializer_range=0.2, **fields),
        "llama": LlamaConfig(hidden_size=48, initializer_range=0.2, **fields),
        "mtp": GlmMoeDsaConfig(
            index_topk=16, initializer_range=0.2, num_nextn_predict_layers=1, **fields
        ),
    }


def stop_id(tokenizer):
    return tokenizer.special_id("<|user|>")


def asking(tokenizer, **fields):
    constraint = fields.pop("constraint", Constraint(json_schema=json.dumps(SCHEMA)))
    return Sampling(
        **{"max_new_tokens": LONG, "returns_kept_ids": True, "temperature": 0.8} | fields,
        stop_ids=(stop_id(tokenizer),),
        constraint=constraint,
    )


def opened(tokenizer, config, **settings):
    return EmbeddedEngine(
        build_model(config, seed=0),
        EngineConfig(**{"max_running": 8} | settings),
        max_context_tokens=400,
        text=TokenText.of(tokenizer, vocab_size=config.vocab_size),
    )


async def completions(engine, samplings, prompt=PROMPT):
    async def one(index, sampling):
        stream = engine.stream(prompt, sampling, session_id=str(index))
        return [piece async for piece in stream]

    return await asyncio.gather(*(one(i, s) for i, s in enumerate(samplings)))


def joined(pieces, name):
    return tuple(value for piece in pieces for value in getattr(piece, name))


def follows(tokenizer, ids):
    """Check that ids are a JSON object of the schema and its end."""
    assert ids[-1] == stop_id(tokenizer)
    value = json.loads(tokenizer.decode(ids[:-1], keep_special=True))
    assert value["kind"] in ("left", "right")
    assert 0 <= value["age"] <= 99
    assert len(value["name"]) <= 6
    assert value.keys() <= {"kind", "age", "name", "tags"}


def segment(sampling, pieces):
    answer, pad = joined(pieces, "token_ids"), len(PROMPT)
    kept = joined(pieces, "kept_ids")
    span = ConstrainedSpan(
        start=pad,
        stop=pad + len(answer),
        constraint=sampling.constraint,
        stop_ids=sampling.stop_ids,
    )
    return Segment(
        token_ids=PROMPT + answer,
        is_sampled=(False,) * pad + (True,) * len(answer),
        train_mask=(False,) * pad + (True,) * len(answer),
        behaviour_logprobs=(0.0,) * pad + joined(pieces, "logprobs"),
        policy_versions=(NOT_SAMPLED,) * pad + (0,) * len(answer),
        kept_ids=((),) * pad + kept if any(kept) else None,
        constraints=(span,),
    )


def batch_of(segments):
    trajectories = tuple(
        Trajectory(
            id=f"rl/g/{index}",
            stage="rl",
            group_id="g",
            task_id="task",
            family="math",
            outcome=Outcome.COMPLETED,
            reward=float(index % 2),
            reward_parts={},
            segments=(one,),
            messages=(),
            tools=(),
            num_turns=1,
            difficulty=0.0,
            started_at_s=0.0,
            duration_s=0.0,
        )
        for index, one in enumerate(segments)
    )
    group = Group(
        id="g",
        task_id="task",
        family="math",
        trajectories=trajectories,
        multiplicities=(1,) * len(trajectories),
    )
    return Batch(stage="rl", step=0, groups=(group,), trainer_version=0, resets_optimizer=False)


def trainer_of(config, grammars, directory):
    return PolicyTrainer(
        build_model(config, seed=0),
        PolicySettings(
            optimizer=OptimizerConfig(lr=1e-3),
            num_steps=1,
            micro_batch_tokens=1024,
            temperature=0.8,
            grammars=grammars,
        ),
        loss=losses.icepop,
        publish_directory=str(directory),
    )


@pytest.mark.parametrize(
    ("kind", "path"),
    [("glm", "native"), ("llama", "native"), ("mtp", "native"), ("llama", "eager")],
)
async def test_a_model_without_sense_follows_the_schema_and_the_trainer_scores_among_what_it_left(
    kind, path, tokenizer, tmp_path, monkeypatch
):
    if path == "eager":
        monkeypatch.setenv("LONGARC_NATIVE", "0")
    config = models(tokenizer)[kind]
    rules = ({}, {"top_p": 0.8}, {"top_k": 6}, {})
    samplings = [asking(tokenizer, seed=i, **rules[i % 4]) for i in range(8)]
    drafts = {"num_speculative_tokens": 3} if kind == "mtp" else {}
    async with opened(tokenizer, config, **drafts) as engine:
        answers = await completions(engine, samplings)
        free = replace(samplings[0], constraint=None, max_new_tokens=8)
        beside, *_ = await completions(engine, [free, samplings[1]])
        (alone,) = await completions(engine, [free])
    assert beside == alone
    for pieces in answers:
        follows(tokenizer, joined(pieces, "token_ids"))
    segments = [segment(s, p) for s, p in zip(samplings, answers, strict=True)]
    # Only what top-k and top-p left out besides has to be written down.
    assert [one.kept_ids is not None for one in segments] == [False, True, True, False] * 2

    trainer = trainer_of(config, Grammars(tokenizer, vocab_size=config.vocab_size), tmp_path)
    metrics = combine((await trainer.step(batch_of(segments))).metrics)
    largest = metrics["mismatch/max_abs_log_ratio"]
    # With the native kernels both sides compute the same bits.
    assert largest == 0 if path == "native" and native() is not None else largest < 1e-5


async def test_a_constrained_request_goes_on_in_its_state_wherever_it_is_begun_again(tokenizer):
    config = models(tokenizer)["llama"]
    sampling = asking(tokenizer, seed=3)
    async with opened(tokenizer, config) as engine:
        ((*_, last),) = await completions(engine, [sampling])
        whole = last.token_ids
        for begun in range(1, len(whole), 7):
            rest = replace(
                sampling, num_sampled_before=begun, max_new_tokens=sampling.max_new_tokens - begun
            )
            (pieces,) = await completions(engine, [rest], (*PROMPT, *whole[:begun]))
            assert joined(pieces, "token_ids") == whole[begun:]
            assert joined(pieces, "logprobs") == pytest.approx(last.logprobs[begun:], abs=1e-5)
        foreign = replace(sampling, num_sampled_before=3, max_new_tokens=9)
        with pytest.raises(EngineRequestError, match=r"is \d+, which its grammar does not allow"):
            await completions(engine, [foreign])


async def test_preempted_requests_and_those_of_a_lost_engine_end_as_they_would_alone(tokenizer):
    config = models(tokenizer)["llama"]
    samplings = [asking(tokenizer, seed=i) for i in range(6)]
    async with opened(tokenizer, config) as roomy:
        expected = [joined(pieces, "token_ids") for pieces in await completions(roomy, samplings)]
    # Room for one and a half of the longest.
    async with opened(tokenizer, config, cache_tokens=400, page_tokens=16) as tight:
        found = [joined(pieces, "token_ids") for pieces in await completions(tight, samplings)]
        assert (await tight.health()).num_preemptions > 0
    assert found == expected
    leaves, stays = opened(tokenizer, config), opened(tokenizer, config)
    async with (
        stays,
        leaves,
        Router({"a": stays, "b": leaves}, RoutingConfig(keep_every_tokens=4)) as router,
    ):
        await router.health()
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(completions(router, samplings))
            while (await leaves.health()).num_sampled_tokens < 20:
                await asyncio.sleep(0)
            await leaves.close()
    assert [joined(pieces, "token_ids") for pieces in running.result()] == expected


async def test_the_most_likely_answer_follows_the_schema_too(tokenizer):
    async with opened(tokenizer, models(tokenizer)["glm"]) as engine:
        tight = {"type": "array", "items": {"enum": [1, 2]}, "minItems": 2, "maxItems": 2}
        constraint = Constraint(json_schema=json.dumps(tight))
        ((piece,),) = await completions(
            engine, [asking(tokenizer, temperature=0, constraint=constraint)]
        )
    ids = piece.token_ids
    if piece.finish_reason == "stop":
        assert [value in (1, 2) for value in json.loads(tokenizer.decode(ids[:-1]))] == [True] * 2
    assert set(piece.logprobs) == {0.0}


async def test_what_cannot_be_followed_is_refused_with_the_reason(tokenizer):
    config = models(tokenizer)["llama"]

    def under(schema):
        return asking(tokenizer, constraint=Constraint(json_schema=schema), max_new_tokens=4)

    async with opened(tokenizer, config) as engine:
        for schema, reason in (
            ('{"not": {"type": "object"}}', "not"),
            ("false", "Unsatisfiable"),
            ('{"type": "foo"}', "Invalid type: foo"),
            ('{"$ref": "https://example.com/x"}', "does not fetch"),
            ('{"type": "string", "pattern": "(?=a)b"}', "look-around"),
            ("{", "not JSON"),
            ("[1]", "object or boolean"),
        ):
            with pytest.raises(EngineRequestError, match=f"schema .*{reason}"):
                await completions(engine, [under(schema)])
        assert (await engine.health()).num_running == 0
    async with EmbeddedEngine(
        build_model(config, seed=0), EngineConfig(max_running=8), max_context_tokens=400
    ) as blind:
        with pytest.raises(EngineRequestError, match=r"no tokenizer\.json beside its weights"):
            await completions(blind, [under("{}")])
    with pytest.raises(ContractError, match="at least one id, because a constraint"):
        Sampling(max_new_tokens=1, constraint=Constraint(json_schema="{}"))


async def test_a_trainer_without_the_tokenizer_or_with_another_refuses_what_was_constrained(
    tokenizer, tmp_path
):
    config = models(tokenizer)["llama"]
    sampling = asking(tokenizer, seed=0)
    async with opened(tokenizer, config) as engine:
        (pieces,) = await completions(engine, [sampling])
    one = segment(sampling, pieces)
    blind = trainer_of(config, None, tmp_path)
    with pytest.raises(ContractError, match="segment 0 was sampled under a JSON schema"):
        await blind.step(batch_of([one, one]))
    other = replace(one.constraints[0], constraint=Constraint(json_schema='{"type": "array"}'))
    grammars = Grammars(tokenizer, vocab_size=config.vocab_size)
    with pytest.raises(ContractError, match=r"rl/g/0: segment 0: token \d+ .* does not allow"):
        await trainer_of(config, grammars, tmp_path).step(
            batch_of([replace(one, constraints=(other,))] * 2)
        )
