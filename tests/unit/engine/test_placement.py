from collections import Counter

from longarc.engine.breaker import CircuitBreaker
from longarc.engine.placement import Placement


class Clock:
    def __init__(self):
        self.now_s = 0.0

    def __call__(self):
        return self.now_s


def placement(num_places, **settings):
    made = Placement(**{"load_factor": 1.25, "idle_s": 60.0, "clock": Clock(), **settings})
    for i in range(num_places):
        made.add(f"w{i}", f"w{i}")
    return made


def test_sessions_spread_within_the_bound_and_close_to_it_only_where_they_must():
    places = placement(16)
    loads = Counter(places.place(f"session {i}") for i in range(1600))
    assert max(loads.values()) <= 125
    assert min(loads.values()) >= 60


def test_a_place_that_warms_up_gets_its_share_of_the_share():
    places = placement(4, weight=lambda place: 0.1 if place == "w0" else 1.0)
    loads = Counter(places.place(f"session {i}") for i in range(310))
    assert loads["w0"] <= 13  # a tenth of what a warm one gets: 1.25 * 10
    assert max(loads.values()) <= 125


def test_an_excluded_place_loses_the_session_for_good():
    places = placement(3)
    first = places.place("s")
    second = places.place("s", excluded={first})
    assert second != first
    assert places.place("s") == second
    assert places.place("t", excluded={"w0", "w1", "w2"}) is None


def test_an_idle_session_is_forgotten_and_finds_its_way_back():
    clock = Clock()
    places = placement(8, clock=clock)
    first = places.place("s")
    clock.now_s = 61.0
    places.place("t")
    assert sum(places.load(f"w{i}") for i in range(8)) == 1
    assert places.place("s") == first


def test_a_session_that_is_being_sampled_counts_however_long_that_takes():
    clock = Clock()
    places = placement(2, clock=clock)
    first = places.place("s")
    for _ in range(10):
        clock.now_s += 50.0
        places.touch("s")
        places.touch("nobody")
    places.place("t")
    assert places.load(first) >= 1
    assert places.load("w0") + places.load("w1") == 2


def breaker(clock):
    return CircuitBreaker(num_failures=2, retry_after_s=1.0, max_retry_after_s=5.0, clock=clock)


def test_a_breaker_opens_after_failures_in_a_row_only():
    one = breaker(Clock())
    one.failed()
    one.succeeded()
    one.failed()
    assert (one.is_open, one.wait_s) == (False, 0.0)
    one.failed()
    assert (one.is_open, one.wait_s) == (True, 1.0)


def test_each_failed_probe_doubles_the_wait_up_to_its_limit():
    clock = Clock()
    one = breaker(clock)
    one.failed()
    waits = []
    for _ in range(5):
        one.failed()
        waits.append(one.wait_s)
        clock.now_s += one.wait_s
        assert (one.is_open, one.wait_s) == (True, 0.0)
    assert waits == [1.0, 2.0, 4.0, 5.0, 5.0]
    one.succeeded()
    assert not one.is_open
