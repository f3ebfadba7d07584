"""From a TOML file and ``--set`` overrides to validated settings: merged first, validated once."""

import datetime
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from longarc.config.schema import Schema
from longarc.config.settings import Settings
from longarc.errors import ConfigError

SettingsT = TypeVar("SettingsT", bound=Settings)

Tree = dict[str, Any]
"""Parsed TOML."""


def load_settings(
    kind: type[SettingsT], path: Path | None = None, *, overrides: Sequence[str] = ()
) -> SettingsT:
    """Read settings from a TOML file, apply overrides, validate.

    Args:
        kind: the settings class.
        path: the file; None starts from nothing.
        overrides: ``a.b=VALUE`` each; VALUE is TOML, a bare word is a string. Later ones win.

    Raises:
        ConfigError: names the file, every wrong key with its value, what is allowed, and the
            nearest key where one is unknown.
    """
    tree = {} if path is None else read_toml(path)
    for override in overrides:
        apply_override(tree, override)
    return validated(kind, tree, source=str(path or kind.__name__), overrides=overrides)


def read_toml(path: Path) -> Tree:
    """Parse a TOML file.

    Raises:
        ConfigError: it is missing, unreadable or not TOML (with line and column).
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        others = sorted(p.name for p in path.parent.glob("*.toml"))
        near = get_close_matches(path.name, others, n=1) or others
        hint = f"; there is {', '.join(near[:5])}" if near else ""
        raise ConfigError(f"there is no file {path}{hint}") from error
    except OSError as error:
        raise ConfigError(
            f"cannot read {path}: {error.strerror}; give a file that you can read"
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path} is not UTF-8 text (byte {error.start}): TOML has to be"
        ) from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not TOML: {error}") from error


def parse_override(text: str) -> tuple[list[str], Any]:
    """Split ``a.b=VALUE`` into the keys and the value.

    Raises:
        ConfigError: there is no ``=``, a key is empty, or VALUE opens like TOML and is not.
    """
    dotted, separator, value = text.partition("=")
    keys = [key.strip() for key in dotted.split(".")]
    if not separator or not all(keys):
        raise ConfigError(f"--set {text!r}: write --set a.b=VALUE")
    return keys, _parse_value(text, value.strip())


def _parse_value(override: str, value: str) -> Any:
    try:
        parsed = tomllib.loads(f"value = {value}")
    except tomllib.TOMLDecodeError as error:
        if value[:1] in ('"', "'", "[", "{"):
            raise ConfigError(
                f"--set {override!r}: {value!r} is not a TOML value: {error}"
            ) from error
        return value
    if set(parsed) != {"value"}:
        raise ConfigError(f"--set {override!r}: one value per --set, please")
    found = parsed["value"]
    # No option is a date, but a name may look like one.
    return value if isinstance(found, datetime.date | datetime.time) else found


def apply_override(tree: Tree, override: str) -> None:
    """Put one ``a.b=VALUE`` into a tree, making the tables on the way; a number enters a list.

    Raises:
        ConfigError: the path leads through something that is not a table or list.
    """
    keys, value = parse_override(override)
    node: Any = tree
    for depth, key in enumerate(keys):
        is_last = depth == len(keys) - 1
        here = ".".join(keys[:depth]) or "the file"
        if isinstance(node, list):
            if not key.isdigit() or int(key) >= len(node):
                raise ConfigError(
                    f"--set {override!r}: {here} is a list of {len(node)}; write its position, from 0"
                )
            if is_last:
                node[int(key)] = value
            else:
                node = node[int(key)]
        elif isinstance(node, dict):
            if is_last:
                node[key] = value
            else:
                node = node.setdefault(key, {})
        else:
            raise ConfigError(f"--set {override!r}: {here} is {node!r}, which has no keys")


def validated(
    kind: type[SettingsT], tree: Mapping[str, Any], *, source: str, overrides: Sequence[str] = ()
) -> SettingsT:
    """Validate a tree.

    Raises:
        ConfigError: lists every wrong setting.
    """
    by_key = {".".join(parse_override(o)[0]): o for o in overrides}
    try:
        settings = kind.model_validate(tree)
    except ValidationError as error:
        schema = Schema(kind)
        lines = [_explained(schema, detail, by_key) for detail in error.errors(include_url=False)]
        raise _bad_settings(source, lines) from error
    lines = [
        f"{_where(path, by_key)} = {value!r}: should be {wanted}"
        for path, value, wanted in _converted(tree, settings)
    ]
    if lines:
        raise _bad_settings(source, lines)
    return settings


def _bad_settings(source: str, lines: Sequence[str]) -> ConfigError:
    plural = "s" if len(lines) > 1 else ""
    return ConfigError(
        f"{source}: {len(lines)} bad setting{plural}\n" + "\n".join(f"  {line}" for line in lines)
    )


def _converted(
    given: Any, read: Any, path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], Any, str]]:
    """Yield what pydantic made a number or a boolean of though it is none, with what it should have been."""
    if isinstance(given, Mapping):
        for key, value in given.items():
            inner = read.get(key) if isinstance(read, Mapping) else getattr(read, str(key), None)
            yield from _converted(value, inner, (*path, str(key)))
    elif isinstance(given, list | tuple) and isinstance(read, list | tuple):
        for index, (value, inner) in enumerate(zip(given, read, strict=False)):
            yield from _converted(value, inner, (*path, str(index)))
    elif isinstance(read, bool):
        if not isinstance(given, bool):
            yield path, given, "true or false"
    elif isinstance(read, int | float) and isinstance(given, bool | str):
        yield path, given, "a number"


def _explained(schema: Schema, detail: ErrorDetails, overrides: Mapping[str, str]) -> str:
    path, holder = schema.locate(detail["loc"])
    where = _where(path, overrides)
    match detail["type"]:
        case "extra_forbidden":
            return f"{where}: unknown key{_suggestion(schema, holder, path, detail)}"
        case "missing":
            return f"{where}: required, but not given"
        case "union_tag_not_found" | "union_tag_invalid":
            return f"{where}: {_tag_problem(schema, detail)}"
        case "value_error":
            return f"{where}: {detail['msg'].removeprefix('Value error, ')}"
        case _:
            message = detail["msg"].replace("Input should be", "should be", 1)
            return f"{where} = {detail['input']!r}: {message[:1].lower()}{message[1:]}"


def _where(path: Sequence[str | int], overrides: Mapping[str, str]) -> str:
    key = ".".join(map(str, path)) or "(whole file)"
    return f"{key} (from --set {overrides[key]!r})" if key in overrides else key


def _suggestion(
    schema: Schema, holder: Mapping[str, Any], path: Sequence[str | int], detail: ErrorDetails
) -> str:
    tag, kind, owners = schema.owners(detail["loc"])
    if owners and not schema.below(holder, str(path[-1])):
        others = " or ".join(map(repr, owners))
        return (
            f" with {tag} = {kind!r}; it belongs to {tag} = {others}: leave it out, or change {tag}"
        )
    near = schema.nearest(holder, str(path[-1]))
    if near:
        before = "".join(f"{key}." for key in path[:-1])
        return f"; did you mean {' or '.join(f'{before}{name}' for name in near)}?"
    return f"; allowed are {', '.join(schema.keys(holder)) or 'none'}"


def _tag_problem(schema: Schema, detail: ErrorDetails) -> str:
    node: Any = schema.root
    for element in detail["loc"]:
        _, members = schema.tags(node)
        node = members.get(str(element)) or schema.child(node, element) or {}
    name, members = schema.tags(node)
    given = detail["input"].get(name) if isinstance(detail["input"], Mapping) else detail["input"]
    allowed = ", ".join(repr(tag) for tag in members)
    if given is None:
        return f"{name!r} is missing; choose one of {allowed}"
    near = get_close_matches(str(given), members, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return f"{name} = {given!r} is not one of {allowed}{hint}"
