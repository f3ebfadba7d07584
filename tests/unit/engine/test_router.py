"""The router over fake engines, in virtual time."""

import asyncio
from contextlib import suppress

import pytest

from fakes import FakeEngine, FakeWorkerEngine, fake_token
from longarc.config.routing import RoutingConfig
from longarc.engine.router import Router
from longarc.engine.worker import WorkerState
from longarc.errors import (
    ConfigError,
    EngineBusyError,
    EngineError,
    EngineLostError,
    EngineRequestError,
    WeightsRefusedError,
)
from longarc.records.sampling import Sampling, WeightSource
from virtual_time import run_virtual

NEW = WeightSource(path="/weights/new", sha256="0" * 64)
NEWER = WeightSource(path="/weights/newer", sha256="1" * 64)


def workers(num: int) -> dict[str, FakeWorkerEngine]:
    return {f"http://w{i}#0": FakeWorkerEngine() for i in range(num)}


def router(engines, **settings) -> Router:
    settings = {"keep_every_tokens": 4, "session_idle_s": 1000.0, **settings}
    return Router(engines, RoutingConfig(**settings))


async def complete(engine, *, session="s", num=40, seed=3, **sampling):
    asked = Sampling(max_new_tokens=num, seed=seed, **sampling)
    return [piece async for piece in engine.stream([1, 2], asked, session_id=session)]


def ids_of(pieces):
    return [token for piece in pieces for token in piece.token_ids]


def expected(seed, num):
    return [fake_token(seed, i) for i in range(num)]


def busiest(engines):
    return max(engines.values(), key=lambda engine: engine.num_open)


def states(engine):
    return [worker.state for worker in engine._fleet.workers]


def test_no_request_is_lost_or_changed_when_an_engine_dies_under_two_hundred():
    async def main():
        engines = workers(4)
        async with router(engines) as engine, asyncio.TaskGroup() as tasks:
            running = [
                tasks.create_task(complete(engine, session=f"s{i}", seed=i)) for i in range(200)
            ]
            await asyncio.sleep(0.13)
            victim = busiest(engines)
            assert victim.num_open > 0
            victim.die()
        for seed, task in enumerate(running):
            pieces = task.result()
            assert ids_of(pieces) == expected(seed, 40)
            assert [p.logprobs for p in pieces] == [
                tuple(-i / 7 for i in p.token_ids) for p in pieces
            ]
            assert [p.finish_reason for p in pieces] == [None] * (len(pieces) - 1) + ["length"]
        assert victim.num_open == 0

    run_virtual(main())


def test_an_engine_that_dies_without_a_word_is_found_by_its_heartbeat():
    async def main():
        engines = workers(2)
        async with router(engines, heartbeat_s=1, heartbeat_timeout_s=2) as engine:
            async with asyncio.TaskGroup() as tasks:
                running = tasks.create_task(complete(engine))
                await asyncio.sleep(0.1)
                busiest(engines).hang()
            assert ids_of(running.result()) == expected(3, 40)
            assert WorkerState.LOST in states(engine)
            # Three heartbeats of two seconds, and the pauses between them.
            assert asyncio.get_running_loop().time() < 3 * (2 + 1) + 1

    run_virtual(main())


def test_the_version_changes_at_the_seam_and_not_before():
    async def main():
        engines = workers(2)
        async with router(engines, patience_s=5) as engine:
            pieces = []
            stream = engine.stream([1], Sampling(max_new_tokens=12, seed=1), session_id="s")
            async for piece in stream:
                pieces.append(piece)
                if len(pieces) == 1:
                    first = busiest(engines)
                    (second,) = [e for e in engines.values() if e is not first]
                    second.policy_version = 5
                    first.die()
            assert ids_of(pieces) == expected(1, 12)
            assert [p.policy_version for p in pieces] == [0, 5, 5]
            assert [p.num_cached_tokens for p in pieces] == [0, 0, 0]

    run_virtual(main())


def test_without_a_seed_the_rest_still_follows_from_one():
    async def main():
        engines = workers(2)
        async with router(engines) as engine:
            async with asyncio.TaskGroup() as tasks:
                running = tasks.create_task(complete(engine, seed=None))
                await asyncio.sleep(0.1)
                busiest(engines).die()
            assert ids_of(running.result()) == expected(1, 40)

    run_virtual(main())


