"""Pages: found by what they hold, kept while there is room, never given away in use."""

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from longarc.engine.pages import PagePool

SIZE = 16


def ids(*values):
    return np.array(values, dtype=np.int64)


def stored(pool, tokens):
    """Store tokens as a sequence would that shares nothing, and return its pages."""
    pages = pool.take(-(-len(tokens) // pool.page_tokens))
    key = pool.root
    for page, start in zip(pages, range(0, len(tokens), pool.page_tokens), strict=True):
        key = pool.write(page, tokens[start : start + pool.page_tokens], key)
    return pages


def counts(pool):
    return pool.num_free, pool.num_cached, pool.num_used


def test_full_pages_are_shared_and_of_the_next_the_common_part_is_told():
    pool = PagePool(4, SIZE, salt="0")
    pages = stored(pool, ids(*range(40)))
    found = pool.find(ids(*range(36), 99))
    assert (found.length, found.pages, found.partial_page) == (36, tuple(pages[:2]), pages[2])


def test_the_longest_of_several_ways_on_is_found():
    pool = PagePool(8, SIZE, salt="0")
    for tail in ([1, 2], [1, 2, 3, 4], [7]):
        stored(pool, ids(*range(16), *tail))
    assert pool.find(ids(*range(16), 1, 2, 3, 9)).length == 19


def test_what_nobody_uses_stays_until_its_room_is_needed_the_oldest_first_and_the_end_before_the_beginning():
    pool = PagePool(4, SIZE, salt="0")
    old, new = stored(pool, ids(*range(32))), stored(pool, ids(*range(100, 132)))
    pool.drop(old)
    pool.drop(new)
    assert counts(pool) == (0, 4, 0)
    pool.take(1)
    assert pool.find(ids(*range(32))).length == 16
    assert pool.find(ids(*range(100, 132))).length == 32
    pool.take(1)
    assert pool.find(ids(*range(32))).length == 0


def test_a_page_that_two_use_is_free_when_both_have_dropped_it():
    pool = PagePool(2, SIZE, salt="0")
    pages = stored(pool, ids(*range(16)))
    pool.hold(pages)
    pool.drop(pages)
    assert counts(pool) == (1, 0, 1)
    pool.drop(pages)
    assert counts(pool) == (1, 1, 0)


def test_a_second_page_with_the_same_tokens_is_not_kept():
    pool = PagePool(4, SIZE, salt="0")
    pool.drop(stored(pool, ids(*range(16))))
    pool.drop(stored(pool, ids(*range(16))))
    assert counts(pool) == (3, 1, 0)


def test_new_weights_find_nothing_of_the_old_ones_not_even_what_is_written_later():
    pool = PagePool(4, SIZE, salt="0")
    running = stored(pool, ids(*range(16)))
    pool.drop(stored(pool, ids(*range(50, 60))))
    old_root = pool.root
    pool.renew("1")
    assert counts(pool) == (3, 0, 1)
    later = pool.take(1)
    pool.write(later[0], ids(1, 2, 3), old_root)
    assert pool.find(ids(*range(16))).length == pool.find(ids(1, 2, 3)).length == 0
    pool.drop(running)
    assert pool.num_free == 3


def test_pages_at_fault_are_found_by_nobody():
    pool = PagePool(4, SIZE, salt="0")
    pages = stored(pool, ids(*range(20)))
    pool.forget(pages)
    assert pool.find(ids(*range(20))).length == 0
    pool.drop(pages)
    assert counts(pool) == (4, 0, 0)


def test_a_page_that_was_cut_is_found_for_what_it_still_holds_and_not_at_all_when_it_is_gone():
    pool = PagePool(2, SIZE, salt="0")
    tokens = ids(*range(16))
    pages = stored(pool, tokens)
    pool.drop(pages)
    assert pool.can_go_on(pages[0], tokens)
    assert not pool.can_go_on(pages[0], ids(*range(15), 99))
    pool.hold(pages)
    assert not pool.can_go_on(pages[0], tokens)
    pool.cut(pages[0], 15)
    assert pool.find(tokens).length == 15
    pool.drop(pages)
    pool.take(2)
    assert pool.find(tokens).length == 0


def test_pages_that_follow_each_other_are_preferred():
    pool = PagePool(8, SIZE, salt="0")
    first = pool.take(2)
    pool.take(1)
    assert first == [0, 1]
    assert pool.take(2, after=4) == [5, 6]


@pytest.mark.parametrize("seed", range(3))
@given(data=st.data())
def test_whatever_happens_pages_add_up_and_what_is_found_is_what_was_stored(seed, data):
    rng = random.Random(seed)
    pool = PagePool(6, SIZE, salt="0")
    alive = []
    for step in range(data.draw(st.integers(1, 40))):
        match data.draw(st.sampled_from(["store", "store", "drop", "renew"])):
            case "store":
                tokens = ids(*(rng.choice([0, 0, 1]) for _ in range(rng.choice([5, 16, 30, 48]))))
                found = pool.find(tokens)
                held = pool.held(found.pages, len(found.pages) * SIZE)
                assert held.tolist() == tokens[: len(held)].tolist()
                if found.length > len(held):
                    rest = pool.held([found.partial_page], found.length - len(held))
                    assert rest.tolist() == tokens[len(held) : found.length].tolist()
                if -(-len(tokens) // SIZE) <= pool.num_available:
                    alive.append(stored(pool, tokens))
            case "drop" if alive:
                pool.drop(alive.pop(rng.randrange(len(alive))))
            case "renew":
                pool.renew(str(step))
                assert pool.num_cached == 0
        assert sum(counts(pool)) == 6
        assert pool.num_used == sum(map(len, alive))
