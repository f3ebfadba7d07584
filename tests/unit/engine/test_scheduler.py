"""The scheduler without a model: order, shares of sessions, preemption, and what is in whose way."""

import numpy as np
import pytest
import torch

from longarc.engine.request import Request
from longarc.engine.scheduler import Scheduler
from longarc.engine.seats import SeatTable
from longarc.models.cache import CacheShape, PagedCache
from longarc.records.sampling import Sampling

SIZE = 16


class Planned:
    """A scheduler, and requests whose tokens are counted up."""

    def __init__(self, *, num_pages=16, max_running=4):
        shape = CacheShape(num_slots=8, max_length=128, page_tokens=SIZE, num_pages=num_pages)
        cache = PagedCache(
            {"rows": 1}, shape, num_layers=1, dtype=torch.float32, device=torch.device("cpu")
        )
        self.scheduler = Scheduler(SeatTable(cache, salt="0"), max_running=max_running)
        self.num_requests = 0

    def add(self, session, length=10, *, first=None, max_new=40):
        self.num_requests += 1
        start = 1000 * self.num_requests if first is None else first
        request = Request(
            prompt=np.arange(start, start + length),
            sampling=Sampling(max_new_tokens=max_new),
            session_id=session,
            seed=0,
            arrival=self.num_requests,
        )
        self.scheduler.waiting.append(request)
        return request

    def prefill(self, budget=1000):
        for chunk in self.scheduler.chunks(budget):
            if self.scheduler.note_computed(chunk):
                chunk.request.note([7], [0.0], [], [])

    def decode(self, steps=1):
        steps = self.scheduler.make_room(steps)
        for request in self.scheduler.running:
            self.scheduler.seats.write(
                request.used_seat(), [request.last_token, *[7] * (steps - 1)]
            )
            request.note([7] * steps, [0.0] * steps, [], [])
        return steps


def sessions_of(requests):
    return "".join(request.session_id for request in requests)


def test_requests_are_admitted_in_the_order_of_their_arrival():
    planned = Planned(max_running=2)
    requests = [planned.add(name) for name in "abc"]
    planned.scheduler.admit()
    assert planned.scheduler.prefilling == requests[:2]
    assert list(planned.scheduler.waiting) == requests[2:]


def test_a_session_with_many_requests_leaves_the_others_their_share():
    planned = Planned(max_running=4)
    for name in "aaaaaabc":
        planned.add(name)
    planned.scheduler.admit()
    assert sessions_of(planned.scheduler.prefilling) == "aabc"


def test_a_session_alone_has_the_whole_batch():
    planned = Planned(max_running=4)
    for name in "aaaaaa":
        planned.add(name)
    planned.scheduler.admit()
    assert sessions_of(planned.scheduler.prefilling) == "aaaa"


def test_a_share_that_nobody_else_wants_is_used():
    planned = Planned(max_running=4)
    for name in "aaaab":
        planned.add(name)
    planned.scheduler.admit()
    assert sessions_of(planned.scheduler.prefilling) == "aaba"


def test_nobody_overtakes_a_request_that_waits_for_pages():
    planned = Planned(num_pages=6)
    planned.add("a", 60)
    big, small = planned.add("b", 60), planned.add("c", 5)
    planned.scheduler.admit()
    assert list(planned.scheduler.waiting) == [big, small]


def test_pages_are_spared_for_those_that_may_need_more_and_for_no_others():
    for max_new, num_admitted in ((7, 3), (40, 2)):
        planned = Planned(num_pages=6)
        for name in "abc":
            planned.add(name, 25, max_new=max_new)
        planned.scheduler.admit()
        assert len(planned.scheduler.prefilling) == num_admitted


def test_a_long_prompt_is_computed_in_chunks_within_the_budget():
    planned = Planned()
    planned.add("a", 50)
    planned.add("b", 20)
    planned.scheduler.admit()
    sizes = []
    while planned.scheduler.prefilling:
        chunks = planned.scheduler.chunks(30)
        sizes.append([len(chunk.tokens) for chunk in chunks])
        planned.prefill(30)
    assert sizes == [[30], [20, 10], [10]]


def test_a_prompt_that_is_being_computed_is_waited_for_and_then_shared():
    planned = Planned()
    first, second = planned.add("a", 40, first=0), planned.add("b", 40, first=0)
    planned.scheduler.admit()
    assert planned.scheduler.prefilling == [first]
    planned.prefill()
    planned.scheduler.admit()
    assert planned.scheduler.prefilling == [second]
    assert second.num_cached == 39
    assert second.seat.pages[:2] == first.seat.pages[:2]
    assert second.seat.pages[2] != first.seat.pages[2]


