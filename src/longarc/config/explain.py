"""What can be set: options with type, range, default and meaning, for people and for editors.

The source is the settings classes and the docstrings under their fields, so that it cannot be out
of date. ``docs/config.md`` is ``markdown(Recipe)``.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any

from longarc.config.schema import Node, Schema
from longarc.config.settings import Settings
from longarc.errors import ConfigError

_BOUNDS = {
    "minimum": ">= {}",
    "exclusiveMinimum": "> {}",
    "maximum": "<= {}",
    "exclusiveMaximum": "< {}",
    "minLength": "at least {} characters",
    "minItems": "at least {} items",
    "minProperties": "at least {} entries",
    "pattern": "matches {}",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One thing a user can choose."""

    key: str
    """Dotted key inside its section."""
    type: str
    """What it holds, in words."""
    allowed: str
    """Bounds; empty where there are none."""
    default: str
    """As TOML; ``(required)`` where there is none, ``(none)`` where it may stay unset."""
    description: str

    @property
    def unit(self) -> str:
        """The unit in brackets of the description; empty where there is none."""
        found = re.search(r"\[([^\]]+)\]", self.description)
        return found.group(1) if found else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """The options of one settings class."""

    name: str
    """Name of the class."""
    description: str
    tags: tuple[str, ...]
    """Values of the discriminating key that select it; empty outside tagged unions."""
    places: tuple[str, ...]
    """Dotted keys where it stands in a file; NAME is the user's own."""
    options: tuple[Option, ...]


def sections(kind: type[Settings]) -> list[Section]:
    """Return every section of a settings class, itself first, in order of first appearance."""
    return _sections(Schema(kind))


def _sections(schema: Schema) -> list[Section]:
    found: dict[str, Section] = {}
    for place, tag, node in _walk(schema, schema.root, "", ""):
        name = node["title"]
        if name not in found:
            found[name] = Section(
                name=name,
                description=_oneline(node.get("description", "")),
                tags=(),
                places=(),
                options=tuple(_options(schema, node)),
            )
        before = found[name]
        found[name] = replace(
            before,
            tags=tuple(dict.fromkeys([*before.tags, *([tag] if tag else [])])),
            places=tuple(dict.fromkeys([*before.places, place or "(top)"])),
        )
    return list(found.values())


def find_options(kind: type[Settings], name: str) -> list[Section]:
    """Return what a name means: a section (by tag, class or place) with all below it, or single options.

    Args:
        kind: the settings class.
        name: ``agentic_rl``, ``OptimizerConfig``, ``tokenizer``, ``max_lag_steps``, ``loop.max_lag_steps``, or
            a whole key as it stands in a file: ``stages.sft``, ``stages.sft.num_steps``.

    Raises:
        ConfigError: nothing is called so; names what is near.
    """
    schema = Schema(kind)
    every = _sections(schema)
    wanted = name.casefold()
    whole = [s for s in every if wanted in _names(s)] or _at_place(
        every, wanted, named_freely=False
    )
    if whole:
        return [_expanded(schema, section) for section in whole[:1]]
    hits = []
    for section in every:
        options = tuple(
            option
            for option in _expanded(schema, section).options
            if f".{option.key}".casefold().endswith(f".{wanted}")
            # A member of a tagged union is a section of its own, which the place leads to.
            or wanted in (f"{place}.{option.key}".casefold() for place in section.places)
        )
        # A bare name is shown where it is defined, not once more under every place that nests it.
        if options and ("." in name or all("." not in option.key for option in options)):
            hits.append(replace(section, options=options))
    hits = hits or _with_key_at_place(every, wanted)
    if hits:
        return hits
    known = [n for s in every for n in (*_names(s), *(o.key for o in s.options))]
    near = get_close_matches(wanted, dict.fromkeys(known), n=3)
    hint = f"did you mean {' or '.join(near)}?" if near else "`longarc config schema` lists all"
    raise ConfigError(f"nothing is called {name!r} in {kind.__name__}: {hint}")


def json_schema(kind: type[Settings]) -> str:
    """Return the JSON Schema, for editors that complete TOML."""
    return json.dumps(kind.model_json_schema(), indent=2)


def markdown(kind: type[Settings]) -> str:
    """Return the reference page: a table a section."""
    lines = [
        "# Settings",
        "",
        "Generated from the settings classes; `longarc config explain NAME` prints the same.",
        "Units stand in brackets. NAME is a name of your own.",
    ]
    for section in sections(kind):
        lines += ["", f"## {section.name}", "", section.description, ""]
        places = ", ".join(f"`{place}`" for place in section.places)
        tags = ", ".join(f"`{tag}`" for tag in section.tags)
        lines += [f"Where: {places}." + (f" Selected by: {tags}." if tags else ""), ""]
        lines += ["| key | type | default | meaning |", "|---|---|---|---|"]
        for option in section.options:
            kinds = f"{option.type} {option.allowed}".strip()
            cells = (f"`{option.key}`", kinds, f"`{option.default}`", option.description)
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def _walk(schema: Schema, node: Node, place: str, tag: str) -> Iterator[tuple[str, str, Node]]:
    """Yield ``(place, tag, schema)`` of every settings class below a schema."""
    _, members = schema.tags(node)
    for member_tag, member in members.items():
        yield from _walk(schema, member, place, member_tag)
    node = schema.resolve(node)
    for item in (node.get("additionalProperties"), node.get("items")):
        if isinstance(item, Mapping):
            yield from _walk(schema, item, f"{place}.NAME", "")
    if "properties" in node:
        yield place, tag, node
        for key in node["properties"]:
            child = schema.child(node, key) or {}
            yield from _walk(schema, child, f"{place}.{key}".lstrip("."), "")


