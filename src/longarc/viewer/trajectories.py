"""The browser of trajectories: which are shown, and how one is written down token by token."""

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from longarc.errors import CheckpointError
from longarc.records.batch import TokenReport
from longarc.records.message import Message
from longarc.records.outcome import Disposition
from longarc.records.segment import Segment
from longarc.records.trajectory import Trajectory
from longarc.runs.directory import RunDirectory
from longarc.runs.reader import LedgerReader, TrajectoryRow
from longarc.tokens.tokenizer import Tokenizer
from longarc.viewer.numbers import evenly, short

Reports = Mapping[tuple[str, int], tuple[int, TokenReport]]
"""Step and token report by trajectory and segment."""

MAX_TEXT = 20_000
"""Characters of one message that are kept."""

TOKENIZER = "tokenizer.json"

_REPORTED_FRAC = 0.6
"""Share of the places that those with token reports may take before the others choose."""


# ---------------------------------------------------------------------------- choice


def bucket(reward: float | None) -> str:
    """Return how well a rollout did: solved, partial, failed, or ungraded."""
    if reward is None:
        return "ungraded"
    return "solved" if reward >= 1.0 else "partial" if reward > 0.0 else "failed"


def origin(row: TrajectoryRow) -> str:
    """Return where a trajectory comes from: its stage; of an evaluation also whose checkpoint sampled it."""
    if row.disposition is not Disposition.EVALUATED:
        return row.stage
    # The group is named evaluation/stage/family/index.
    parts = row.group_id.split("/")
    return "/".join(parts[:-2]) if len(parts) > 3 else row.stage


def choose(
    rows: Sequence[TrajectoryRow], reported: frozenset[str], limit: int
) -> list[TrajectoryRow]:
    """Return at most ``limit`` trajectories: good and bad ones of every stage and family.

    Places are given in turns to the kinds of trajectory (origin, family, how well it did); a kind
    spends its turns evenly over the time of the stage. Those with token reports choose first.
    """
    first = _in_turns([row for row in rows if row.id in reported], int(limit * _REPORTED_FRAC))
    chosen = set(first)
    rest = _in_turns([row for row in rows if row.id not in chosen], limit - len(first))
    chosen.update(rest)
    return [row for row in rows if row.id in chosen]


def _in_turns(rows: Sequence[TrajectoryRow], limit: int) -> list[str]:
    kinds: dict[tuple[str, str, str], list[TrajectoryRow]] = defaultdict(list)
    for row in rows:
        kinds[origin(row), row.family, bucket(row.reward)].append(row)
    places = dict.fromkeys(kinds, 0)
    left = limit
    while left > 0:
        open_kinds = [kind for kind, members in kinds.items() if places[kind] < len(members)]
        if not open_kinds:
            break
        for kind in open_kinds[:left]:
            places[kind] += 1
        left -= min(left, len(open_kinds))
    return [
        members[i].id
        for kind, members in kinds.items()
        for i in evenly(range(len(members)), places[kind])
    ]


# -------------------------------------------------------------------------- contents


class TokenTexts:
    """The text of every token id that was asked for."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._special = frozenset(tokenizer.special_tokens.values()) if tokenizer else frozenset()
        self.texts: dict[int, str] = {}

    @classmethod
    def of(cls, run: RunDirectory) -> "TokenTexts":
        """Use the run's tokenizer; without a readable one, ids stand for themselves."""
        try:
            return cls(Tokenizer.load(run.path / TOKENIZER))
        except CheckpointError:
            return cls(None)

    @property
    def special_ids(self) -> list[int]:
        """Control tokens among those that were asked for."""
        return sorted(self._special & self.texts.keys())

    def add(self, token_ids: Sequence[int]) -> None:
        """Look up ids."""
        for token_id in set(token_ids) - self.texts.keys():
            self.texts[token_id] = self._text(token_id)

    def _text(self, token_id: int) -> str:
        if self._tokenizer is None:
            return f"[{token_id}]"
        if not 0 <= token_id < self._tokenizer.vocab_size:
            return f"[{token_id}: not in the tokenizer]"
        # Half a character is shown as its bytes.
        return self._tokenizer.token_bytes(token_id).decode("utf-8", "backslashreplace")


