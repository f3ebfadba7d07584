"""The rotary settings of a ``config.json``: both spellings of transformers to ours, and back.

Old files have ``rope_theta`` beside ``rope_scaling``, new ones (transformers 5) both in ``rope_parameters``.
"""

from collections.abc import Mapping
from typing import Any

from pydantic import TypeAdapter, ValidationError

from longarc.config.rope import RopeScaling, YarnRope
from longarc.config.settings import problems_of, read_strictly
from longarc.errors import ConfigError

_SCALING: TypeAdapter[RopeScaling] = TypeAdapter(RopeScaling)
_SCALED = ("linear", "llama3", "yarn")
_WITH_ORIGINAL = ("llama3", "yarn")
"""Scalings that begin from the context a model was trained on first."""
_WHY_NOT = {
    "dynamic": "its angles change with the length of a sequence, so that cached keys would be turned by other "
    "angles than in one pass. Up to max_position_embeddings it is the same as 'default': write that",
    "longrope": "it has a table of factors for short sequences and another for long ones; use a checkpoint "
    "without it",
}


def rope_from_hf(
    raw: Mapping[str, Any], *, default_theta: float | None = None
) -> tuple[object, RopeScaling | None]:
    """Return the base of the frequencies, which the settings then check to be a number, and the scaling.

    Args:
        raw: content of ``config.json``.
        default_theta: what transformers takes for the family where the file names no base.

    Raises:
        ConfigError: the scaling is not one that LongArc computes, or is not described whole.
    """
    spelling, rope = _said(raw)
    if not isinstance(rope, dict):
        raise ConfigError(
            f"{spelling}={rope!r} in config.json is no object; write it as in "
            f'{{"rope_type": "default", "rope_theta": 10000.0}}'
        )
    theta = rope.get("rope_theta", raw.get("rope_theta", default_theta))
    if theta is None:
        raise ConfigError("config.json names no rope_theta; add rope_parameters.rope_theta")
    _refuse_partial(rope, raw)
    kind = _kind(rope)
    if kind == "default":
        return theta, None
    if kind not in _SCALED:
        raise ConfigError(
            f"rope_type {kind!r} in config.json is not supported; supported: 'default', "
            f"{', '.join(map(repr, _SCALED))}; {_WHY_NOT.get(kind, 'another scaling would give other numbers')}"
        )
    return theta, _scaling(kind, rope, raw, spelling)


def rope_to_hf(rope_theta: float, scaling: RopeScaling | None) -> dict[str, Any]:
    """Return ``rope_parameters``."""
    kind = {"rope_type": "default"} if scaling is None else scaling.model_dump(exclude_none=True)
    return {**kind, "rope_theta": rope_theta}


def context_of(max_position_embeddings: int, scaling: RopeScaling | None) -> int:
    """Return the longest context [tokens], which configs with YaRN often state without its factor."""
    if not isinstance(scaling, YarnRope):
        return max_position_embeddings
    stretched = int(scaling.original_max_position_embeddings * scaling.factor)
    return max(max_position_embeddings, stretched)


def stated_context(raw: Mapping[str, Any], max_position_embeddings: int) -> int:
    """Return the longest context [tokens] of a ``config.json``, also of a family that LongArc does not build.

    A scaling that is not described whole stretches nothing; ``rope_from_hf`` refuses it.

    Args:
        raw: content of ``config.json``.
        max_position_embeddings: what it says, or what its family supposes.
    """
    spelling, rope = _said(raw)
    if not isinstance(rope, dict) or _kind(rope) != "yarn":
        return max_position_embeddings
    try:
        scaling = _scaling("yarn", rope, raw, spelling)
    except ConfigError:
        return max_position_embeddings
    return context_of(max_position_embeddings, scaling)


def _said(raw: Mapping[str, Any]) -> tuple[str, Any]:
    """Return under which name a file describes its rotation, and what it says there."""
    # Where a file has both, transformers takes the older one.
    spelling = "rope_scaling" if raw.get("rope_scaling") else "rope_parameters"
    return spelling, raw.get(spelling) or {}


def _kind(rope: Mapping[str, Any]) -> str:
    return str(rope.get("rope_type") or rope.get("type") or "default")


def _refuse_partial(rope: Mapping[str, Any], raw: Mapping[str, Any]) -> None:
    share = rope.get("partial_rotary_factor", raw.get("partial_rotary_factor"))
    if share not in (None, 1):
        raise ConfigError(
            f"partial_rotary_factor={share!r} in config.json is not supported; supported: 1.0. This family "
            f"rotates whole heads here"
        )


def _scaling(
    kind: str, rope: Mapping[str, Any], raw: Mapping[str, Any], spelling: str
) -> RopeScaling:
    ignored = ("type", "rope_theta", "partial_rotary_factor")
    fields = {name: v for name, v in rope.items() if name not in ignored and v is not None}
    fields["rope_type"] = kind
    longest = raw.get("max_position_embeddings")
    if kind in _WITH_ORIGINAL:
        original = "original_max_position_embeddings"
        stated = raw.get(original, fields.get(original, longest))
        fields |= {} if stated is None else {original: stated}
        is_open = (
            "factor" in rope and rope["factor"] is None
        )  # as in DeepSeek-V3: what the context grew by
        if is_open and isinstance(stated, int) and stated > 0 and isinstance(longest, int):
            fields["factor"] = longest / stated
    try:
        return read_strictly(_SCALING, fields)
    except ValidationError as error:
        raise ConfigError(
            f"{spelling} in config.json does not describe a {kind} scaling: {problems_of(error)}"
        ) from error
