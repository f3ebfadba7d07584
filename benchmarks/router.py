"""Where sessions go: the router's placement beside round robin and least-loaded, in simulated time.

10,000 agent sessions take their turns at 64 engines, each of which keeps the prefixes of the sessions it saw
last. Half way through, one engine is lost. All three policies see the same sessions, turns and pauses.

* moved: sessions whose first turn after the loss goes elsewhere than the turn before it.
* load: sessions that are under way and had their last turn at an engine, over the mean of all engines; the largest
  of all engines and moments.
* prefix hits: tokens of earlier turns that the engine of a turn still holds, over all tokens of earlier turns.
"""

import argparse
import heapq
import random
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from statistics import mean
from typing import Protocol

from common import Table, positive

from longarc.config.routing import RoutingConfig
from longarc.engine.placement import Placement

NUM_ENGINES, NUM_SESSIONS, NUM_TURNS = 64, 10_000, 20
PAUSE_S = 10.0
"""Mean time a session spends with its tools between two turns [seconds], exponential."""
SAMPLING_S = 2.0
"""Mean time an engine spends on a turn [seconds], exponential."""
NEW_TOKENS = (100, 500)
"""Tokens that a turn adds, prompt and completion together [tokens], uniform."""
SPARE = 1.5
"""What all caches hold, over what all sessions hold at their end."""
MOSTLY = 0.9
"""Share of the sessions that must be there for loads to be compared."""
MOST_MOVED = 1 / NUM_ENGINES + 0.05
MOST_LOAD = 1.25
LEAST_HITS = 0.95


@dataclass(frozen=True, slots=True)
class Turn:
    """A session asks."""

    at_s: float
    until_s: float
    session: int
    num_known_tokens: int
    num_new_tokens: int
    is_last: bool


class Policy(Protocol):
    """Says where a turn goes."""

    def lose(self, engine: int) -> None: ...

    def place(self, turn: Turn) -> int: ...


class Sticky:
    """The router's own: consistent hashing with bounded loads."""

    def __init__(self) -> None:
        self._now_s = 0.0
        config = RoutingConfig()
        self._placement: Placement[int] = Placement(
            load_factor=config.load_factor, idle_s=config.session_idle_s, clock=lambda: self._now_s
        )
        for engine in range(NUM_ENGINES):
            self._placement.add(f"http://engine-{engine}:8000#0", engine)

    def lose(self, engine: int) -> None:
        self._placement.remove(engine)

    def place(self, turn: Turn) -> int:
        self._now_s = turn.at_s
        place = self._placement.place(f"stage/group-{turn.session // 8}/{turn.session % 8}")
        assert place is not None
        return place


class RoundRobin:
    """Each turn to the next engine."""

    def __init__(self) -> None:
        self._engines = list(range(NUM_ENGINES))
        self._next = 0

    def lose(self, engine: int) -> None:
        self._engines.remove(engine)

    def place(self, turn: Turn) -> int:
        self._next = (self._next + 1) % len(self._engines)
        return self._engines[self._next]


class LeastLoaded:
    """Each turn to the engine with the fewest turns running; the first of several."""

    def __init__(self) -> None:
        self._running = dict.fromkeys(range(NUM_ENGINES), 0)
        self._ends: list[tuple[float, int]] = []

    def lose(self, engine: int) -> None:
        del self._running[engine]

    def place(self, turn: Turn) -> int:
        while self._ends and self._ends[0][0] <= turn.at_s:
            _, ended = heapq.heappop(self._ends)
            if ended in self._running:
                self._running[ended] -= 1
        engine = min(self._running, key=self._running.__getitem__)
        self._running[engine] += 1
        heapq.heappush(self._ends, (turn.until_s, engine))
        return engine


@dataclass(slots=True)
class Cache:
    """Prefixes of sessions on one engine, the least recently used dropped first."""

    capacity_tokens: float
    lengths: OrderedDict[int, int] = field(default_factory=OrderedDict)
    num_tokens: int = 0

    def hit(self, turn: Turn) -> int:
        """Return the tokens of the prompt that are there, and keep the whole turn."""
        found = self.lengths.pop(turn.session, 0)
        whole = turn.num_known_tokens + turn.num_new_tokens
        self.lengths[turn.session] = whole
        self.num_tokens += whole - found
        while self.num_tokens > self.capacity_tokens:
            self.num_tokens -= self.lengths.popitem(last=False)[1]
        return min(found, turn.num_known_tokens)


@dataclass(frozen=True, slots=True)
class Result:
    """What became of one policy with one seed."""

    moved_frac: float
    load: float
    hit_frac: float


