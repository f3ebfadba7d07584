"""Settings of the embedded rollout engine."""

from typing import Literal, Self

from pydantic import Field, model_validator

from longarc.config.settings import Settings


class EngineConfig(Settings):
    """How completions are sampled on this machine."""

    kind: Literal["embedded"] = "embedded"
    """LongArc's own engine, in its own process."""
    num_slots: int = Field(96, ge=1)
    """Sequences whose cache is kept at one time, running and idle ones [sequences]."""
    max_running: int = Field(64, ge=1)
    """Sequences decoded together in one step [sequences]; at most ``num_slots``."""
    max_waiting: int = Field(4096, ge=1)
    """Requests that may wait; one more is refused with an error [requests]."""
    max_prefill_tokens: int = Field(1024, ge=16)
    """Prompt tokens computed between two decode steps [tokens]; bounds how long decoding waits."""
    num_threads: int = Field(1, ge=1)
    """Compute threads of the engine; engine and trainer threads together must not exceed the cores."""

    @model_validator(mode="after")
    def _running_fits_slots(self) -> Self:
        if self.max_running > self.num_slots:
            raise ValueError(
                f"max_running={self.max_running} exceeds num_slots={self.num_slots}: every running "
                f"sequence needs a slot. Lower max_running or raise num_slots."
            )
        return self
