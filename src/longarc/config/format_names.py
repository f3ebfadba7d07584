"""The names of chat formats; apart from the settings, so that a command line's help needs no pydantic."""

import difflib
from typing import Final

FORMAT_NAMES: Final = ("glm-4.5", "glm-4.7", "glm-5", "glm-5.2", "chatml", "template")
"""The chat formats that have a name; others come by import path."""


def format_name(name: str) -> str:
    """Return the name of a chat format, or the import path of one.

    Raises:
        ValueError: it is neither.
    """
    module, colon, attribute = name.partition(":")
    if name in FORMAT_NAMES or (colon and module and attribute):
        return name
    near = difflib.get_close_matches(name, FORMAT_NAMES, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise ValueError(
        f"there is no chat format {name!r}; {hint}use one of {', '.join(FORMAT_NAMES)}, or 'package.module:name'"
    )
