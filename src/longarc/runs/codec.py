"""Records to bytes and back, exactly: what the ledger stores in its blobs.

A trajectory's body is ``version byte | u32 length | JSON | arrays of segment 0 | arrays of segment 1 ...``
and its payload is the body under zlib. Arrays hold little-endian int32 token ids, bit-packed masks
and float32 log-probabilities (float64 where a value is not a float32), each number array split into
byte planes, because the high bytes of neighbours agree and compress to nothing.

Digests are taken from the body, not from the payload: two builds of zlib may compress differently.
"""

import hashlib
import struct
import zlib
from collections.abc import Mapping, Sequence
from itertools import chain, groupby
from typing import Any

import numpy as np
import numpy.typing as npt

from longarc.errors import ContractError, LedgerError, boundary
from longarc.records.batch import Batch, StepReport, TokenReport
from longarc.records.metric import Metric
from longarc.records.outcome import Outcome
from longarc.records.segment import Segment, SegmentKind
from longarc.records.task import Task
from longarc.records.trajectory import Trajectory
from longarc.runs.record_json import (
    PLAIN_FIELDS,
    constrained_from_json,
    constrained_to_json,
    from_json,
    message_from_json,
    message_to_json,
    to_json,
    tools_from_json,
    tools_to_json,
    turn_from_json,
    turn_to_json,
)

PAYLOAD_VERSION = 1
"""Version of the body's layout; the first byte of every body."""

_LEVEL = 1
"""zlib level: higher ones save 2 % and cost three times the time."""

_HEADER = struct.Struct("<BI")


# ------------------------------------------------------------------------- blobs


def compress(data: bytes) -> bytes:
    """Compress one blob."""
    return zlib.compress(data, _LEVEL)


def decompress(data: bytes) -> bytes:
    """Undo ``compress``.

    Raises:
        LedgerError: the blob is damaged.
    """
    try:
        return zlib.decompress(data)
    except zlib.error as error:
        raise LedgerError(f"a stored blob of {len(data)} bytes is damaged: {error}") from error


# ----------------------------------------------------------------------- segments


def _planes(array: npt.NDArray[Any]) -> bytes:
    """Return the array's bytes, all lowest bytes first, then the next ones."""
    return array.view(np.uint8).reshape(len(array), array.itemsize).T.tobytes()


def _unplanes(data: bytes, dtype: str, count: int) -> npt.NDArray[Any]:
    itemsize = np.dtype(dtype).itemsize
    rows = np.frombuffer(data, np.uint8).reshape(itemsize, count)
    return np.ascontiguousarray(rows.T).view(dtype).reshape(count)


def pack_floats(values: Sequence[float]) -> tuple[str, bytes]:
    """Return ``("<f4" or "<f8", bytes)``: four bytes a value where that loses nothing."""
    wide = np.array(values, "<f8")
    with np.errstate(over="ignore"):
        narrow = wide.astype("<f4")
    back = narrow.astype("<f8")
    exact = np.array_equal(back, wide) or np.array_equal(back, wide, equal_nan=True)
    return ("<f4", _planes(narrow)) if exact else ("<f8", _planes(wide))


def unpack_floats(dtype: str, data: bytes, count: int) -> list[float]:
    """Undo ``pack_floats``."""
    values: list[float] = _unplanes(data, dtype, count).tolist()
    return values


def _segment_to_parts(segment: Segment) -> tuple[dict[str, object], list[bytes]]:
    sampled = np.array(segment.is_sampled, bool)
    logprobs = np.array(segment.behaviour_logprobs, "<f8")
    rest = logprobs[~sampled]
    # Prompts and observations carry 0.0 by contract; a record that says otherwise is kept whole.
    is_sparse = not rest.view(np.uint64).any()  # bits, because -0.0 is not 0.0
    dtype, floats = pack_floats(logprobs[sampled] if is_sparse else logprobs)  # type: ignore[arg-type]
    is_mask_own = segment.train_mask != segment.is_sampled
    runs = [[version, len(list(run))] for version, run in groupby(segment.policy_versions)]
    meta: dict[str, object] = {
        "length": len(segment.token_ids),
        "kind": segment.kind,
        "order": segment.order,
        "parent": segment.parent,
        "agent_id": segment.agent_id,
        "logprobs": dtype,
        "sparse": is_sparse,
        "own_mask": is_mask_own,
        "versions": runs,
    }
    # Left out where they say nothing, so that such a record has the bytes it always had.
    if segment.parent_agent_id is not None:
        meta["parent_agent_id"] = segment.parent_agent_id
    if segment.window:
        meta["window"] = segment.window
    if segment.constraints:
        meta["constraints"] = [constrained_to_json(span) for span in segment.constraints]
    arrays = [_planes(np.array(segment.token_ids, "<i4")), np.packbits(sampled).tobytes()]
    if is_mask_own:
        arrays.append(np.packbits(np.array(segment.train_mask, bool)).tobytes())
    arrays.append(floats)
    if segment.kept_ids is not None:
        counts = [len(ids) for ids in segment.kept_ids]
        meta["kept"] = sum(counts)
        ids = np.fromiter(chain.from_iterable(segment.kept_ids), "<i4", sum(counts))
        arrays += [_planes(np.array(counts, "<i4")), _planes(ids)]
    if segment.routing is not None:
        sizes = [len(blob) for blob in segment.routing]
        meta["routing"] = sum(sizes)
        arrays += [_planes(np.array(sizes, "<i4")), b"".join(segment.routing)]
    return meta, arrays