def test_a_session_stays_where_its_cache_is():
    async def main():
        engines = workers(8)
        async with router(engines) as engine:
            for _ in range(3):
                for i in range(30):
                    await complete(engine, session=f"s{i}", num=1)
        for worker in engines.values():
            assert all(worker.sessions.count(name) == 3 for name in worker.sessions)
            assert len(set(worker.sessions)) <= 5  # 30 / 8 * 1.25, rounded up where it must

    run_virtual(main())


def test_a_draining_engine_gets_nothing_new_and_ends_what_runs():
    async def main():
        engines = workers(2)
        async with router(engines) as engine:
            async with asyncio.TaskGroup() as tasks:
                running = tasks.create_task(complete(engine, num=400))
                await asyncio.sleep(0.1)
                draining = busiest(engines)
                draining.is_ready = False
                await asyncio.sleep(1.1)
                assert WorkerState.DRAINING in states(engine)
                for i in range(8):
                    await complete(engine, session=f"new{i}", num=1)
                assert draining.sessions == ["s"]
            assert ids_of(running.result()) == expected(3, 400)
            assert draining.sessions == ["s"]

    run_virtual(main())


def test_an_engine_that_refuses_new_weights_serves_no_more_and_what_it_ran_goes_on():
    async def main():
        engines = workers(2)
        async with router(engines) as engine:
            async with asyncio.TaskGroup() as tasks:
                running = tasks.create_task(complete(engine, num=400))
                await asyncio.sleep(0.1)
                old = busiest(engines)
                old.refuses = WeightsRefusedError("another model")
                await engine.update_weights(NEW, policy_version=1)
                assert WorkerState.STALE in states(engine)
            pieces = running.result()
            assert ids_of(pieces) == expected(3, 400)
            assert [p.policy_version for p in pieces] == sorted(p.policy_version for p in pieces)
            assert pieces[-1].policy_version == 1
            assert (await engine.health()).policy_version == 1
            assert WorkerState.STALE in states(engine)
            old.refuses = None
            await asyncio.sleep(31)
            assert states(engine) == [WorkerState.SERVING] * 2
            assert old.updates == [("/weights/new", 1)]

    run_virtual(main())


def test_an_engine_that_dies_during_an_update_is_out_when_the_update_returns():
    async def main():
        engines = workers(2)
        first = next(iter(engines.values()))
        async with router(engines) as engine:
            first.die()
            await engine.update_weights(NEW, policy_version=1)
            assert states(engine) == [WorkerState.SUSPECT, WorkerState.SERVING]

    run_virtual(main())


def test_an_engine_that_somebody_else_gave_weights_gets_the_current_ones_again():
    async def main():
        engines = workers(2)
        first = next(iter(engines.values()))
        async with router(engines) as engine:
            await engine.update_weights(NEW, policy_version=1)
            first.policy_version = 99
            await asyncio.sleep(2)
            assert first.updates == [("/weights/new", 1)] * 2
            assert states(engine) == [WorkerState.SERVING] * 2

    run_virtual(main())


def test_sessions_of_the_beginning_are_spread_over_all_that_are_well():
    async def main():
        engines = workers(4)
        list(engines.values())[3].hang()
        async with router(engines, heartbeat_timeout_s=2.0) as engine:
            assert asyncio.get_running_loop().time() == 2.0
            for i in range(12):
                await complete(engine, session=f"s{i}", num=1)
        assert [len(worker.sessions) > 1 for worker in engines.values()] == [True] * 3 + [False]

    run_virtual(main())


def test_weights_that_every_engine_refuses_change_nothing():
    async def main():
        engines = workers(2)
        async with router(engines) as engine:
            await engine.update_weights(NEW, policy_version=1)
            for worker in engines.values():
                worker.refuses = WeightsRefusedError("half a file")
            with pytest.raises(WeightsRefusedError, match="half a file"):
                await engine.update_weights(NEWER, policy_version=2)
            assert states(engine) == [WorkerState.SERVING] * 2
            assert (await complete(engine))[-1].policy_version == 1

    run_virtual(main())


def test_an_engine_that_was_started_anew_gets_the_current_weights_before_any_request():
    async def main():
        engines = workers(2)
        async with router(engines) as engine:
            await engine.update_weights(NEW, policy_version=1)
            first = next(iter(engines.values()))
            first.die()
            await asyncio.sleep(10)
            await engine.update_weights(NEWER, policy_version=2)
            first.start_anew(policy_version=2)  # the number alone proves nothing
            first.sessions.clear()
            first.updates.clear()
            pieces = []
            for i in range(400):
                pieces += await complete(engine, session=f"n{i}", num=4)
            assert first.sessions
            assert first.updates == [("/weights/newer", 2)]
            assert {piece.policy_version for piece in pieces} == {2}

    run_virtual(main())


