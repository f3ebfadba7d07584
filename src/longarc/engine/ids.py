"""What is a token id; apart from the engine, because its clients need no torch."""

import operator
from collections.abc import Sequence

from longarc.errors import EngineRequestError


def whole_ids(what: str, ids: Sequence[int]) -> list[int]:
    """Return ids as Python's integers; 1.5 is none and does not become 1.

    Raises:
        EngineRequestError: one is no whole number.
    """
    try:
        return [operator.index(token_id) for token_id in ids]
    except TypeError as error:
        raise EngineRequestError(
            f"{what} have to be whole numbers: {error}; send what the tokenizer returned"
        ) from error