def _options(schema: Schema, node: Node) -> Iterator[Option]:
    required = node.get("required", ())
    for key, field in node["properties"].items():
        resolved = schema.resolve(field)
        yield Option(
            key=key,
            type=_type(schema, field),
            allowed=", ".join(
                words.format(resolved.get(bound, field.get(bound)))
                for bound, words in _BOUNDS.items()
                if bound in resolved or bound in field
            ),
            default="(required)" if key in required else _toml(schema, field),
            description=_oneline(field.get("description", resolved.get("description", ""))),
        )


def _toml(schema: Schema, field: Node) -> str:
    value = field.get("default")
    if "default" not in field:
        # A default that is made anew each time: an empty table or list.
        return "[]" if schema.resolve(field).get("type") == "array" else "{}"
    if value is None:
        return "(none)"
    if isinstance(value, Mapping):
        is_class = "properties" in schema.resolve(field) or schema.tags(field)[0]
        return "(see its section)" if is_class and value else json.dumps(value)
    return json.dumps(value)


def _type(schema: Schema, field: Node) -> str:
    optional = any(n.get("type") == "null" for n in field.get("anyOf", ()))
    return _base_type(schema, schema.resolve(field)) + (" or none" if optional else "")


def _base_type(schema: Schema, node: Node) -> str:
    if "const" in node:
        return json.dumps(node["const"])
    if "enum" in node:
        return " or ".join(json.dumps(value) for value in node["enum"])
    if schema.tags(node)[0]:
        names = dict.fromkeys(schema.resolve(m)["title"] for m in schema.tags(node)[1].values())
        return f"table: {' or '.join(names)}"
    if "anyOf" in node:
        return " or ".join(_base_type(schema, schema.resolve(n)) for n in node["anyOf"])
    if "properties" in node:
        return f"table: {node['title']}"
    match node.get("type"):
        case "array" if "items" in node:
            return f"list of {_base_type(schema, schema.resolve(node['items']))}"
        case "object" if isinstance(node.get("additionalProperties"), Mapping):
            inner = schema.resolve(node["additionalProperties"])
            return f"named {_base_type(schema, inner)}"
        case "object":
            return "table"
        case str(name):
            return name
        case _:
            return "anything"


def _names(section: Section) -> set[str]:
    places = {place.removesuffix(".NAME").rpartition(".")[2].casefold() for place in section.places}
    return {section.name.casefold(), *(tag.casefold() for tag in section.tags), *places}


def _at_place(every: Sequence[Section], place: str, *, named_freely: bool) -> list[Section]:
    """Return the sections that a whole dotted key leads to."""
    return [
        section
        for section in every
        if any(
            re.fullmatch(_place_pattern(section, known, named_freely=named_freely), place)
            for known in section.places
        )
    ]


def _place_pattern(section: Section, place: str, *, named_freely: bool) -> str:
    """Return what a key has to look like to lead to a place.

    A NAME is the user's own. But where it tells kinds apart, most users take the kind for a name, so that it
    tells which section they mean: ``stages.sft``.
    """
    parts = ["[^.]+" if part == "NAME" else re.escape(part.casefold()) for part in place.split(".")]
    if section.tags and place.endswith(".NAME") and not named_freely:
        parts[-1] = f"({'|'.join(re.escape(tag.casefold()) for tag in (*section.tags, 'NAME'))})"
    return r"\.".join(parts)


def _with_key_at_place(every: Sequence[Section], name: str) -> list[Section]:
    """Return the sections where a whole dotted key leads to an option, with that option alone."""
    place, _, key = name.rpartition(".")
    for named_freely in (False, True):
        found = [
            replace(section, options=options)
            for section in _at_place(every, place, named_freely=named_freely)
            if (options := tuple(o for o in section.options if o.key.casefold() == key))
        ]
        if found:
            return found
    return []


def _expanded(schema: Schema, section: Section) -> Section:
    """Return a section whose nested tables are replaced by their own options, dotted."""
    definitions: dict[str, Any] = {schema.root["title"]: schema.root} | {
        node["title"]: node for node in schema.root.get("$defs", {}).values() if "title" in node
    }
    return replace(section, options=tuple(_flat(schema, definitions[section.name], "")))


def _flat(schema: Schema, node: Node, prefix: str) -> Iterator[Option]:
    for option in _options(schema, node):
        child = schema.resolve(schema.child(node, option.key) or {})
        if "properties" in child:
            yield from _flat(schema, child, f"{prefix}{option.key}.")
        else:
            yield replace(option, key=f"{prefix}{option.key}")


def _oneline(text: str) -> str:
    return " ".join(text.split())
