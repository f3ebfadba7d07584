"""Requests that come again: sampled once, whether the first runs, is done, or was before a restart."""

import asyncio

import pytest

from fakes import FakeEngine
from longarc.errors import ConfigError, EngineError
from longarc.gateway.core import Gateway
from longarc.gateway.session import SessionClosed
from longarc.gateway.turn_options import TurnOptions, TurnStart
from longarc.records.sampling import SampledTokens, Sampling
from longarc.tokens.glm import GlmFormat
from token_samples import BASH, sampled, small_tokenizer, tool, user

FORMAT = GlmFormat(small_tokenizer())
ONE, TWO = sampled("one<|user|>"), sampled("two!<|user|>")
CALL = sampled(
    "<tool_call>bash<arg_key>command</arg_key><arg_value>ls</arg_value></tool_call><|observation|>"
)
OPTIONS = {
    "sampling": Sampling(max_new_tokens=200, seed=3),
    "thinking": False,
    "max_context_tokens": 4096,
}


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class SlowEngine(FakeEngine):
    """Hands over its pieces one by one, when it is told to."""

    def __init__(self, completions) -> None:
        super().__init__(completions)
        self.may_go_on = asyncio.Event()

    async def stream(self, prompt_ids, sampling, *, session_id):
        async for piece in super().stream(prompt_ids, sampling, session_id=session_id):
            yield piece
            await self.may_go_on.wait()


def opened(engine, *, window_s=5.0, clock=None):
    gateway = Gateway(engine, FORMAT, repeat_window_s=window_s, clock=clock or Clock())
    return gateway.open("s", **OPTIONS)


def same(**options) -> TurnOptions:
    return TurnOptions(body_digest=b"body", **options)


@pytest.mark.parametrize("options", [same(), TurnOptions(idempotency_key="k"), same(is_retry=True)])
async def test_a_request_that_comes_again_while_the_first_runs_gets_its_tokens(options):
    engine = FakeEngine([ONE, TWO])
    session = opened(engine)
    first, second = await asyncio.gather(
        *(session.answer([user("q")], options=options) for _ in range(2))
    )
    assert first.node is second.node
    assert len(engine.requests) == session.num_turns == 1


async def test_who_joins_late_gets_every_piece_and_the_first_may_leave():
    engine = SlowEngine([ONE])
    session = opened(engine)
    early: list[object] = []
    late: list[object] = []
    first = asyncio.ensure_future(
        session.answer([user("q")], options=same(on_progress=early.append))
    )
    while len(early) < 2:
        await asyncio.sleep(0)
    second = asyncio.ensure_future(
        session.answer([user("q")], options=same(on_progress=late.append))
    )
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.wait([first])
    engine.may_go_on.set()
    answer = await second
    assert isinstance(late[0], TurnStart)
    assert late[0].num_prompt_tokens == answer.turn.num_prompt_tokens
    pieces = [p for p in late if isinstance(p, SampledTokens)]
    assert [i for p in pieces for i in p.token_ids] == ONE
    assert [p.token_ids for p in pieces[:1]] == [p.token_ids for p in early[1:2]]
    assert engine.num_cancelled == 0


async def test_when_the_last_one_leaves_the_request_is_cancelled_and_may_be_made_again():
    engine = SlowEngine([ONE, TWO])
    session = opened(engine)
    waiting = [asyncio.ensure_future(session.answer([user("q")], options=same())) for _ in range(2)]
    for _ in range(5):
        await asyncio.sleep(0)
    for one in waiting:
        one.cancel()
    await asyncio.wait(waiting)
    assert (engine.num_cancelled, session.num_turns) == (1, 0)
    engine.may_go_on.set()
    answer = await session.answer([user("q")], options=same())
    assert list(answer.node.sampled_ids) == TWO
    assert answer.node.serial == 0, "nothing was recorded, so it is the first request still"


async def test_a_waiter_that_fails_takes_nobody_with_it():
    engine = SlowEngine([ONE])
    session = opened(engine)

    def hung_up(part: object) -> None:
        raise ConnectionResetError

    first = asyncio.ensure_future(session.answer([user("q")], options=same(on_progress=hung_up)))
    second = asyncio.ensure_future(session.answer([user("q")], options=same()))
    with pytest.raises(ConnectionResetError):
        await first
    engine.may_go_on.set()
    assert list((await second).node.sampled_ids) == ONE


async def test_a_failure_is_everybodys_and_the_next_request_starts_anew():
    engine = FakeEngine([ONE, TWO])
    engine.before_piece = lambda r, p: (
        (_ for _ in ()).throw(EngineError("lost")) if r == 0 else None
    )
    session = opened(engine)
    results = await asyncio.gather(
        *(session.answer([user("q")], options=same()) for _ in range(2)), return_exceptions=True
    )
    assert [type(r) for r in results] == [EngineError, EngineError]
    assert list((await session.answer([user("q")], options=same())).node.sampled_ids) == TWO


async def test_an_equal_body_counts_as_the_same_request_only_for_a_while_and_until_the_client_went_on():
    clock = Clock()
    engine = FakeEngine([ONE, TWO, CALL, ONE, TWO])
    session = opened(engine, clock=clock)
    first = await session.answer([user("q")], options=same())
    clock.now_s += 4.0
    assert (await session.answer([user("q")], options=same())).node is first.node
    clock.now_s += 2.0
    assert (await session.answer([user("q")], options=same())).node is not first.node
    third = await session.answer([user("r")], tools=[BASH], options=TurnOptions(body_digest=b"r"))
    history = [user("r"), third.turn.message, tool("x")]
    await session.answer(history, tools=[BASH], options=TurnOptions(body_digest=b"h"))
    again = await session.answer([user("r")], tools=[BASH], options=TurnOptions(body_digest=b"r"))
    assert again.node is not third.node, "the client had this answer: it asks for another one"
    assert len(engine.requests) == 5


