"""Who computes next: admission, chunks of prompts beside decoding, and who steps back when pages run out.

::

    add --> waiting --admit--> prefilling --> running --> finish
                       ^            |            |
                       +-- preempted <---preempt-+

* **Order.** Requests are admitted in the order of their arrival, those that were preempted first. While a request of
  another session waits, a session has no more than its share of the batch: ``max_running`` divided by the sessions
  that have requests, rounded up. Nobody overtakes a request for which there are not enough pages.
* **Prefill.** Between two decode steps at most ``max_prefill_tokens`` are computed, of the oldest requests first. A
  request whose prompt begins like one that is being computed waits for that.
* **Preemption.** A sequence has pages for its tokens when it is admitted. When a running one needs another page and
  none is left, the youngest gives up its pages and waits, with all that it has sampled; it goes on by computing what
  of its prompt and its tokens is not in the cache any more. The oldest is never preempted, so it always ends.
"""

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, auto

import numpy as np

from longarc.engine.pages import Ids
from longarc.engine.request import Request
from longarc.engine.seats import SeatTable

_MIN_SHARED_TOKENS = 16
"""A request waits for another one's prefill only if it saves at least this many tokens."""


class _Admission(Enum):
    ADMITTED = auto()
    WAITS_FOR_PREFILL = auto()
    NO_ROOM = auto()


@dataclass(frozen=True, slots=True)
class Chunk:
    """Known tokens of a request that are computed in one step."""

    request: Request
    tokens: Ids


