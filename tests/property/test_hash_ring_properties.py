"""Consistent hashing with bounded loads: what must hold for any names, sessions and order of events."""

from hypothesis import given
from hypothesis import strategies as st

from longarc.engine.hash_ring import HashRing
from longarc.engine.placement import Placement

NAMES = st.sets(st.text(min_size=1, max_size=6), min_size=1, max_size=12).map(sorted)
KEYS = st.lists(st.text(max_size=6), min_size=1, max_size=60, unique=True)


def ring_of(names):
    ring = HashRing(points_per_place=16)
    for name in names:
        ring.add(name, name)
    return ring


@given(NAMES, KEYS)
def test_a_key_meets_every_place_once_whatever_the_order_of_joining(names, keys):
    one, other = ring_of(names), ring_of(reversed(names))
    for key in keys:
        walked = list(one.walk(key))
        assert sorted(walked) == names
        assert walked == list(other.walk(key))


@given(NAMES, KEYS, st.data())
def test_losing_a_place_moves_its_own_keys_and_no_other_and_they_come_back(names, keys, data):
    gone = data.draw(st.sampled_from(names))
    ring = ring_of(names)
    before = {key: list(ring.walk(key)) for key in keys}
    ring.remove(gone)
    for key in keys:
        assert list(ring.walk(key)) == [name for name in before[key] if name != gone]
    ring.add(gone, gone)
    assert {key: list(ring.walk(key)) for key in keys} == before


@given(NAMES, KEYS, st.floats(1.01, 4.0))
def test_no_place_has_more_than_its_bound_of_new_sessions(names, keys, load_factor):
    placement = Placement(load_factor=load_factor, idle_s=1.0, clock=lambda: 0.0)
    for name in names:
        placement.add(name, name)
    for number, key in enumerate(keys, start=1):
        assert placement.place(key) in names
        mean = number / len(names)
        assert max(map(placement.load, names)) <= max(load_factor * mean, mean + 1)
    assert sum(map(placement.load, names)) == len(keys)


@given(NAMES, KEYS, st.data())
def test_a_session_stays_until_its_place_is_gone(names, keys, data):
    placement = Placement(load_factor=1.25, idle_s=1.0, clock=lambda: 0.0)
    for name in names:
        placement.add(name, name)
    at = {key: placement.place(key) for key in keys}
    for key in data.draw(st.permutations(keys)):
        assert placement.place(key) == at[key]
    gone = data.draw(st.sampled_from(names))
    placement.remove(gone)
    for key in keys:
        moved = placement.place(key)
        assert moved == at[key] if at[key] != gone else moved != gone
    assert (placement.place(keys[0]) is None) == (len(names) == 1)


@given(NAMES, KEYS, st.lists(st.floats(0, 3), min_size=1, max_size=60))
def test_loads_count_live_sessions_and_nothing_else(names, keys, pauses):
    now_s = 0.0
    placement = Placement(load_factor=1.25, idle_s=2.0, clock=lambda: now_s)
    for name in names:
        placement.add(name, name)
    seen = {}
    for index, pause_s in enumerate(pauses):
        now_s += pause_s
        key = keys[index % len(keys)]
        place = placement.place(key)
        seen[key] = (now_s, place)
        live = [at for s, at in seen.values() if now_s - s < 2.0]
        assert {name: placement.load(name) for name in names} == {
            name: live.count(name) for name in names
        }
