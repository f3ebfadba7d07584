"""JSON schemas through the three dialects, with a model that talks nonsense behind them, to a training segment."""

import json
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from fakes import FakeEngine
from gateway_cases import DONE, FORMAT, TOOLS, Door, chat_body
from ledger_cases import make_trajectory
from longarc.algos import losses
from longarc.config.engine import EngineConfig
from longarc.config.model import LlamaConfig
from longarc.config.training import OptimizerConfig
from longarc.engine.embedded import EmbeddedEngine
from longarc.engine.token_text import TokenText
from longarc.gateway.core import Gateway
from longarc.gateway.turn_making import constraint_of
from longarc.gateway.turn_options import TurnOptions
from longarc.models.build import build_model
from longarc.models.kernels.native import native
from longarc.records.batch import Batch
from longarc.records.constraint import Constraint
from longarc.records.message import ToolSpec
from longarc.records.metric import combine
from longarc.records.sampling import Sampling
from longarc.records.trajectory import Group
from longarc.tokens.chatml import ChatMlFormat
from longarc.tokens.formats import make_chat_format
from longarc.tokens.grammar import Grammars
from longarc.trainer.policy import PolicySettings, PolicyTrainer
from token_samples import chatml_tokenizer, small_tokenizer

SCHEMA = {
    "type": "object",
    "properties": {
        "word": {"type": "string", "maxLength": 8},
        "places": {"type": "array", "items": {"type": "integer"}, "maxItems": 2},
    },
    "required": ["word", "places"],
    "additionalProperties": False,
}
FORMATS = {
    "chat": ("/v1/chat/completions", "response_format"),
    "responses": ("/v1/responses", "text"),
    "messages": ("/v1/messages", "output_config"),
}


def body(dialect, schema=SCHEMA, **more):
    """Return a request of a dialect for an answer that follows a schema."""
    if dialect == "chat":
        wanted = {
            "type": "json_schema",
            "json_schema": {"name": "n", "strict": True, "schema": schema},
        }
        return chat_body(response_format=wanted, **more)
    if dialect == "responses":
        wanted = {"type": "json_schema", "name": "n", "schema": schema}
        return {"model": "m", "input": "q", "text": {"format": wanted}, **more}
    wanted = {"type": "json_schema", "schema": schema}
    return {
        "model": "m",
        "max_tokens": 2000,
        "messages": [{"role": "user", "content": "q"}],
        "output_config": {"format": wanted},
        **more,
    }


def text_of_answer(dialect, answer):
    """Return the text of an answer, and what was thought before it."""
    if dialect == "chat":
        message = answer["choices"][0]["message"]
        return message["content"], message.get("reasoning_content")
    if dialect == "responses":
        said = [item for item in answer["output"] if item["type"] == "message"]
        thought = [item for item in answer["output"] if item["type"] == "reasoning"]
        return said[0]["content"][0]["text"], thought
    blocks = {block["type"]: block for block in answer["content"]}
    return blocks["text"]["text"], blocks.get("thinking")


def follows(text):
    value = json.loads(text)
    assert value.keys() == {"word", "places"}
    assert len(value["word"]) <= 8
    assert all(type(place) is int for place in value["places"])
    assert len(value["places"]) <= 2


def nonsense_config():
    return LlamaConfig(
        vocab_size=FORMAT.tokenizer.vocab_size,
        hidden_size=48,
        max_position_embeddings=4096,
        initializer_range=0.2,
    )


@asynccontextmanager
async def nonsense(*, thinking, text=True, seed=5):
    """Open a door to a random model."""
    tokenizer = FORMAT.tokenizer
    config = nonsense_config()
    engine = EmbeddedEngine(
        build_model(config, seed=0),
        EngineConfig(max_running=8, cache_tokens=8192),
        max_context_tokens=4096,
        attention="dense",
        text=TokenText.of(tokenizer, vocab_size=config.vocab_size) if text else None,
    )
    async with engine:
        door = Door(engine)
        sampling = Sampling(max_new_tokens=2000, seed=seed, returns_kept_ids=True)
        door.session = door.gateway.open(
            "s", sampling=sampling, thinking=thinking, max_context_tokens=4096
        )
        door.key = door.access.admit(door.session)
        yield door


