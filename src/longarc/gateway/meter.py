"""What a gateway counts, in Prometheus' text format; no label holds a key, a name or a text.

Source: Prometheus documentation, "Exposition formats", text format 0.0.4; names of the process' own figures are
those that its client libraries use.
"""

import os
import resource
import time
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from longarc.records.sampling import EngineHealth

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"

_ROUTES: Final = frozenset(
    {
        "chat/completions",
        "responses",
        "messages",
        "messages/count_tokens",
        "models",
    }
)
_BUCKETS_S: Final = (0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0, 60.0, 600.0)


@dataclass(slots=True)
class _Histogram:
    counts: list[int] = field(default_factory=lambda: [0] * (len(_BUCKETS_S) + 1))
    total_s: float = 0.0

    def observe(self, value_s: float) -> None:
        self.counts[bisect_left(_BUCKETS_S, value_s)] += 1
        self.total_s += value_s


class Meter:
    """Wraps an ASGI application and counts its requests."""

    def __init__(self, app: ASGIApp, *, clock: Callable[[], float] = time.perf_counter) -> None:
        """Count what ``app`` answers; ``clock`` tells seconds."""
        self._app = app
        self._clock = clock
        self._num_running = 0
        self._ended: dict[tuple[str, int], int] = {}
        self._whole: dict[str, _Histogram] = {}
        self._first: dict[str, _Histogram] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        route = _route(scope["path"])
        started_s = self._clock()
        status = 0
        has_begun = False

        async def counted(message: Message) -> None:
            nonlocal status, has_begun
            if message["type"] == "http.response.start":
                status = message["status"]
            elif not has_begun:
                has_begun = True
                self._observe(self._first, route, self._clock() - started_s)
            await send(message)

        self._num_running += 1
        try:
            await self._app(scope, receive, counted)
        finally:
            self._num_running -= 1
            self._ended[route, status] = self._ended.get((route, status), 0) + 1
            self._observe(self._whole, route, self._clock() - started_s)

    def exposition(self, *, num_open: int, num_resident: int, health: EngineHealth | None) -> str:
        """Return the page of ``/metrics``.

        Args:
            num_open: sessions whose key is good.
            num_resident: those that are in memory.
            health: of the engine; None where it does not answer.
        """
        lines = [
            *_gauge("running_requests", "Requests being answered.", self._num_running),
            *_gauge("open_sessions", "Sessions whose key is not revoked.", num_open),
            *_gauge("resident_sessions", "Sessions whose tree is in memory.", num_resident),
            *_family(
                "longarc_gateway_requests_total",
                "counter",
                "Requests that ended, by route and status; 0 where the client left first.",
                {
                    f'{{route="{route}",status="{status}"}}': count
                    for (route, status), count in sorted(self._ended.items())
                },
            ),
            *_histograms("request_seconds", "From the headers to the last byte.", self._whole),
            *_histograms(
                "first_byte_seconds", "From the headers to the first byte of the body.", self._first
            ),
            *_engine(health),
            *_process(),
        ]
        return "\n".join([*lines, ""])

    def _observe(self, histograms: dict[str, _Histogram], route: str, value_s: float) -> None:
        histogram = histograms.get(route)
        if histogram is None:
            histogram = histograms[route] = _Histogram()
        histogram.observe(value_s)


def _route(path: str) -> str:
    tail = path.rpartition("/v1/")[2]
    return tail if tail in _ROUTES else "other"


def _engine(health: EngineHealth | None) -> list[str]:
    lines = _gauge(
        "engine_ready", "1 while the engine takes requests.", int(bool(health and health.is_ready))
    )
    if health is None:
        return lines
    return [
        *lines,
        *_gauge(
            "engine_policy_version_steps", "Optimizer steps in its weights.", health.policy_version
        ),
        *_gauge("engine_running_requests", "Requests it computes.", health.num_running),
        *_gauge("engine_waiting_requests", "Requests that wait there.", health.num_waiting),
        *_family(
            "longarc_gateway_engine_sampled_tokens_total",
            "counter",
            "Tokens it sampled since it started.",
            {"": health.num_sampled_tokens},
        ),
    ]


def _process() -> list[str]:
    used = resource.getrusage(resource.RUSAGE_SELF)
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return [
        *_family(
            "process_cpu_seconds_total",
            "counter",
            "Processor time of this process, user and system.",
            {"": used.ru_utime + used.ru_stime},
        ),
        *_family("process_resident_memory_bytes", "gauge", "Resident memory.", {"": resident}),
    ]


def _gauge(name: str, text: str, value: float) -> list[str]:
    return _family(f"longarc_gateway_{name}", "gauge", text, {"": value})


def _histograms(name: str, text: str, histograms: Mapping[str, _Histogram]) -> list[str]:
    full = f"longarc_gateway_{name}"
    lines = [f"# HELP {full} {text}", f"# TYPE {full} histogram"]
    for route, histogram in sorted(histograms.items()):
        label = f'route="{route}"'
        edges: Sequence[str] = [*map(str, _BUCKETS_S), "+Inf"]
        seen = 0
        for edge, count in zip(edges, histogram.counts, strict=True):
            seen += count
            lines.append(f'{full}_bucket{{{label},le="{edge}"}} {seen}')
        lines += [f"{full}_sum{{{label}}} {histogram.total_s}", f"{full}_count{{{label}}} {seen}"]
    return lines


def _family(
    name: str, kind: Literal["counter", "gauge"], text: str, values: Mapping[str, float]
) -> list[str]:
    samples = [f"{name}{labels} {value}" for labels, value in values.items()]
    return [f"# HELP {name} {text}", f"# TYPE {name} {kind}", *samples]
