"""What the headers of known clients say of the agent behind a request.

::

    x-longarc-agent-id, -parent-agent-id, -thread-id, -window, -kind      any program; wins over all others
    x-claude-code-agent-id, x-claude-code-parent-agent-id                 Claude Code: sub-agents only
    x-codex-window-id "SESSION:N", thread-id, x-codex-parent-thread-id    Codex: N grows with each compaction
    x-session-id, x-parent-session-id                                     opencode: a sub-agent has its own session

Headers are claims, not credentials: they label tokens of the caller's own session and open nothing.
"""

from collections.abc import Mapping
from typing import Final

from longarc.errors import ConfigError
from longarc.records.lineage import Lineage
from longarc.records.segment import SegmentKind

_MAX_NAME_CHARS: Final = 128


def read_lineage(headers: Mapping[str, str]) -> Lineage:
    """Return what request headers say of the agent.

    Args:
        headers: by lower-case name.

    Raises:
        ConfigError: an ``x-longarc-*`` header has a value that means nothing.
    """
    return Lineage(
        agent_id=_first(headers, "x-longarc-agent-id", "x-claude-code-agent-id"),
        parent_agent_id=_first(
            headers, "x-longarc-parent-agent-id", "x-claude-code-parent-agent-id"
        ),
        thread_id=_first(headers, "x-longarc-thread-id", "thread-id", "x-session-id"),
        parent_thread_id=_first(
            headers,
            "x-longarc-parent-thread-id",
            "x-codex-parent-thread-id",
            "x-parent-session-id",
        ),
        window=_window(headers),
        kind=_kind(headers.get("x-longarc-kind")),
    )


def _first(headers: Mapping[str, str], *names: str) -> str | None:
    for name in names:
        if value := headers.get(name, "").strip():
            return value[:_MAX_NAME_CHARS]
    return None


def _window(headers: Mapping[str, str]) -> int | None:
    if (own := headers.get("x-longarc-window")) is not None:
        if not (own.isascii() and own.isdigit() and len(own) <= 9):
            raise ConfigError(
                f"x-longarc-window={own[:40]!r} is no window; send its number, 0 for the first"
            )
        return int(own)
    number = headers.get("x-codex-window-id", "").rpartition(":")[2]
    return int(number) if number.isascii() and number.isdigit() and len(number) <= 9 else None


def _kind(value: str | None) -> SegmentKind | None:
    if value is None:
        return None
    try:
        return SegmentKind(value)
    except ValueError:
        raise ConfigError(
            f"x-longarc-kind={value[:40]!r} is no kind of request; send one of "
            f"{[kind.value for kind in SegmentKind]}"
        ) from None
