"""Settings of the router over engine servers."""

from typing import Self

from pydantic import Field, model_validator

from longarc.config.settings import Settings


class RoutingConfig(Settings):
    """How requests are spread over engine servers, and what happens when one is lost."""

    load_factor: float = Field(1.2, gt=1.0, le=16.0)
    """Most live sessions over the mean of all ranks that a rank may have when it is given another one; as
    sessions end where they like, somewhat more can be left over."""
    session_idle_s: float = Field(60.0, gt=0)
    """A session that asked for nothing for so long counts no more as load [seconds]; its next turn most
    likely goes where it was all the same."""
    keep_every_tokens: int = Field(32, ge=1)
    """Sampled tokens that a server hands over at a time [tokens]: what of a completion has to be sampled
    again when its server dies. Fewer cost the engine more interruptions."""
    heartbeat_s: float = Field(1.0, gt=0)
    """Time between two looks at a server's health [seconds]."""
    heartbeat_timeout_s: float = Field(5.0, gt=0)
    """How long a server may take to say how it is [seconds]."""
    num_failures: int = Field(3, ge=1)
    """Failures in a row after which a server is given up until it is found well again: heartbeats without
    answer, or requests that were lost."""
    retry_after_s: float = Field(1.0, gt=0)
    """Time after which a server that was given up is looked at again [seconds]; doubled after each
    failure."""
    max_retry_after_s: float = Field(30.0, gt=0)
    """Longest time between two such looks [seconds]."""
    slow_start_s: float = Field(30.0, ge=0)
    """Time in which the share of a server that came back grows from a tenth to the whole [seconds]."""
    patience_s: float = Field(120.0, gt=0)
    """How long a request waits while no server can take it, before it fails [seconds]."""
    max_resumes: int = Field(4, ge=0)
    """Times in a row that a request may go on elsewhere without having got a token, before it fails: it
    may be the request that kills the servers."""
    update_timeout_s: float = Field(600.0, gt=0)
    """How long a server may take to load new weights [seconds]."""

    @model_validator(mode="after")
    def _waits_are_in_order(self) -> Self:
        if self.max_retry_after_s < self.retry_after_s:
            raise ValueError(
                f"max_retry_after_s={self.max_retry_after_s:g} is less than retry_after_s="
                f"{self.retry_after_s:g}; raise it or lower retry_after_s"
            )
        return self