def test_the_youngest_gives_up_its_pages_and_goes_on_later_with_what_it_sampled():
    planned = Planned(num_pages=6, max_running=3)
    old, young = planned.add("a", 30), planned.add("b", 30)
    planned.scheduler.admit()
    planned.prefill()
    while not planned.scheduler.preempted:
        planned.decode()
    assert planned.scheduler.preempted == [young]
    assert young.seat is None
    sampled = list(young.sampled_ids)
    assert len(sampled) > 1
    planned.scheduler.admit()
    assert planned.scheduler.preempted == [young]  # there is no room yet
    planned.scheduler.finish(old, is_sound=True)
    planned.scheduler.admit()
    assert planned.scheduler.prefilling == [young]
    assert young.known.tolist() == [*young.prompt.tolist(), *sampled]
    assert planned.scheduler.num_prompt_tokens == 60


def test_what_was_preempted_comes_before_what_never_ran():
    planned = Planned(num_pages=6, max_running=2)
    old, young = planned.add("a", 30), planned.add("b", 30)
    planned.scheduler.admit()
    planned.prefill()
    planned.add("c", 1)
    while not planned.scheduler.preempted:
        planned.decode()
    planned.scheduler.finish(old, is_sound=True)
    planned.scheduler.admit()
    assert planned.scheduler.prefilling[0] is young


def test_steps_are_fewer_before_anyone_is_preempted():
    planned = Planned(num_pages=5, max_running=2)
    planned.add("a", 25)
    planned.add("b", 25)
    planned.scheduler.admit()
    planned.prefill()
    assert planned.decode(steps=16) == 1
    assert planned.scheduler.num_preemptions == 0


def test_a_cancelled_request_frees_its_pages_at_once():
    planned = Planned()
    request = planned.add("a", 40)
    planned.scheduler.admit()
    request.is_cancelled = True
    planned.scheduler.drop_cancelled()
    assert planned.scheduler.seats.pages.num_used == 0
    assert planned.scheduler.num_active == 0


def test_the_page_to_copy_from_is_given_up_where_it_is_the_last_one():
    """A sequence of all pages starts even if the page it could copy from has to be emptied for it."""
    planned = Planned(num_pages=2)
    planned.add("a", 10, first=0)
    planned.scheduler.admit()
    planned.prefill()
    planned.scheduler.finish(planned.scheduler.running[0], is_sound=True)
    request = planned.add("b", 20, first=0)
    request.prompt[5:] += 100
    planned.scheduler.admit()
    assert planned.scheduler.prefilling == [request]
    assert request.num_cached == 0


def test_the_next_turn_goes_on_in_the_last_page_and_copies_nothing():
    planned = Planned(num_pages=2)
    first = planned.add("a", 10, first=0)
    planned.scheduler.admit()
    planned.prefill()
    pages = list(first.seat.pages)
    planned.scheduler.finish(first, is_sound=True)
    request = planned.add("a", 20, first=0)
    planned.scheduler.admit()
    assert request.num_cached == 10
    assert request.seat.pages == [*pages, 1 - pages[0]]


def test_the_same_prompt_again_takes_the_page_that_it_fills():
    """All but the last token is in the cache; that one is computed into the same page, which is full again then."""
    planned = Planned(num_pages=3)
    for name in "ab":
        request = planned.add(name, 16, first=0)
        planned.scheduler.admit()
        assert request.num_cached == (0 if name == "a" else 15)
        planned.prefill()
        first_page = request.seat.pages[0]
        planned.scheduler.finish(request, is_sound=True)
    pages = planned.scheduler.seats.pages
    assert (pages.num_cached, pages.num_free) == (1, 2)
    assert pages.find(np.arange(16)).pages == (first_page,)


@pytest.mark.parametrize("is_sound", [True, False])
def test_only_sound_rows_serve_others(is_sound):
    planned = Planned()
    planned.add("a", 40, first=0)
    planned.scheduler.admit()
    planned.prefill()
    planned.scheduler.finish(planned.scheduler.running[0], is_sound=is_sound)
    other = planned.add("b", 40, first=0)
    planned.scheduler.admit()
    assert other.num_cached == (39 if is_sound else 0)


def test_a_sequence_that_runs_across_an_update_leaves_nothing_behind():
    planned = Planned()
    planned.add("a", 20, first=0)
    planned.scheduler.admit()
    planned.prefill()
    planned.scheduler.seats.renew("1")
    for _ in range(20):
        planned.decode()
    planned.scheduler.finish(planned.scheduler.running[0], is_sound=True)
    pages = planned.scheduler.seats.pages
    assert pages.num_free == pages.num_pages