def test_weights_that_come_while_an_engine_joins_reach_it():
    async def main():
        engines = workers(3)
        first = next(iter(engines.values()))
        first.token_s = 5.0  # it takes its weights slowly
        async with router(engines) as engine:
            await engine.update_weights(NEW, policy_version=1)
            first.start_anew()
            await asyncio.sleep(2)
            first.die()
            await asyncio.sleep(1)
            first.start_anew()
            await engine.update_weights(NEWER, policy_version=2)
            await asyncio.sleep(60)
            assert states(engine) == [WorkerState.SERVING] * 3
            assert first.policy_version == 2

    run_virtual(main())


def test_an_engine_that_comes_back_during_an_update_serves_no_older_weights_after_it():
    async def main():
        engines = workers(3)
        first, second, _ = engines.values()
        async with router(engines) as engine:
            await engine.update_weights(NEW, policy_version=1)
            first.die()
            await asyncio.sleep(5)
            second.token_s = 5.0  # the update takes that long
            async with asyncio.TaskGroup() as tasks:
                update = tasks.create_task(engine.update_weights(NEWER, policy_version=2))
                await asyncio.sleep(0.1)
                first.start_anew()
                await asyncio.sleep(4)
                assert states(engine) == [WorkerState.SERVING] * 3
                assert first.policy_version == 1
                await update
                assert states(engine) == [WorkerState.JOINING] + [WorkerState.SERVING] * 2
            second.token_s = 0.01
            await asyncio.sleep(1)
            assert states(engine) == [WorkerState.SERVING] * 3
            assert [worker.policy_version for worker in engines.values()] == [2, 2, 2]

    run_virtual(main())


def test_a_request_that_gets_on_outlives_any_number_of_engines():
    async def main():
        engines = workers(2)
        async with router(engines, max_resumes=1) as engine, asyncio.TaskGroup() as tasks:
            running = tasks.create_task(complete(engine, num=2000))
            for _ in range(4):
                await asyncio.sleep(2)
                victim = busiest(engines)
                victim.die()
                await asyncio.sleep(2)
                victim.start_anew()
        assert ids_of(running.result()) == expected(3, 2000)

    run_virtual(main())


def test_an_engine_that_says_it_is_well_and_loses_every_request_is_given_up():
    async def main():
        engines = workers(2)
        bad = next(iter(engines.values()))
        bad.loses = True
        async with router(engines, num_failures=2, retry_after_s=20) as engine:
            for i in range(40):
                assert ids_of(await complete(engine, session=f"s{i}", num=4)) == expected(3, 4)
                await asyncio.sleep(0.1)
            assert len(bad.sessions) == 2
            bad.loses = False
            await asyncio.sleep(21)
            for i in range(40):
                await complete(engine, session=f"t{i}", num=4)
            assert len(bad.sessions) > 2

    run_virtual(main())


def test_an_engine_that_came_back_is_given_work_slowly():
    async def main():
        engines = workers(4)
        first = next(iter(engines.values()))
        async with router(engines, slow_start_s=100) as engine:
            await asyncio.sleep(200)
            first.die()
            await asyncio.sleep(5)
            first.start_anew()
            await asyncio.sleep(5)
            first.sessions.clear()
            for i in range(60):
                await complete(engine, session=f"early{i}", num=1)
            early = len(first.sessions)
            await asyncio.sleep(200)
            for i in range(60):
                await complete(engine, session=f"late{i}", num=1)
            late = len(first.sessions) - early
        assert early <= 60 / 4 / 2
        assert late >= 60 / 4

    run_virtual(main())


def test_a_request_that_no_engine_survives_ends_with_an_error():
    async def main():
        engines = workers(8)
        for worker in engines.values():
            worker.loses = True
        async with router(engines, max_resumes=2) as engine:
            with pytest.raises(EngineLostError):
                await complete(engine)
        assert sum(len(worker.sessions) for worker in engines.values()) == 3

    run_virtual(main())


def test_a_request_waits_for_an_engine_but_not_for_ever():
    async def main():
        engines = workers(1)
        (only,) = engines.values()
        only.die()
        async with router(engines, patience_s=30, max_retry_after_s=5) as engine:
            with pytest.raises(
                EngineLostError, match=r"no engine took requests for 30 s: http://w0#0 is"
            ):
                await complete(engine)
            async with asyncio.TaskGroup() as tasks:
                running = tasks.create_task(complete(engine))
                await asyncio.sleep(3)
                only.start_anew()
            assert ids_of(running.result()) == expected(3, 40)

    run_virtual(main())