@pytest.mark.parametrize("dialect", list(FORMATS))
@pytest.mark.parametrize("thinking", [True, False])
async def test_nonsense_follows_the_schema_behind_its_reasoning(dialect, thinking):
    async with nonsense(thinking=thinking) as door, door.raw() as client:
        answer = await client.post(FORMATS[dialect][0], json=body(dialect))
        assert answer.status_code == 200, answer.text
        text, thought = text_of_answer(dialect, answer.json())
        follows(text)
        assert bool(thought) is thinking
        # What it thought is as free as ever: it is no JSON.
        (segment,) = door.session.segments()
    (span,) = segment.constraints
    assert (span.start, span.stop) == (segment.is_sampled.index(True), len(segment.token_ids))
    assert span.constraint == Constraint(
        json_schema=span.constraint.json_schema,
        reasoning="open" if thinking else "none",
        tags_by_id=True,
    )
    assert json.loads(span.constraint.json_schema) == SCHEMA
    assert segment.kept_ids is None
    # Whoever walks the record finds each token among those that were left.
    walk = Grammars(FORMAT.tokenizer, vocab_size=FORMAT.tokenizer.vocab_size).walk(
        span.constraint, span.stop_ids
    )
    for token_id in segment.token_ids[span.start : span.stop]:
        assert walk.allowed().mask()[token_id]
        walk.take([token_id])


