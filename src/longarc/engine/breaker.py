"""A circuit breaker: after several failures in a row nothing is sent for a while, then a probe."""

from collections.abc import Callable


class CircuitBreaker:
    """Counts failures in a row and says when to try again.

    ::

        closed --num_failures in a row--> open --retry_after_s, doubled each time--> a probe is due
           ^                                                                             |
           +----------------------------------- success ---------------------------------+
    """

    def __init__(
        self,
        *,
        num_failures: int,
        retry_after_s: float,
        max_retry_after_s: float,
        clock: Callable[[], float],
    ) -> None:
        """Start closed.

        Args:
            num_failures: failures in a row that open it.
            retry_after_s: time until the first probe [seconds].
            max_retry_after_s: longest time between two probes [seconds].
            clock: time [seconds].
        """
        self._limit = num_failures
        self._retry_after_s = retry_after_s
        self._max_retry_after_s = max_retry_after_s
        self._clock = clock
        self._num_failures = 0
        self._opened_at_s = 0.0

    @property
    def is_open(self) -> bool:
        """Whether nothing should be sent but a probe that is due."""
        return self._num_failures >= self._limit

    @property
    def wait_s(self) -> float:
        """Time until a probe is due [seconds]; 0 where one is, or the breaker is closed."""
        if not self.is_open:
            return 0.0
        doublings = min(self._num_failures - self._limit, 32)
        wait_s = min(self._retry_after_s * 2.0**doublings, self._max_retry_after_s)
        return max(0.0, self._opened_at_s + wait_s - self._clock())

    def failed(self) -> None:
        """Count a failure."""
        self._num_failures += 1
        self._opened_at_s = self._clock()

    def succeeded(self) -> None:
        """Close it."""
        self._num_failures = 0
