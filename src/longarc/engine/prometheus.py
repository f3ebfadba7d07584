"""What an engine server counts, in Prometheus' text format.

Source: Prometheus documentation, "Exposition formats", text format 0.0.4.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Literal

from longarc.records.sampling import EngineHealth

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_Kind = Literal["counter", "gauge"]

_ENGINE: dict[str, tuple[str, _Kind, str]] = {
    "is_ready": ("ready", "gauge", "1 while the engine takes requests."),
    "policy_version": ("policy_version_steps", "gauge", "Optimizer steps in the weights in use."),
    "num_running": ("running_requests", "gauge", "Requests being computed."),
    "num_waiting": ("waiting_requests", "gauge", "Requests that wait for a seat or for pages."),
    "num_sampled_tokens": ("sampled_tokens_total", "counter", "Tokens sampled."),
    "num_prompt_tokens": ("prompt_tokens_total", "counter", "Prompt tokens asked for."),
    "num_cached_tokens": ("cached_tokens_total", "counter", "Prompt tokens found in the cache."),
    "num_recomputed_tokens": (
        "recomputed_tokens_total",
        "counter",
        "Tokens computed again after a preemption.",
    ),
    "num_preemptions": ("preemptions_total", "counter", "Times a sequence gave up its pages."),
    "num_free_pages": ("free_pages", "gauge", "Pages of the cache that hold nothing."),
    "num_cached_pages": ("cached_pages", "gauge", "Pages that nobody uses, kept for reuse."),
    "num_used_pages": ("used_pages", "gauge", "Pages of running sequences."),
    "prefill_tokens_saved_frac": (
        "prefill_tokens_saved_frac",
        "gauge",
        "Share of the prompt tokens asked for that did not have to be computed.",
    ),
    "accept_length_tokens": (
        "accept_length_tokens",
        "gauge",
        "Mean tokens of a chain of drafts, the model's own included; 0 where none are drafted.",
    ),
    "num_updates": ("weight_updates_total", "counter", "Weight updates that came into use."),
    "update_s": (
        "weight_update_seconds_total",
        "counter",
        "Time between asking for new weights and their use.",
    ),
    "update_pause_s": (
        "weight_update_pause_seconds_total",
        "counter",
        "Time in which no sequence was decoded because weights were swapped.",
    ),
    "max_update_pause_s": (
        "weight_update_pause_seconds_max",
        "gauge",
        "The longest such pause of one update.",
    ),
    "busy_s": ("busy_seconds_total", "counter", "Time spent computing."),
}
"""What `EngineHealth` tells: name behind ``longarc_engine_``, kind and help."""
_BY_DEPTH: dict[str, tuple[str, str]] = {
    "num_drafted": ("drafted_tokens_total", "Drafts that were verified, by depth."),
    "num_accepted": ("accepted_tokens_total", "Drafts that became sampled tokens, by depth."),
}
"""What it tells for each depth of drafts: counters, name and help."""


@dataclasses.dataclass(slots=True)
class DoorCounters:
    """What the HTTP door itself counts."""

    num_open: int = 0
    """Streams, scores and weight updates being answered."""
    num_ended: dict[str, int] = dataclasses.field(default_factory=dict)
    """Streams that ended, by how: a finish reason, ``disconnected`` or the name of an error."""
    is_draining: bool = False

    def end(self, how: str) -> None:
        """Count the end of a stream."""
        self.num_ended[how] = self.num_ended.get(how, 0) + 1


def exposition(healths: Sequence[EngineHealth], door: DoorCounters) -> str:
    """Return the page of ``/metrics``.

    Args:
        healths: of each rank, in order.
        door: what the door counted.
    """
    lines: list[str] = []
    for field, (name, kind, text) in _ENGINE.items():
        values = {
            f'{{rank="{rank}"}}': float(getattr(health, field))
            for rank, health in enumerate(healths)
        }
        lines += _family(f"longarc_engine_{name}", kind, text, values)
    for field, (name, text) in _BY_DEPTH.items():
        values = {
            f'{{rank="{rank}",depth="{depth}"}}': float(count)
            for rank, health in enumerate(healths)
            for depth, count in enumerate(getattr(health, field), start=1)
        }
        lines += _family(f"longarc_engine_{name}", "counter", text, values)
    lines += _family(
        "longarc_server_open_streams",
        "gauge",
        "Streams, scores and weight updates being answered.",
        {"": float(door.num_open)},
    )
    lines += _family(
        "longarc_server_streams_total",
        "counter",
        "Streams that ended, by how.",
        {f'{{end="{how}"}}': float(n) for how, n in sorted(door.num_ended.items())},
    )
    lines += _family(
        "longarc_server_draining",
        "gauge",
        "1 while the server takes no new requests because it is going to stop.",
        {"": float(door.is_draining)},
    )
    return "\n".join([*lines, ""])


def _family(name: str, kind: _Kind, text: str, values: Mapping[str, float]) -> list[str]:
    samples = [f"{name}{labels} {value!r}" for labels, value in values.items()]
    return [f"# HELP {name} {text}", f"# TYPE {name} {kind}", *samples]
