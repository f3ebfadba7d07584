"""The whole record of a trajectory inside its ATIF document, and whether the document still says the same.

ATIF has no place for train masks, branches, windows, kept ids or a rollout's outcome, so ``extra.longarc``
holds the record. It is JSON in a string: tools that read and write documents drop nulls, respell numbers and
refuse lone surrogates, and none of that reaches into a string.

A document whose steps were edited no longer is its record. A digest of what the steps say tells.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Any, Final

from longarc.errors import ContractError
from longarc.records.trajectory import Trajectory
from longarc.runs.record_form import check_form
from longarc.runs.record_json import (
    to_json,
    to_json_line,
    trajectory_from_json,
    trajectory_to_json,
)

KEY: Final = "longarc"
"""Name in a document's ``extra``."""


def record_to_extra(trajectory: Trajectory, document: Mapping[str, Any]) -> dict[str, str]:
    """Return what stands in ``extra.longarc``.

    Args:
        trajectory: the record.
        document: the document made of it, whose steps are final.
    """
    return {
        "record": to_json_line(trajectory_to_json(trajectory)),
        "steps_sha256": _steps_sha256(document),
    }


def record_from_extra(document: Mapping[str, Any], *, name: str) -> Trajectory | None:
    """Return the record in a document; None where it has none, because another program made it.

    Args:
        document: the JSON of the root.
        name: what errors call it.

    Raises:
        ContractError: the record is damaged, or the steps were edited since it was written.
    """
    extra = document.get("extra")
    held = extra.get(KEY) if isinstance(extra, Mapping) else None
    if held is None:
        return None
    if not isinstance(held, Mapping) or not isinstance(held.get("record"), str):
        raise ContractError(
            f"{name!r} has extra.{KEY} without a record; export the trajectory again, or take extra.{KEY} out, and the "
            f"steps alone are read"
        )
    record = json.loads(held["record"])
    check_form(record)
    trajectory = trajectory_from_json(record)
    if held.get("steps_sha256") != _steps_sha256(document):
        raise ContractError(
            f"{name!r} says other things than the record in its extra.{KEY}: its steps were edited since it was exported. "
            f"Take extra.{KEY} out, and the steps are read without the record's tokens, or export it again"
        )
    return trajectory


def _steps_sha256(document: Mapping[str, Any]) -> str:
    return hashlib.sha256(to_json(_said(document))).hexdigest()


def _said(document: Mapping[str, Any]) -> list[Any]:
    """Return what the steps of a document, and of those in it, say; not how tools write numbers or nulls."""
    steps = [
        [
            step.get("source"),
            step.get("message"),
            step.get("reasoning_content"),
            [
                [call.get("tool_call_id"), call.get("function_name"), _plain(call.get("arguments"))]
                for call in step.get("tool_calls") or ()
            ],
            [
                [result.get("source_call_id"), result.get("content")]
                for result in (step.get("observation") or {}).get("results") or ()
            ],
        ]
        for step in document.get("steps") or ()
    ]
    return [steps, [_said(inner) for inner in document.get("subagent_trajectories") or ()]]


def _plain(value: Any) -> Any:
    """Return a JSON value with whole floats as integers, keys sorted, and no nulls in objects."""
    match value:
        case Mapping():
            return {key: _plain(value[key]) for key in sorted(value) if value[key] is not None}
        case list() | tuple():
            return [_plain(item) for item in value]
        case float() if value.is_integer():
            return int(value)
        case _:
            return value