def trajectory_entry(
    ledger: LedgerReader, row: TrajectoryRow, reports: Reports, texts: TokenTexts
) -> dict[str, Any]:
    """Return one trajectory as the report carries it."""
    trajectory = ledger.trajectory(row.id)
    segments = []
    for segment in trajectory.segments:
        texts.add(segment.token_ids)
        segments.append(segment_entry(segment, reports.get((row.id, segment.order))))
    return {
        "id": row.id,
        "stage": row.stage,
        "origin": origin(row),
        "family": row.family,
        "task_id": row.task_id,
        "outcome": row.outcome,
        "reward": short(row.reward),
        "bucket": bucket(row.reward),
        "difficulty": short(row.difficulty),
        "num_turns": row.num_turns,
        "num_tokens": row.num_tokens,
        "num_sampled_tokens": row.num_sampled_tokens,
        "num_trained_tokens": row.num_trained_tokens,
        "duration_s": short(row.duration_s, digits=3),
        "disposition": row.disposition or "waiting",
        "disposition_reason": row.disposition_reason,
        "uses": [{"stage": s, "step": n, "multiplicity": m} for s, n, m in ledger.uses(row.id)],
        "has_report": any(segment["report"] for segment in segments),
        "segments": segments,
        **_said(trajectory),
    }


def _said(trajectory: Trajectory) -> dict[str, Any]:
    return {
        "error": None if trajectory.error is None else _cut(trajectory.error),
        "reward_parts": {k: short(v) for k, v in trajectory.reward_parts.items()},
        "info": _cut(_as_text(trajectory.info)) if trajectory.info else None,
        "messages": [_message(message) for message in trajectory.messages],
        "tools": [tool.name for tool in trajectory.tools],
    }


def _message(message: Message) -> dict[str, Any]:
    return {
        "role": message.role,
        "content": _cut(message.content),
        "reasoning": None if message.reasoning is None else _cut(message.reasoning),
        "calls": [
            {"name": c.name, "arguments": _cut(_as_text(c.arguments)), "error": c.error}
            for c in message.tool_calls
        ],
    }


def _as_text(value: object) -> str:
    return json.dumps(
        value, ensure_ascii=False, default=lambda v: dict(v) if isinstance(v, Mapping) else str(v)
    )


def _cut(text: str) -> str:
    if len(text) <= MAX_TEXT:
        return text
    return f"{text[:MAX_TEXT]}\n[{len(text) - MAX_TEXT} more characters are not in this report]"


def segment_entry(segment: Segment, reported: tuple[int, TokenReport] | None) -> dict[str, Any]:
    """Return one segment: a letter a token for its mask, numbers only where there are any.

    ``mask`` holds ``T`` for a trained token, ``s`` for one that was sampled only, ``.`` for one that
    the policy was given. ``logprobs`` and ``versions`` (value, run length) hold the sampled tokens,
    ``report`` the trained ones, in order.
    """
    sampled = [i for i, is_sampled in enumerate(segment.is_sampled) if is_sampled]
    trained = [i for i, is_trained in enumerate(segment.train_mask) if is_trained]
    mask = ["."] * len(segment.token_ids)
    for i in sampled:
        mask[i] = "s"
    for i in trained:
        mask[i] = "T"
    runs = groupby(segment.policy_versions[i] for i in sampled)
    return {
        "order": segment.order,
        "kind": segment.kind,
        "parent": segment.parent,
        "agent_id": segment.agent_id,
        "token_ids": list(segment.token_ids),
        "mask": "".join(mask),
        "logprobs": [short(segment.behaviour_logprobs[i], digits=4) for i in sampled],
        "versions": [[version, sum(1 for _ in run)] for version, run in runs],
        "report": _report(segment, trained, reported),
    }


def _report(
    segment: Segment, trained: Sequence[int], reported: tuple[int, TokenReport] | None
) -> dict[str, Any] | None:
    """Return log-ratio (policy against behaviour policy), advantage and value of each trained token.

    Values are None where there is no critic.
    """
    if reported is None:
        return None
    step, report = reported
    if not len(report.policy_logprobs) == len(report.advantages) == len(segment.token_ids):
        return None
    ratios = [report.policy_logprobs[i] - segment.behaviour_logprobs[i] for i in trained]
    return {
        "step": step,
        "log_ratios": [short(ratio, digits=4) for ratio in ratios],
        "advantages": [short(report.advantages[i], digits=4) for i in trained],
        "values": [short(report.values[i], digits=4) for i in trained]
        if len(report.values) == len(segment.token_ids)
        else None,
    }
