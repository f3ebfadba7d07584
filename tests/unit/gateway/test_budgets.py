"""What a session may use, and time by a clock that jumps."""

import asyncio

import pytest

from fakes import FakeEngine
from longarc.errors import ConfigError
from longarc.gateway.budget import BudgetExhausted, SessionBudget, Stopwatch
from longarc.gateway.core import Gateway
from longarc.gateway.session import SessionClosed
from longarc.gateway.turn_options import TurnOptions
from longarc.records.lineage import Lineage
from longarc.records.ports import ContextExhausted
from longarc.records.sampling import Sampling
from longarc.tokens.glm import GlmFormat
from token_samples import sampled, small_tokenizer, user

FORMAT = GlmFormat(small_tokenizer())
LONG = sampled("a long answer that nobody ends")
OPTIONS = {"sampling": Sampling(max_new_tokens=20), "thinking": False, "max_context_tokens": 4096}


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def opened(engine, *, clock=None, **budget):
    gateway = Gateway(engine, FORMAT, clock=clock or Clock())
    return gateway.open("s", budget=SessionBudget(**budget), **OPTIONS)


async def test_the_last_turn_gets_the_tokens_that_are_left_and_the_next_one_is_refused():
    engine = FakeEngine([LONG] * 3)
    session = opened(engine, max_sampled_tokens=25)
    for _ in range(2):
        await session.chat([user("q")])
    with pytest.raises(BudgetExhausted, match="25 of its 25 tokens") as caught:
        await session.chat([user("q")])
    assert (caught.value.what, caught.value.is_final) == ("tokens", True)
    assert isinstance(caught.value, ContextExhausted), (
        "white-box rollouts end as they do without room"
    )
    assert [r.sampling.max_new_tokens for r in engine.requests] == [20, 5]


async def test_requests_at_the_same_time_never_sample_more_than_the_budget():
    engine = FakeEngine([LONG] * 8, yields=True)
    session = opened(engine, max_sampled_tokens=50)
    results = await asyncio.gather(
        *(session.chat([user("q")]) for _ in range(8)), return_exceptions=True
    )
    refused = [r for r in results if isinstance(r, BudgetExhausted)]
    assert sum(r.num_sampled_tokens for r in results if not isinstance(r, Exception)) == 50
    assert len(refused) == 5
    assert not any(r.is_final for r in refused), "they may be asked again when one has ended"


async def test_what_a_failed_request_held_is_given_back():
    engine = FakeEngine([LONG])
    session = opened(engine, max_sampled_tokens=20, max_requests=1)
    engine.before_piece = lambda r, p: (_ for _ in ()).throw(RuntimeError("lost"))
    with pytest.raises(RuntimeError):
        await session.chat([user("q")])
    engine.before_piece, engine._script = None, iter([LONG])
    await session.chat([user("q")])


async def test_requests_are_counted_side_requests_and_restarts_included():
    engine = FakeEngine([LONG] * 3)
    session = opened(engine, max_requests=2)
    await session.chat([user("q")])
    gateway = Gateway(engine, FORMAT)
    budget = SessionBudget(max_requests=2)
    session = gateway.restore("s", session.payloads(), budget=budget, **OPTIONS)
    await session.chat([user("q")])
    with pytest.raises(BudgetExhausted, match="2 requests") as caught:
        await session.chat([user("q")])
    assert caught.value.what == "requests"


async def test_a_session_whose_time_is_over_is_refused_and_keeps_what_it_has():
    clock = Clock()
    session = opened(FakeEngine([LONG] * 3), clock=clock, max_wall_s=60.0)
    await session.chat([user("q")])
    clock.now_s -= 1000.0
    await session.chat([user("q")])
    clock.now_s += 59.0
    await session.chat([user("q")])
    clock.now_s += 1e9
    with pytest.raises(BudgetExhausted, match="its 60 s are over") as caught:
        await session.chat([user("q")])
    assert (caught.value.what, caught.value.is_final) == ("wall_s", True)
    assert len(session.segments()) == 3


async def test_time_that_ends_while_tokens_are_sampled_ends_the_request():
    clock = Clock()
    engine = FakeEngine([LONG])

    def before_piece(request: int, piece: int) -> None:
        clock.now_s += 10.0

    engine.before_piece = before_piece
    session = opened(engine, clock=clock, max_wall_s=35.0)
    with pytest.raises(BudgetExhausted, match="35 s"):
        await session.chat([user("q")])
    assert engine.num_cancelled == 1
    assert session.segments() == ()


async def test_an_engine_that_says_nothing_is_left_when_the_time_is_over_or_the_session_closed():
    class Silent(FakeEngine):
        async def stream(self, prompt_ids, sampling, *, session_id):
            await asyncio.Event().wait()
            yield

    session = opened(Silent([]), max_wall_s=0.01)
    with pytest.raises(BudgetExhausted):
        await session.chat([user("q")])
    session = opened(Silent([]))
    waiting = asyncio.ensure_future(session.chat([user("q")]))
    await asyncio.sleep(0)
    assert session.is_running
    await session.close()
    with pytest.raises(SessionClosed):
        await waiting


async def test_time_before_a_restart_counts():
    clock = Clock()
    session = opened(FakeEngine([LONG]), clock=clock, max_wall_s=60.0)
    clock.now_s += 50.0
    await session.answer([user("q")], options=TurnOptions(lineage=Lineage()))
    later = Clock()
    gateway = Gateway(FakeEngine([LONG]), FORMAT, clock=later)
    budget = SessionBudget(max_wall_s=60.0)
    session = gateway.restore("s", session.payloads(), budget=budget, **OPTIONS)
    later.now_s += 11.0
    with pytest.raises(BudgetExhausted):
        await session.chat([user("q")])


def test_a_stopwatch_never_goes_back():
    clock = Clock()
    watch = Stopwatch(clock)
    seen = []
    for jump in (1.0, -500.0, 2.0, 0.0):
        clock.now_s += jump
        seen.append(watch.elapsed_s())
    assert seen == [1.0, 1.0, 3.0, 3.0]


@pytest.mark.parametrize("name", ["max_sampled_tokens", "max_requests", "max_wall_s"])
def test_a_budget_of_nothing_is_a_mistake(name):
    with pytest.raises(ConfigError, match=name):
        SessionBudget(**{name: 0})