class _Cursor:
    """Reads a body from front to back."""

    def __init__(self, data: bytes, offset: int) -> None:
        self._data = data
        self._offset = offset

    def take(self, size: int) -> bytes:
        """Return the next ``size`` bytes."""
        end = self._offset + size
        if end > len(self._data):
            raise LedgerError(
                f"a stored trajectory ends after {len(self._data)} bytes, {end} expected: "
                "the ledger is damaged. Restore it from a copy."
            )
        piece, self._offset = self._data[self._offset : end], end
        return piece


def _bits(cursor: _Cursor, count: int) -> npt.NDArray[np.bool_]:
    packed = np.frombuffer(cursor.take((count + 7) // 8), np.uint8)
    return np.unpackbits(packed, count=count).astype(bool)


def _segment_from_parts(meta: dict[str, Any], cursor: _Cursor) -> Segment:
    length = meta["length"]
    token_ids = _unplanes(cursor.take(4 * length), "<i4", length)
    sampled = _bits(cursor, length)
    trained = _bits(cursor, length) if meta["own_mask"] else sampled
    count = int(sampled.sum()) if meta["sparse"] else length
    dtype = meta["logprobs"]
    logprobs = _unplanes(cursor.take(np.dtype(dtype).itemsize * count), dtype, count)
    if meta["sparse"]:
        dense = np.zeros(length, dtype)
        dense[sampled] = logprobs
        logprobs = dense
    versions = tuple(version for version, run in meta["versions"] for _ in range(run))
    kept_ids = None
    if "kept" in meta:
        counts = _unplanes(cursor.take(4 * length), "<i4", length)
        ids = _unplanes(cursor.take(4 * meta["kept"]), "<i4", meta["kept"]).tolist()
        ends = counts.cumsum().tolist()
        kept_ids = tuple(tuple(ids[e - n : e]) for e, n in zip(ends, counts.tolist(), strict=True))
    routing = None
    if "routing" in meta:
        sizes = _unplanes(cursor.take(4 * length), "<i4", length)
        joined, ends = cursor.take(meta["routing"]), sizes.cumsum().tolist()
        routing = tuple(joined[e - n : e] for e, n in zip(ends, sizes.tolist(), strict=True))
    return Segment(
        token_ids=tuple(token_ids.tolist()),
        is_sampled=tuple(sampled.tolist()),
        train_mask=tuple(trained.tolist()),
        behaviour_logprobs=tuple(logprobs.tolist()),
        policy_versions=versions,
        kept_ids=kept_ids,
        constraints=tuple(constrained_from_json(span) for span in meta.get("constraints", ())),
        routing=routing,
        kind=SegmentKind(meta["kind"]),
        order=meta["order"],
        parent=meta["parent"],
        agent_id=meta["agent_id"],
        parent_agent_id=meta.get("parent_agent_id"),
        window=meta.get("window", 0),
    )


# ------------------------------------------------------------------- trajectories


def trajectory_body(trajectory: Trajectory) -> bytes:
    """Return the canonical bytes of a trajectory.

    Raises:
        ContractError: it holds something that is not JSON, or a token id beyond int32.
    """
    with boundary(ContractError, f"trajectory {trajectory.id!r} cannot be stored"):
        parts = [_segment_to_parts(segment) for segment in trajectory.segments]
        meta = {name: getattr(trajectory, name) for name in PLAIN_FIELDS}
        meta["messages"] = [message_to_json(m) for m in trajectory.messages]
        meta["tools"] = tools_to_json(trajectory.tools)
        meta["segments"] = [segment for segment, _ in parts]
        if trajectory.turns:
            meta["turns"] = [turn_to_json(turn) for turn in trajectory.turns]
        text = to_json(meta)
        arrays = [array for _, arrays in parts for array in arrays]
        return b"".join([_HEADER.pack(PAYLOAD_VERSION, len(text)), text, *arrays])


def trajectory_from_body(body: bytes) -> Trajectory:
    """Undo ``trajectory_body``.

    Raises:
        LedgerError: the bytes are damaged or of a newer version.
    """
    if len(body) < _HEADER.size:
        raise LedgerError(f"a stored trajectory has {len(body)} bytes: the ledger is damaged")
    version, length = _HEADER.unpack_from(body)
    if version != PAYLOAD_VERSION:
        raise LedgerError(
            f"a stored trajectory has layout version {version}, this LongArc reads "
            f"{PAYLOAD_VERSION}: install the LongArc that wrote it."
        )
    cursor = _Cursor(body, _HEADER.size)
    with boundary(LedgerError, "a stored trajectory is damaged"):
        meta = from_json(cursor.take(length))
        segments = tuple(_segment_from_parts(segment, cursor) for segment in meta.pop("segments"))
        messages = tuple(message_from_json(message) for message in meta.pop("messages"))
        tools = tools_from_json(meta.pop("tools"))
        turns = tuple(turn_from_json(turn) for turn in meta.pop("turns", ()))
        meta["outcome"] = Outcome(meta["outcome"])
        return Trajectory(segments=segments, messages=messages, tools=tools, turns=turns, **meta)


def body_sha256(body: bytes) -> str:
    """Return the digest that identifies a trajectory's content."""
    return hashlib.sha256(body).hexdigest()


def batch_sha256(batch: Batch, trajectory_digests: Mapping[str, str] | None = None) -> str:
    """Return the digest of everything a step consumes.

    Args:
        batch: what the step consumes.
        trajectory_digests: ``body_sha256`` by trajectory id, where they are at hand already.
    """
    known = trajectory_digests or {}
    groups = [
        {
            "id": group.id,
            "task_id": group.task_id,
            "family": group.family,
            "multiplicities": group.multiplicities,
            "trajectories": [
                known.get(t.id) or body_sha256(trajectory_body(t)) for t in group.trajectories
            ],
        }
        for group in batch.groups
    ]
    whole = {
        "stage": batch.stage,
        "step": batch.step,
        "trainer_version": batch.trainer_version,
        "resets_optimizer": batch.resets_optimizer,
        "groups": groups,
    }
    return hashlib.sha256(to_json(whole)).hexdigest()


# ------------------------------------------------------------- tasks, step reports


def encode_task(task: Task) -> bytes:
    """Encode a task.

    Raises:
        ContractError: its data is not JSON.
    """
    with boundary(ContractError, f"task {task.id!r} cannot be stored"):
        return compress(
            to_json(
                {
                    "id": task.id,
                    "family": task.family,
                    "split": task.split,
                    "messages": [message_to_json(m) for m in task.messages],
                    "tools": tools_to_json(task.tools),
                    "difficulty": task.difficulty,
                    "data": task.data,
                }
            )
        )


def decode_task(payload: bytes) -> Task:
    """Undo ``encode_task``."""
    with boundary(LedgerError, "a stored task is damaged"):
        data = from_json(decompress(payload))
        messages = tuple(message_from_json(m) for m in data.pop("messages"))
        return Task(messages=messages, tools=tools_from_json(data.pop("tools")), **data)


def encode_report(report: StepReport) -> bytes:
    """Encode a step's report."""
    with boundary(ContractError, f"the report of step {report.step} cannot be stored"):
        return compress(
            to_json(
                {
                    "step": report.step,
                    "policy_version": report.policy_version,
                    "weights_sha256": report.weights_sha256,
                    "num_trained_tokens": report.num_trained_tokens,
                    "metrics": [[m.name, m.total, m.weight, m.reduce] for m in report.metrics],
                    "token_reports": [
                        [
                            t.trajectory_id,
                            t.segment_order,
                            t.policy_logprobs,
                            t.advantages,
                            t.values,
                        ]
                        for t in report.token_reports
                    ],
                    "histograms": report.histograms,
                }
            )
        )


def decode_report(payload: bytes) -> StepReport:
    """Undo ``encode_report``."""
    with boundary(LedgerError, "a stored step report is damaged"):
        data = from_json(decompress(payload))
        metrics = tuple(Metric(*fields) for fields in data.pop("metrics"))
        tokens = tuple(
            TokenReport(
                trajectory_id=trajectory_id,
                segment_order=order,
                policy_logprobs=tuple(logprobs),
                advantages=tuple(advantages),
                # Reports of runs from before there were critics end here.
                values=tuple(more[0]) if more else (),
            )
            for trajectory_id, order, logprobs, advantages, *more in data.pop("token_reports")
        )
        histograms = {name: tuple(values) for name, values in data.pop("histograms").items()}
        return StepReport(metrics=metrics, token_reports=tokens, histograms=histograms, **data)
