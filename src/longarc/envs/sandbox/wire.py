"""Frames between the host and the exec server of a box.

::

    frame  = u32 body length | body
    body   = field*
    field  = u32 length | bytes            all integers little-endian; numbers inside fields are ASCII

No pickle, marshal or JSON: the host must be able to read what a hostile box sends, and the server
must start without importing a parser. ``execd`` carries its own copy of the two functions, because
nothing of LongArc is visible inside a box.
"""

import struct
from collections.abc import Sequence

from longarc.errors import SandboxError

U32 = struct.Struct("<I")


def pack(fields: Sequence[bytes]) -> bytes:
    """Return one frame that holds ``fields``."""
    body = b"".join(part for field in fields for part in (U32.pack(len(field)), field))
    return U32.pack(len(body)) + body


def unpack(body: bytes) -> list[bytes]:
    """Return the fields of a frame's body.

    Raises:
        SandboxError: a field reaches beyond the body.
    """
    fields, position = [], 0
    while position < len(body):
        start = position + U32.size
        if start > len(body):
            raise SandboxError(_torn(position, len(body)))
        (length,) = U32.unpack_from(body, position)
        position = start + length
        if position > len(body):
            raise SandboxError(_torn(start, len(body)))
        fields.append(body[start:position])
    return fields


def _torn(position: int, length: int) -> str:
    return (
        f"the exec server sent a broken frame: the field at byte {position} reaches beyond the "
        f"{length} bytes of the frame; the box cannot be trusted any more, open a new one"
    )
