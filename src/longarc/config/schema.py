"""Walks the JSON Schema of a settings class: from a dotted key to its options."""

from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from longarc.config.settings import Settings

Node = Mapping[str, Any]
"""One schema."""


class Schema:
    """The JSON Schema of one settings class."""

    def __init__(self, kind: type[Settings]) -> None:
        """Generate the schema of ``kind``."""
        self.root: Node = kind.model_json_schema()
        self._definitions: Mapping[str, Node] = self.root.get("$defs", {})

    def resolve(self, node: Node) -> Node:
        """Follow references, and drop the null of an optional."""
        while True:
            if "$ref" in node:
                node = self._definitions[node["$ref"].rpartition("/")[2]]
            elif len(node.get("allOf", ())) == 1:
                node = node["allOf"][0]
            elif "anyOf" in node:
                some = [n for n in node["anyOf"] if n.get("type") != "null"]
                if len(some) != 1:
                    return node
                node = some[0]
            else:
                return node

    def tags(self, node: Node) -> tuple[str, Mapping[str, Node]]:
        """Return the discriminating key of a tagged union and its members by tag; ``("", {})`` for others."""
        discriminator = self.resolve(node).get("discriminator")
        if discriminator is None:
            return "", {}
        mapping = discriminator["mapping"]
        return discriminator["propertyName"], {t: {"$ref": ref} for t, ref in mapping.items()}

    def child(self, node: Node, key: str | int) -> Node | None:
        """Return the schema of a key (or list position) of an object; None where it cannot have it."""
        node = self.resolve(node)
        if isinstance(key, int):
            return node.get("items")
        if key in node.get("properties", {}):
            found: Node = node["properties"][key]
            return found
        extra = node.get("additionalProperties")
        return extra if isinstance(extra, Mapping) else ({} if extra is True else None)

    def keys(self, node: Node) -> list[str]:
        """Return the named keys of an object."""
        return list(self.resolve(node).get("properties", {}))

    def locate(self, location: Sequence[str | int]) -> tuple[list[str | int], Node]:
        """Turn an error's location into the user's path and the schema of what holds its last key.

        pydantic names the tag of every tagged union it passes; a user's file has no such level.
        """
        node: Node = self.root
        parent: Node = self.root
        path: list[str | int] = []
        for element in location:
            _, members = self.tags(node)
            if element in members:
                node = members[str(element)]
                continue
            if not self._is_container(node):
                break
            path.append(element)
            parent = node
            node = self.child(node, element) or {}
        return path, parent

    def owners(self, location: Sequence[str | int]) -> tuple[str, str, list[str]]:
        """Return whose key an unknown one is, where the table that has it is one of several kinds.

        Returns:
            What tells the kinds apart, the kind that is there, and those that have a key of this name; empty where
            the table has one kind only.
        """
        node: Node = self.root
        found: tuple[str, str, list[str]] = ("", "", [])
        *above, key = location
        for element in above:
            tag, members = self.tags(node)
            if element in members:
                node = members[str(element)]
                having = [t for t, member in members.items() if key in self.keys(member)]
                found = (tag, str(element), having)
                continue
            node, found = self.child(node, element) or {}, ("", "", [])
        return found

    def _is_container(self, node: Node) -> bool:
        return any(
            key in self.resolve(node) for key in ("properties", "additionalProperties", "items")
        )

    def nearest(self, node: Node, key: str) -> list[str]:
        """Return keys of an object, or dotted ones below it, that somebody who wrote ``key`` may mean."""
        return self.below(node, key) or get_close_matches(key, self.keys(node), n=2)

    def below(self, node: Node, key: str) -> list[str]:
        """Return dotted keys below an object that end with ``key``."""
        found = [
            dotted
            for dotted in self._dotted(node, depth=3)
            if "." in dotted and dotted.rpartition(".")[2] == key
        ]
        return found[:2]

    def _dotted(self, node: Node, *, depth: int) -> Iterator[str]:
        for key in self.keys(node):
            yield key
            child = self.child(node, key)
            if depth and child is not None:
                yield from (f"{key}.{rest}" for rest in self._dotted(child, depth=depth - 1))
