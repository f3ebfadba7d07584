"""One trajectory, token by token."""

from base64 import b64encode
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from longarc.errors import CheckpointError
from longarc.records.segment import Segment
from longarc.records.trajectory import Trajectory
from longarc.runs.reader import TrajectoryRow
from longarc.tokens.tokenizer import Tokenizer

Use = tuple[str, int, int]
"""Stage, step, multiplicity."""


def trajectory_json(
    trajectory: Trajectory, row: TrajectoryRow | None, uses: Sequence[Use]
) -> dict[str, Any]:
    """Return a trajectory and what became of it, as JSON."""
    known = asdict(trajectory)
    for segment in known["segments"]:
        if segment["routing"] is not None:
            segment["routing"] = [b64encode(blob).decode("ascii") for blob in segment["routing"]]
    return {
        **known,
        "disposition": row and row.disposition,
        "disposition_reason": row and row.disposition_reason,
        "uses": [{"stage": s, "step": n, "multiplicity": m} for s, n, m in uses],
    }


def print_trajectory(
    trajectory: Trajectory,
    row: TrajectoryRow | None,
    uses: Sequence[Use],
    *,
    tokenizer_path: Path,
) -> None:
    """Print a trajectory for people: its facts, its messages, its tokens."""
    reward = "none" if trajectory.reward is None else f"{trajectory.reward:g}"
    print(f"{trajectory.id}: task {trajectory.task_id}, {trajectory.outcome}, reward {reward}")
    print(f"{trajectory.num_turns} turns, {trajectory.duration_s:.2f} s" + _fate(row, uses))
    if trajectory.error:
        print(f"error: {trajectory.error}")
    for message in trajectory.messages:
        print(f"\n[{message.role}]")
        if message.reasoning is not None:
            print(f"(thinking) {message.reasoning}")
        if message.content:
            print(message.content)
        for call in message.tool_calls:
            print(
                f"(calls {call.name}) {call.arguments}" + (f" {call.error}" if call.error else "")
            )
    tokenizer = _tokenizer(tokenizer_path)
    for segment in trajectory.segments:
        _print_segment(segment, tokenizer)


def _fate(row: TrajectoryRow | None, uses: Sequence[Use]) -> str:
    if row is None or row.disposition is None:
        return ", waiting to be used"
    reason = f" ({row.disposition_reason})" if row.disposition_reason else ""
    where = "".join(f", step {step} of {stage} x {times}" for stage, step, times in uses)
    return f", {row.disposition}{reason}{where}"


def _print_segment(segment: Segment, tokenizer: Tokenizer | None) -> None:
    grown = "" if segment.parent is None else f", from segment {segment.parent}"
    print(
        f"\nsegment {segment.order} ({segment.kind}, {segment.agent_id}{grown}): "
        f"{len(segment.token_ids)} tokens, {segment.num_trained_tokens} trained"
    )
    print("  T trained, s sampled, . seen; log-probability [nats]; version of the weights")
    columns = zip(
        segment.token_ids,
        segment.is_sampled,
        segment.train_mask,
        segment.behaviour_logprobs,
        segment.policy_versions,
        strict=True,
    )
    for position, (token_id, is_sampled, is_trained, logprob, version) in enumerate(columns):
        mark = "T" if is_trained else "s" if is_sampled else "."
        text = "" if tokenizer is None else _text(tokenizer, token_id)
        numbers = f" {logprob:10.5f} v{version}" if is_sampled else ""
        print(f"  {position:6d} {token_id:7d} {mark} {text:<16}{numbers}".rstrip())


def _text(tokenizer: Tokenizer, token_id: int) -> str:
    """Return a token as people can read it: half a character is shown as bytes."""
    try:
        return repr(tokenizer.decode([token_id], keep_special=True))
    except (IndexError, OverflowError):
        return "(not in the tokenizer)"


def _tokenizer(path: Path) -> Tokenizer | None:
    try:
        return Tokenizer.load(path)
    except CheckpointError:
        # Ids alone are still worth printing: a served session may have the user's own tokenizer.
        return None