def test_only_the_word_that_it_ended_was_lost():
    async def main():
        class SilentEnd(FakeWorkerEngine):
            async def stream(self, prompt_ids, sampling, *, session_id):
                async for piece in super().stream(prompt_ids, sampling, session_id=session_id):
                    if piece.finish_reason is None:
                        yield piece
                    else:
                        yield type(piece)(
                            token_ids=piece.token_ids, logprobs=piece.logprobs, policy_version=0
                        )
                        raise EngineLostError("gone")

        async with router({"a": SilentEnd()}) as engine:
            pieces = await complete(engine, num=8)
            stopped = await complete(engine, num=8, seed=4, stop_ids=(fake_token(4, 7),))
        assert ids_of(pieces) == expected(3, 8)
        assert (pieces[-1].token_ids, pieces[-1].finish_reason) == ((), "length")
        assert stopped[-1].finish_reason == "stop"

    run_virtual(main())


def test_a_full_engine_hands_its_request_to_another_and_full_ones_push_back():
    async def main():
        class Full(FakeWorkerEngine):
            async def stream(self, prompt_ids, sampling, *, session_id):
                raise EngineBusyError("full")
                yield

        async with router({"a": Full(), "b": FakeWorkerEngine()}) as engine:
            for i in range(8):
                assert ids_of(await complete(engine, session=f"s{i}")) == expected(3, 40)
        async with router({"a": Full(), "b": Full()}) as engine:
            with pytest.raises(EngineBusyError):
                await complete(engine)

    run_virtual(main())


def test_a_request_that_is_wrong_is_refused_and_not_tried_elsewhere():
    async def main():
        class Picky(FakeWorkerEngine):
            async def stream(self, prompt_ids, sampling, *, session_id):
                self.sessions.append(session_id)
                raise EngineRequestError("too long")
                yield

        engines = {"a": Picky(), "b": Picky()}
        async with router(engines) as engine:
            with pytest.raises(EngineRequestError):
                await complete(engine)
            assert states(engine) == [WorkerState.SERVING] * 2
        assert sum(len(e.sessions) for e in engines.values()) == 1

    run_virtual(main())


def test_closing_the_stream_cancels_the_request_at_its_engine():
    async def main():
        engines = workers(2)
        async with router(engines) as engine:
            stream = engine.stream([1], Sampling(max_new_tokens=40, seed=1), session_id="s")
            await anext(stream)
            assert busiest(engines).num_open == 1
            await stream.aclose()
            assert busiest(engines).num_open == 0

    run_virtual(main())


def test_counters_go_on_over_the_restart_of_an_engine():
    async def main():
        engines = workers(2)
        async with router(engines) as engine:
            for i in range(6):
                await complete(engine, session=f"s{i}")
            before = await engine.health()
            assert before.num_sampled_tokens == 240
            busy = max(engines.values(), key=lambda e: e.num_sampled)
            busy.die()
            await asyncio.sleep(10)
            assert (await engine.health()).num_sampled_tokens == 240
            busy.start_anew()
            await asyncio.sleep(10)
            await complete(engine)
            after = await engine.health()
            assert after.num_sampled_tokens == 280
            assert after.is_ready

    run_virtual(main())


def test_scores_come_from_an_engine_that_lives():
    async def main():
        engines = workers(3)
        async with router(engines) as engine:
            await engine.health()
            for worker in list(engines.values())[:2]:
                worker.die()
            assert await engine.score([1, 2, 3], temperature=0.5) == [0.0, -2.0, -2.0]

    run_virtual(main())


def test_what_the_block_raises_comes_out_as_it_is():
    async def main():
        with pytest.raises(EngineError, match="mine"):
            async with router(workers(1)):
                raise EngineError("mine")
        with suppress(asyncio.CancelledError):
            async with router(workers(1)):
                raise asyncio.CancelledError
        closed = router(workers(1))
        with pytest.raises(EngineLostError, match="async with"):
            await complete(closed)

    run_virtual(main())


def test_a_router_needs_engines():
    with pytest.raises(ConfigError, match="at least one"):
        router({})


def test_an_engine_of_any_other_kind_can_be_a_worker():
    async def main():
        async with router({"a": FakeEngine([[1, 2, 3]])}) as engine:
            assert ids_of(await complete(engine, num=3)) == [1, 2, 3]

    run_virtual(main())
