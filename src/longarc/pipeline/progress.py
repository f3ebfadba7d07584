"""What a person sees while a run goes: a live line on a terminal, plain lines elsewhere."""

import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TextIO

from longarc.records.metric import Metric, combine
from longarc.records.outcome import Outcome

SHOWN = {
    "loss/lm_nats": "loss {:.3f}",
    "loss/indexer_kl_nats": "indexer KL {:.3f}",
    "mtp/accept_length_tokens": "accept length {:.2f}",
    "reward/mean": "reward {:.2f}",
    "lag/mean_steps": "lag {:.1f}",
    "train/tokens_per_s": "{:,.0f} tok/s",
    "throughput/trained_tokens_per_s": "{:,.0f} trained/s",
    "throughput/sampled_tokens_per_s": "{:,.0f} sampled/s",
}
"""Which metrics the line shows, and how."""


class ProgressLine:
    """Satisfies the `Progress` port."""

    def __init__(
        self,
        stream: TextIO | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        plain_every_s: float = 5.0,
    ) -> None:
        self._stream = stream or sys.stdout
        self._clock = clock
        self._plain_every_s = plain_every_s
        self._is_live = self._stream.isatty()
        self._stage = ""
        self._stage_started_s = 0.0
        self._first_step = 0
        self._written_at_s = float("-inf")

    def update(self, *, stage: str, step: int, num_steps: int, metrics: Sequence[Metric]) -> None:
        """Show that ``step`` (1-based) of ``num_steps`` is done."""
        now = self._clock()
        if stage != self._stage:
            self._stage, self._stage_started_s, self._first_step = stage, now, step
        is_last = step >= num_steps
        if not self._is_live and not is_last and now - self._written_at_s < self._plain_every_s:
            return
        self._written_at_s = now
        done = step - self._first_step
        elapsed = now - self._stage_started_s
        left = f" {elapsed / done * (num_steps - step):.0f} s left" if done and not is_last else ""
        line = f"{stage:<14} {step:>5}/{num_steps}  {describe(combine(metrics))}{left}"
        if self._is_live:
            width = shutil.get_terminal_size().columns - 1
            self._stream.write("\r" + line[:width].ljust(width) + ("\n" if is_last else ""))
        else:
            self._stream.write(line + "\n")
        self._stream.flush()

    def say(self, text: str) -> None:
        """Write one line of its own."""
        if self._is_live:
            self._stream.write("\r" + " " * (shutil.get_terminal_size().columns - 1) + "\r")
        self._stream.write(text + "\n")
        self._stream.flush()


def describe(values: Mapping[str, float]) -> str:
    """Return the shown metrics, every family's success, and what was lost or excluded, as one short text."""
    is_rl = "throughput/trained_tokens_per_s" in values
    parts = [
        form.format(values[name])
        for name, form in SHOWN.items()
        if name in values and not (is_rl and name == "train/tokens_per_s")
    ]
    parts += [
        f"{name.removeprefix('success/')} {value:.0%}"
        for name, value in sorted(values.items())
        if name.startswith("success/") and name != "success/mean"
    ]
    lost = sum(
        values.get(f"outcome/{outcome}", 0.0) for outcome in Outcome if not outcome.is_trainable
    )
    excluded = sum(value for name, value in values.items() if name.startswith("excluded/"))
    parts += [
        f"{name} {count:.0f}" for name, count in (("lost", lost), ("excluded", excluded)) if count
    ]
    return "  ".join(parts)
