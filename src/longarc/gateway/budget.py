"""How much one session may use: tokens, requests and time.

Tokens are a bound, also for requests that run at the same time: what a running request may still sample
is held for it, and given back when it ends.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from longarc.errors import ConfigError
from longarc.records.ports import ContextExhausted


class BudgetExhausted(ContextExhausted):
    """The session has used its budget: the rollout is over."""

    def __init__(
        self, message: str, *, what: Literal["tokens", "requests", "wall_s"], is_final: bool = True
    ) -> None:
        super().__init__(message)
        self.what = what
        """Which budget."""
        self.is_final = is_final
        """False where requests that run now hold the rest of it: the same request may be answered later."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionBudget:
    """Bounds of one session; None where there is none."""

    max_sampled_tokens: int | None = None
    """Of all turns together, side requests included [tokens]."""
    max_requests: int | None = None
    """Turns, side requests included."""
    max_wall_s: float | None = None
    """From the opening of the session on [seconds]."""

    def __post_init__(self) -> None:
        for name in ("max_sampled_tokens", "max_requests", "max_wall_s"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"{name}={value} must be above 0, or None for no bound")


class Stopwatch:
    """Time since a start, by a clock that may jump: one that goes back gives no time back and takes none."""

    def __init__(self, clock: Callable[[], float], *, elapsed_s: float = 0.0) -> None:
        self._clock = clock
        self._last_s = clock()
        self._elapsed_s = elapsed_s

    def elapsed_s(self) -> float:
        """Return the time that passed [seconds]; never less than it was."""
        now_s = self._clock()
        self._elapsed_s += max(0.0, now_s - self._last_s)
        self._last_s = now_s
        return self._elapsed_s

    def advance_to(self, elapsed_s: float) -> None:
        """Take over time that had passed before a restart [seconds]."""
        self._elapsed_s = max(self._elapsed_s, elapsed_s)


class BudgetMeter:
    """What a session has used of its budget."""

    def __init__(self, session_id: str, budget: SessionBudget, stopwatch: Stopwatch) -> None:
        self._session_id = session_id
        self._budget = budget
        self._stopwatch = stopwatch
        self._num_tokens = 0
        self._num_turns = 0
        self._held: list[int] = []

    @property
    def num_sampled_tokens(self) -> int:
        """Tokens of all turns."""
        return self._num_tokens

    def limit_requests(self, max_requests: int) -> None:
        """Lower the number of requests.

        Raises:
            ConfigError: it is not above 0.
        """
        own = self._budget.max_requests
        self._budget = replace(
            self._budget, max_requests=min(max_requests, own) if own else max_requests
        )

    def left_s(self) -> float | None:
        """Return the time that is left [seconds], None without a bound."""
        limit_s = self._budget.max_wall_s
        return None if limit_s is None else limit_s - self._stopwatch.elapsed_s()

    def check_time(self) -> None:
        """Raise ``BudgetExhausted`` if the time is over."""
        left_s = self.left_s()
        if left_s is not None and left_s <= 0:
            raise self.time_is_over()

    def time_is_over(self) -> BudgetExhausted:
        """Return the error of a session whose time is over."""
        return self._exhausted(
            "wall_s", f"its {self._budget.max_wall_s:g} s are over", "max_wall_s"
        )

    def hold(self, wanted: int) -> int:
        """Take a request's tokens out of the budget until ``settle``, and return how many it gets.

        Raises:
            BudgetExhausted: there is nothing left to give.
        """
        self.check_time()
        limit = self._budget.max_requests
        if limit is not None and self._num_turns + len(self._held) >= limit:
            raise self._exhausted(
                "requests",
                f"all of its {limit} requests are answered or run",
                "max_requests",
                is_final=self._num_turns >= limit,
            )
        granted = wanted
        limit = self._budget.max_sampled_tokens
        if limit is not None:
            granted = min(wanted, limit - self._num_tokens - sum(self._held))
            if granted < 1:
                raise self._exhausted(
                    "tokens",
                    f"{self._num_tokens} of its {limit} tokens are sampled and requests that run "
                    f"hold {sum(self._held)}",
                    "max_sampled_tokens",
                    is_final=self._num_tokens >= limit,
                )
        self._held.append(granted)
        return granted

    def settle(self, granted: int, *, num_told: int = 0) -> None:
        """Give back what ``hold`` took.

        Args:
            granted: what it returned.
            num_told: tokens that somebody saw of an answer that became no turn. They count all the same: a program
                that hangs up before the end would think for nothing, and unrecorded.
        """
        self._held.remove(granted)
        if num_told:
            self.add_turn(num_told)

    def add_turn(self, num_sampled_tokens: int) -> None:
        """Count a turn that was answered."""
        self._num_turns += 1
        self._num_tokens += num_sampled_tokens

    def _exhausted(
        self,
        what: Literal["tokens", "requests", "wall_s"],
        why: str,
        name: str,
        *,
        is_final: bool = True,
    ) -> BudgetExhausted:
        advice = (
            f"raise {name}, or end the rollout here" if is_final else "ask again when one has ended"
        )
        return BudgetExhausted(
            f"session {self._session_id} has no budget left: {why}; {advice}",
            what=what,
            is_final=is_final,
        )