async def test_what_was_answered_is_trained_under_what_it_was_drawn_from(tmp_path):
    """A free turn between two constrained ones, and a branch; each where it stands in its segment."""
    async with nonsense(thinking=True) as door, door.raw() as client:
        history = [{"role": "user", "content": "q"}]
        for schema in (
            SCHEMA,
            None,
            {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
        ):
            asked = body("chat", schema) if schema else chat_body(max_tokens=50)
            answer = await client.post("/v1/chat/completions", json=asked | {"messages": history})
            message = answer.json()["choices"][0]["message"]
            history = [*history, message, {"role": "user", "content": "more"}]
        await client.post("/v1/chat/completions", json=body("chat", messages=history[:1], n=2))
        segments = door.session.segments()
    assert [len(one.constraints) for one in segments] == [2, 1, 1]
    trajectory = replace(make_trajectory(), segments=segments)
    group = Group(
        id=trajectory.group_id,
        task_id=trajectory.task_id,
        family=trajectory.family,
        trajectories=(trajectory, replace(trajectory, id="other", reward=0.0)),
        multiplicities=(1, 1),
    )
    config = nonsense_config()
    trainer = PolicyTrainer(
        build_model(config, seed=0),
        PolicySettings(
            optimizer=OptimizerConfig(lr=1e-3),
            num_steps=1,
            micro_batch_tokens=8192,
            attention="dense",
            grammars=Grammars(FORMAT.tokenizer, vocab_size=config.vocab_size),
        ),
        loss=losses.icepop,
        publish_directory=str(tmp_path),
    )
    batch = Batch(stage="s", step=0, groups=(group,), trainer_version=0, resets_optimizer=False)
    largest = combine((await trainer.step(batch)).metrics)["mismatch/max_abs_log_ratio"]
    assert largest == 0 if native() is not None else largest < 1e-4


@pytest.mark.parametrize("dialect", list(FORMATS))
async def test_a_stream_of_nonsense_follows_it_too_and_is_the_same_answer(dialect):
    path, _ = FORMATS[dialect]
    async with nonsense(thinking=True) as door, door.raw() as client:
        whole = (await client.post(path, json=body(dialect))).json()
    async with nonsense(thinking=True) as door, door.raw() as client:
        streamed = await client.post(path, json=body(dialect, stream=True))
    lines = [line.removeprefix("data: ") for line in streamed.text.splitlines()]
    events = [json.loads(line) for line in lines if line.startswith("{")]
    if dialect == "chat":
        deltas = [e["choices"][0]["delta"].get("content") for e in events if e["choices"]]
    elif dialect == "responses":
        deltas = [e["delta"] for e in events if e["type"] == "response.output_text.delta"]
    else:
        deltas = [e["delta"].get("text") for e in events if e["type"] == "content_block_delta"]
    text = "".join(delta or "" for delta in deltas)
    follows(text)
    assert text == text_of_answer(dialect, whole)[0]


async def test_the_sdks_read_their_own_types_from_it():
    async with nonsense(thinking=False) as door:
        async with door.sdk() as client:
            chat = await client.chat.completions.create(
                **body("chat", {"type": "object"}) | {"response_format": {"type": "json_object"}}
            )
            assert isinstance(json.loads(chat.choices[0].message.content), dict)
            answer = await client.responses.create(**body("responses"))
            follows(answer.output_text)
        async with door.anthropic() as client:
            message = await client.messages.create(**body("messages"))
            follows(message.content[0].text)


@pytest.mark.parametrize("dialect", list(FORMATS))
@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize(
    ("schema", "reason"), [({"not": {}}, 'Unimplemented keys: ["not"]'), ({"type": "foo"}, "foo")]
)
async def test_a_schema_that_cannot_be_followed_is_a_400(dialect, streams, schema, reason):
    async with nonsense(thinking=True) as door, door.raw() as client:
        answer = await client.post(FORMATS[dialect][0], json=body(dialect, schema, stream=streams))
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert reason in error["message"]
        assert error["type"] == "invalid_request_error"
        assert door.session.num_turns == 0


@pytest.mark.parametrize("dialect", list(FORMATS))
async def test_an_engine_that_does_not_know_the_text_of_tokens_is_a_400(dialect):
    async with nonsense(thinking=True, text=False) as door, door.raw() as client:
        answer = await client.post(FORMATS[dialect][0], json=body(dialect))
        assert answer.status_code == 400
        assert "no tokenizer.json beside its weights" in answer.json()["error"]["message"]


async def test_a_forced_call_is_asked_for_instead_and_a_possible_one_is_possible():
    engine = FakeEngine([DONE, DONE, DONE])
    door = Door(engine)
    async with door.raw() as client:
        for choice in ("required", "auto", "none"):
            asked = body("chat", tools=TOOLS, tool_choice=choice)
            assert (await client.post("/v1/chat/completions", json=asked)).status_code == 200
    constraints = [request.sampling.constraint for request in engine.requests]
    assert constraints[0] is None
    assert [c.allows_calls for c in constraints[1:]] == [True, False]


def test_every_format_says_where_its_answer_begins():
    options = TurnOptions(json_schema="{}")
    glm_4_5 = make_chat_format("glm-4.5", small_tokenizer())
    chatml = ChatMlFormat(chatml_tokenizer())
    bash = ToolSpec(name="bash", description="", parameters={})
    for chat_format, thinking, reasoning, by_id in (
        (FORMAT, True, "open", True),
        (FORMAT, False, "none", True),
        (glm_4_5, True, "optional", True),
        (chatml, True, "open", False),
    ):
        found = constraint_of(chat_format, options, [bash], thinking=thinking)
        assert found == Constraint(
            json_schema="{}", reasoning=reasoning, allows_calls=True, tags_by_id=by_id
        )
    assert constraint_of(FORMAT, TurnOptions(), [], thinking=True) is None


async def test_a_session_restored_from_its_log_knows_what_was_constrained():
    log: list[bytes] = []
    door = Door(FakeEngine([DONE, DONE]), turn_log=lambda _, i, payload: log.insert(i, payload))
    async with door.raw() as client:
        await client.post("/v1/chat/completions", json=body("chat"))
        await client.post("/v1/chat/completions", json=chat_body())
    assert b"constrained" in log[0]
    assert b"constrained" not in log[1]
    settings = {"sampling": Sampling(max_new_tokens=99), "thinking": True}
    restored = Gateway(FakeEngine([]), FORMAT).restore(
        "s", log, max_context_tokens=4096, **settings
    )
    assert restored.segments() == door.session.segments()
    assert restored.segments()[0].constraints
