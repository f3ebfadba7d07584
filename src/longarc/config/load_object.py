"""Extension by import path: the path is the name, nothing has to be registered."""

import os
import sys
from collections.abc import Callable
from difflib import get_close_matches
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Final

from longarc.errors import ConfigError, boundary

_KINDS_OF_CLASSES: Final[tuple[object, ...]] = (type, object, Callable)
"""Kinds that a class satisfies as it is."""


def load_object(path: str, *, kind: type) -> Any:
    """Return the object at ``"package.module:attribute"``, checked against a type or runtime protocol.

    A class is called without arguments, unless a class or any callable is what was asked for. The
    working directory is importable, so that a file beside the recipe needs no installation.

    Args:
        path: where it is; the attribute may be dotted.
        kind: a class, a ``runtime_checkable`` Protocol, or ``collections.abc.Callable``.

    Raises:
        ConfigError: the path is malformed, missing, raises when imported, or names something
            that is not a ``kind``.
    """
    obj = _attribute(path)
    if isinstance(obj, type) and kind not in _KINDS_OF_CLASSES:
        with boundary(ConfigError, f"cannot make an object of class {path!r} without arguments"):
            obj = obj()
    if not isinstance(obj, kind):
        raise ConfigError(
            f"{path!r} is a {type(obj).__name__}, which is not a {kind.__name__}{_lacking(obj, kind)}"
        )
    return obj


def check_import_path(path: str) -> None:
    """Check that a path is well formed and its module exists, without importing that module.

    Raises:
        ConfigError: it is not.
    """
    module_name, _ = _split(path)
    _make_working_directory_importable()
    with boundary(ConfigError, f"cannot load {path!r}"):
        spec = find_spec(module_name)
    if spec is None:
        raise ConfigError(
            f"cannot load {path!r}: there is no module {module_name!r}; install it, or start from the "
            f"directory that holds it"
        )


def _split(path: str) -> tuple[str, str]:
    module_name, separator, attribute = path.partition(":")
    if not (separator and module_name and attribute) or module_name.startswith("."):
        raise ConfigError(f"{path!r} is not an import path; write 'package.module:attribute'")
    return module_name, attribute


def _attribute(path: str) -> Any:
    module_name, attribute = _split(path)
    _make_working_directory_importable()
    with boundary(ConfigError, f"cannot load {path!r}"):
        obj: Any = import_module(module_name)
    for name in attribute.split("."):
        if not hasattr(obj, name):
            near = get_close_matches(name, [n for n in vars(obj) if n[:1] != "_"], n=3)
            hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else ""
            raise ConfigError(f"cannot load {path!r}: {module_name!r} has no {attribute!r}{hint}")
        obj = getattr(obj, name)
    return obj


def _make_working_directory_importable() -> None:
    """Add the working directory at the end of the search path, where it hides no installed module.

    ``python -m`` does this, the installed command does not; user code expects both to be alike.
    """
    here = os.getcwd()
    if here not in sys.path and "" not in sys.path:
        sys.path.append(here)


def _lacking(obj: object, kind: type) -> str:
    """Name what an object lacks to satisfy a protocol."""
    wanted = {
        name
        for base in kind.__mro__
        if getattr(base, "_is_protocol", False)
        for name in (*vars(base), *vars(base).get("__annotations__", ()))
        if not name.startswith("_")
    }
    lacking = sorted(name for name in wanted if not hasattr(obj, name))
    return f": it lacks {', '.join(lacking)}" if lacking else ""