class Scheduler:
    """Plans every step of one engine; its lists are touched by the planner alone."""

    def __init__(
        self, seats: SeatTable, *, max_running: int, keeps_newest_token: bool = False
    ) -> None:
        """Plan for these seats.

        Args:
            seats: of the cache.
            max_running: sequences computed together.
            keeps_newest_token: of what is known all but the newest token is computed beforehand: that begins a step.
        """
        self.seats = seats
        self._max_running = max_running
        self._keeps_newest_token = keeps_newest_token
        self.waiting: deque[Request] = deque()
        """Never admitted yet, in the order of arrival; whoever adds bounds it."""
        self.preempted: list[Request] = []
        self.prefilling: list[Request] = []
        self.running: list[Request] = []
        self.num_preemptions = 0
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.num_recomputed_tokens = 0

    @property
    def num_active(self) -> int:
        """Requests with a seat."""
        return len(self.prefilling) + len(self.running)

    @property
    def num_waiting(self) -> int:
        """Requests without a seat."""
        return len(self.waiting) + len(self.preempted)

    def begun(self) -> list[Request]:
        """Return the requests that may have tokens to hand over."""
        return [*self.preempted, *self.prefilling, *self.running]

    def drop_cancelled(self) -> None:
        """Forget requests that nobody listens to, and free their pages."""
        self.waiting = deque(r for r in self.waiting if not r.is_cancelled)
        for group in (self.preempted, self.prefilling, self.running):
            for request in [r for r in group if r.is_cancelled]:
                group.remove(request)
                self._release(request)

    def admit(self) -> None:
        """Give seats to requests as long as there are seats and pages."""
        self.preempted.sort(key=_arrival)
        if not self._admit_all(list(self.preempted)):
            return
        if not self.waiting or self.num_active >= self._max_running:
            return
        held = Counter(r.session_id for r in (*self.prefilling, *self.running))
        sessions = held.keys() | {r.session_id for r in self.waiting}
        share = -(-self._max_running // len(sessions))
        within_share: list[Request] = []
        beyond: list[Request] = []
        for request in self.waiting:
            held[request.session_id] += 1
            is_within = held[request.session_id] <= share
            (within_share if is_within else beyond).append(request)
        if self._admit_all(within_share):
            self._admit_all(beyond)
        self.waiting = deque(r for r in self.waiting if r.seat is None)

    def _admit_all(self, requests: Iterable[Request]) -> bool:
        """Admit in this order; return whether there may be room for more."""
        return all(self._admit(request) is not _Admission.NO_ROOM for request in requests)

    def _admit(self, request: Request) -> _Admission:
        if self.num_active >= self._max_running:
            return _Admission.NO_ROOM
        tokens = request.tokens()
        is_held = request.weights is not None
        prefix = self.seats.nothing() if is_held else self.seats.find(tokens)
        if self._keeps_newest_token and len(tokens) > 1:
            tokens = tokens[:-1]  # all of which may be found
        if self.seats.can_branch and not is_held and self._is_being_computed(tokens, prefix.length):
            return _Admission.WAITS_FOR_PREFILL
        # Others may soon need a page; whoever took the last one would be preempted at once.
        seat = self.seats.take(tokens, prefix, num_spare=self._num_growing())
        if seat is None:
            return _Admission.NO_ROOM
        request.seat, request.known = seat, tokens
        if request.has_begun:
            self.preempted.remove(request)
            self.num_recomputed_tokens += request.num_missing
        else:
            request.has_begun = True
            request.num_cached = seat.length
            self.num_prompt_tokens += len(request.prompt)
            self.num_cached_tokens += seat.length
        (self.prefilling if request.num_missing else self.running).append(request)
        return _Admission.ADMITTED

    def _num_growing(self) -> int:
        """Count the sequences that have fewer pages than they need at their greatest length."""
        return sum(
            self.seats.num_lacking(r.used_seat(), len(r.prompt) + r.sampling.max_new_tokens) > 0
            for r in (*self.prefilling, *self.running)
        )

    def _is_being_computed(self, tokens: Ids, num_cached: int) -> bool:
        """Whether enough of what is not in the cache is part of a prefill that goes on."""
        needed = num_cached + _MIN_SHARED_TOKENS
        if needed > len(tokens) - 1:
            return False
        head = tokens[:needed]
        return any(
            other.seat is not None
            and other.seat.key is not None
            and len(other.known) >= needed
            # Looked at first, because most prompts differ there.
            and other.known[needed - 1] == head[-1]
            and np.array_equal(other.known[:needed], head)
            for other in self.prefilling
        )

    def chunks(self, budget: int) -> list[Chunk]:
        """Return what to compute of prompts in this step, at most ``budget`` tokens."""
        found = []
        for request in self.prefilling:
            if budget <= 0:
                break
            seat = request.used_seat()
            tokens = request.known[seat.length : seat.length + budget]
            found.append(Chunk(request, tokens))
            budget -= len(tokens)
        return found

    def note_computed(self, chunk: Chunk) -> bool:
        """Note that a chunk is in the cache; return whether its request can sample now."""
        request = chunk.request
        self.seats.write(request.used_seat(), chunk.tokens)
        if request.num_missing:
            return False
        self.prefilling.remove(request)
        self.running.append(request)
        return True

    def make_room(self, max_steps: int, *, max_step_tokens: int = 1) -> int:
        """Give running sequences pages for their next tokens, preempting the youngest if need be.

        Args:
            max_steps: steps that each may make.
            max_step_tokens: most tokens of a sequence in a step.

        Returns:
            how many steps they make; ``running`` holds those that make them.
        """
        steps = min(max_steps, *(r.num_until_handover for r in self.running))
        if self._num_lacking(steps * max_step_tokens) > self.seats.num_available:
            steps = 1
        for request in sorted(self.running, key=_arrival):
            # Until there is a page for it, or it was itself the youngest.
            while request.seat is not None and not self.seats.grow(
                request.seat, _length_after(request, steps * max_step_tokens)
            ):
                self._preempt(max((*self.prefilling, *self.running), key=_arrival))
        return steps

    def _num_lacking(self, num_tokens: int) -> int:
        return sum(
            self.seats.num_lacking(request.used_seat(), _length_after(request, num_tokens))
            for request in self.running
        )

    def _preempt(self, request: Request) -> None:
        self.restart(request)
        self.num_preemptions += 1

    def restart(self, request: Request, *, is_sound: bool = True) -> None:
        """Take the pages of a sequence, which computes what is missing of its rows before it goes on.

        Args:
            request: has a seat.
            is_sound: whether what it leaves in the cache may serve others, and itself.
        """
        (self.running if request in self.running else self.prefilling).remove(request)
        self._release(request, is_sound=is_sound)
        self.preempted.append(request)

    def finish(self, request: Request, *, is_sound: bool) -> None:
        """Take a request with a seat out.

        Args:
            request: has ended.
            is_sound: whether what it leaves in the cache may serve others.
        """
        (self.running if request in self.running else self.prefilling).remove(request)
        self._release(request, is_sound=is_sound)

    def _release(self, request: Request, *, is_sound: bool = True) -> None:
        if request.seat is not None:
            self.seats.release(request.seat, is_sound=is_sound)
            request.seat = None

    def clear(self) -> list[Request]:
        """Take all requests out and return them."""
        requests = [*self.waiting, *self.begun()]
        for request in requests:
            self._release(request)
        for group in (self.waiting, self.preempted, self.prefilling, self.running):
            group.clear()
        return requests


def _length_after(request: Request, num_tokens: int) -> int:
    return request.used_seat().length + min(num_tokens, request.num_left)


def _arrival(request: Request) -> int:
    return request.arrival