def turns(seed: int) -> list[Turn]:
    """Return the turns of all sessions in order of time; sessions begin within the first pauses."""
    draw = random.Random(seed)
    found: list[Turn] = []
    for session in range(NUM_SESSIONS):
        at_s, known = draw.uniform(0, 4 * PAUSE_S), 0
        for index in range(NUM_TURNS):
            until_s = at_s + draw.expovariate(1 / SAMPLING_S)
            new = draw.randint(*NEW_TOKENS)
            is_last = index == NUM_TURNS - 1
            found.append(Turn(at_s, until_s, session, known, new, is_last))
            known += new
            at_s = until_s + draw.expovariate(1 / PAUSE_S)
    return sorted(found, key=lambda turn: turn.at_s)


def simulate(policy: Policy, events: Sequence[Turn], *, lost: int) -> Result:
    """Send all turns where the policy says; lose an engine half way."""
    tokens = mean(NEW_TOKENS) * NUM_TURNS * NUM_SESSIONS
    caches = [Cache(SPARE * tokens / NUM_ENGINES) for _ in range(NUM_ENGINES)]
    last: dict[int, int] = {}
    sessions = [0] * NUM_ENGINES
    loads: list[float] = []
    before: dict[int, int] | None = None
    num_moved = num_seen = num_hits = num_ended = 0
    for number, turn in enumerate(events):
        if number == len(events) // 2:
            policy.lose(lost)
            before = dict(last)
        engine = policy.place(turn)
        if before is not None and turn.session in before:
            num_seen += 1
            num_moved += before.pop(turn.session) != engine
        if turn.session in last:
            sessions[last[turn.session]] -= 1
        last[turn.session] = engine
        sessions[engine] += 1
        num_hits += caches[engine].hit(turn)
        if turn.is_last:
            sessions[engine] -= 1
            num_ended += 1
        # Before most sessions are there, or when most are gone, a mean says little.
        if len(last) - num_ended >= MOSTLY * NUM_SESSIONS and number % 100 == 0:
            live = [n for e, n in enumerate(sessions) if before is None or e != lost]
            loads.append(max(live) / mean(live))
    ideal = sum(turn.num_known_tokens for turn in events)
    return Result(num_moved / num_seen, max(loads), num_hits / ideal)


def spread(values: Sequence[float], *, percent: bool) -> str:
    """Return mean and range over the seeds."""
    shown = [
        f"{100 * v:.2f} %" if percent else f"{v:.3f}"
        for v in (mean(values), min(values), max(values))
    ]
    return f"{shown[0]} [{shown[1]} .. {shown[2]}]"


def results(seeds: Sequence[int]) -> dict[str, list[Result]]:
    """Return the results of each policy, a seed after the other."""
    found: dict[str, list[Result]] = {"ours": [], "round robin": [], "least-loaded": []}
    for seed in seeds:
        events = turns(seed)
        lost = random.Random(f"lost {seed}").randrange(NUM_ENGINES)
        for name, policy in zip(found, (Sticky(), RoundRobin(), LeastLoaded()), strict=True):
            found[name].append(simulate(policy, events, lost=lost))
    return found


def rows(found: dict[str, list[Result]]) -> Iterator[tuple[str, str, bool, float, bool]]:
    """Yield figure, field, whether it is a share, the bar, and whether less is better."""
    yield "sessions moved by the loss of one of 64", "moved_frac", True, MOST_MOVED, True
    yield "largest load over the mean", "load", False, MOST_LOAD, True
    yield "prefix hits over the ideal", "hit_frac", True, LEAST_HITS, False


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--seeds", type=positive, default=5, help="simulations, with seeds 0, 1, ..."
    )
    parser.add_argument("--quick", action="store_true", help="one seed")
    arguments = parser.parse_args()
    seeds = range(1 if arguments.quick else arguments.seeds)
    print(
        f"{NUM_SESSIONS} sessions of {NUM_TURNS} turns at {NUM_ENGINES} engines, {len(seeds)} seed(s): mean [least .. most]"
    )
    found = results(seeds)
    table = Table()
    for figure, name, percent, bar, is_limit in rows(found):
        ours = [getattr(result, name) for result in found["ours"]]
        worst = max(ours) if is_limit else min(ours)
        for index, peer in enumerate(("round robin", "least-loaded")):
            theirs = [getattr(result, name) for result in found[peer]]
            shown_bar = f"{'<=' if is_limit else '>='} " + (
                f"{100 * bar:.2f} %" if percent else f"{bar:.2f}"
            )
            table.row(
                figure,
                spread(ours, percent=percent),
                peer=f"{peer} {spread(theirs, percent=percent)}",
                ratio=mean(ours) / mean(theirs) if mean(theirs) else None,
                bar=shown_bar if index == 0 else "-",
                holds=(worst <= bar if is_limit else worst >= bar) if index == 0 else None,
            )
    return 0 if table.close() else 1


if __name__ == "__main__":
    raise SystemExit(main())