@pytest.mark.parametrize("window_s", [0.0, None])
async def test_without_a_window_an_equal_body_is_another_request_once_the_first_is_answered(
    window_s,
):
    engine = FakeEngine([ONE, TWO, ONE, TWO])
    session = opened(engine, window_s=window_s)
    first = await session.answer([user("q")], options=same())
    second = await session.answer([user("q")], options=same())
    assert first.node is not second.node
    together = await asyncio.gather(
        *(session.answer([user("p")], options=TurnOptions(body_digest=b"p")) for _ in range(2))
    )
    assert (together[0].node is together[1].node) is (window_s == 0.0)


@pytest.mark.parametrize("options", [same(is_retry=True), TurnOptions(idempotency_key="k"), same()])
async def test_a_retry_after_a_restart_gets_what_was_sampled_before_it(options):
    engine = FakeEngine([ONE, TWO])
    session = opened(engine)
    asked = TurnOptions(body_digest=b"body", idempotency_key=options.idempotency_key)
    first = await session.answer([user("q")], options=asked)
    await session.answer([user("other")])
    gateway = Gateway(engine, FORMAT, repeat_window_s=5.0, clock=Clock())
    restored = gateway.restore("s", session.payloads(), **OPTIONS)
    heard: list[object] = []
    again = await restored.answer(
        [user("q")],
        options=TurnOptions(
            body_digest=options.body_digest,
            idempotency_key=options.idempotency_key,
            is_retry=options.is_retry,
            on_progress=heard.append,
        ),
    )
    assert again.turn == first.turn
    assert [i for p in heard[1:] for i in p.token_ids] == ONE
    assert heard[-1].finish_reason == "stop"
    assert restored.payloads() == session.payloads()


async def test_a_key_that_was_used_for_another_request_is_refused():
    session = opened(FakeEngine([ONE]))
    await session.answer([user("q")], options=same(idempotency_key="k"))
    with pytest.raises(ConfigError, match="belongs to another request"):
        await session.answer(
            [user("r")], options=TurnOptions(idempotency_key="k", body_digest=b"other")
        )


async def test_a_repeated_answer_tells_the_versions_apart():
    engine = FakeEngine([ONE], version_of_piece=lambda r, p: p)
    session = opened(engine)
    await session.answer([user("q")], options=same())
    heard: list[object] = []
    await session.answer([user("q")], options=same(on_progress=heard.append))
    assert [(p.policy_version, p.token_ids) for p in heard[1:]] == [
        (i, tuple(ONE[2 * i : 2 * i + 2])) for i in range((len(ONE) + 1) // 2)
    ]


async def test_requests_at_once_have_seeds_and_call_ids_of_their_own_also_after_a_restart():
    engine = FakeEngine([CALL] * 3, yields=True)
    session = opened(engine)
    engine.before_piece = lambda r, p: (
        (_ for _ in ()).throw(EngineError("lost")) if r == 0 else None
    )
    results = await asyncio.gather(
        *(session.answer([user("q")], tools=[BASH]) for _ in range(2)), return_exceptions=True
    )
    kept = results[1]
    assert (kept.node.index, kept.node.serial) == (0, 1)
    restored = Gateway(engine, FORMAT).restore("s", session.payloads(), **OPTIONS)
    later = await restored.answer([user("q")], tools=[BASH])
    ids = {a.turn.message.tool_calls[0].id for a in (kept, later)}
    assert len(ids) == 2
    assert len({r.sampling.seed for r in engine.requests}) == 3


async def test_closing_ends_a_joined_request_for_all():
    engine = SlowEngine([ONE])
    session = opened(engine)
    waiting = [asyncio.ensure_future(session.answer([user("q")], options=same())) for _ in range(2)]
    for _ in range(5):
        await asyncio.sleep(0)
    await session.close()
    done, _ = await asyncio.wait(waiting)
    assert {type(one.exception()) for one in done} == {SessionClosed}


async def test_an_answer_is_cut_before_its_stop_text_and_goes_on_as_the_client_has_it():
    said = sampled("so it is. Observation: no")
    engine = FakeEngine([said, ONE])
    session = opened(engine)
    # What an engine does at a stop string: it ends with the token that completes it.
    engine._script = iter([said[: len(sampled("so it is. Observation:"))], ONE])
    options = TurnOptions(stop=("Observation:", "never"))
    stops: list[object] = []

    async def stopping(prompt_ids, sampling, *, session_id, inner=engine.stream):
        async for piece in inner(prompt_ids, sampling, session_id=session_id):
            stops.append(sampling.stop_strings)
            last = piece.finish_reason and "stop"
            yield SampledTokens(
                token_ids=piece.token_ids,
                logprobs=piece.logprobs,
                policy_version=0,
                finish_reason=last,
            )

    engine.stream = stopping
    first = await session.answer([user("q")], options=options)
    assert stops[0] == ("Observation:", "never")
    assert (first.turn.message.content, first.stop) == ("so it is. ", "Observation:")
    history = [user("q"), first.turn.message, user("r")]
    second = await session.answer(history)
    assert second.node.parent == 0
    (segment,) = session.segments()
    assert segment.num_trained_tokens == len(sampled("so it is. Observation:")) + len(ONE)
