"""Settings of harnesses: programs that own their agent loop and speak a chat API."""

from typing import Any

from pydantic import Field, field_validator

from longarc.config.harness_names import HARNESSES
from longarc.config.settings import Settings


class HarnessConfig(Settings):
    """A program that works on the tasks of a family, in place of the family's own agent loop."""

    kind: str
    """``claude-code``, ``codex``, ``opencode``, ``mini-swe-agent``, ``openai-agents``, ``custom``, or
    ``package.module:Class`` of your own Harness."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """Keywords of the harness: ``program`` and ``arguments`` of most, ``command``, ``shows``, ``venv`` and ``env`` of
    ``custom``."""
    max_requests: int = Field(64, ge=1)
    """Requests of one rollout that are answered, titles and the like included [turns]."""
    timeout_s: float = Field(600.0, gt=0)
    """Time one run of the program may take [seconds]."""
    memory_bytes: int = Field(4 << 30, ge=64 << 20)
    """Memory of the box, the program and its commands together [bytes]."""
    disk_bytes: int = Field(256 << 20, ge=64 << 10)
    """What they may write [bytes]."""
    num_processes: int = Field(256, ge=4)
    """Processes and threads in the box."""

    @field_validator("kind")
    @classmethod
    def _is_known(cls, kind: str) -> str:
        if kind not in HARNESSES and ":" not in kind:
            raise ValueError(
                f"is one of {sorted(HARNESSES)}, or 'package.module:Class' of your own"
            )
        return kind

    @property
    def path(self) -> str:
        """Import path of the class."""
        return HARNESSES.get(self.kind, self.kind)
