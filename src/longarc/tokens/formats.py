"""The chat formats by the name that recipes and command lines give them."""

from typing import Final

from longarc.errors import ConfigError
from longarc.tokens.chat_format import ChatFormat
from longarc.tokens.chatml import ChatMlFormat
from longarc.tokens.glm import GlmFormat
from longarc.tokens.tokenizer import Tokenizer

CHAT_FORMATS: Final = ("glm-5", "glm-5.2", "chatml")
"""Names that ``chat_format`` knows."""


def chat_format(name: str, tokenizer: Tokenizer) -> ChatFormat:
    """Return the chat format of a name.

    Raises:
        ConfigError: there is none of that name.
        CheckpointError: the tokenizer lacks a control token of the format.
    """
    match name:
        case "glm-5":
            return GlmFormat(tokenizer, version="glm-4.7")
        case "glm-5.2":
            return GlmFormat(tokenizer, version="glm-5.2")
        case "chatml":
            return ChatMlFormat(tokenizer)
        case _:
            raise ConfigError(f"chat format {name!r} is unknown; there are {list(CHAT_FORMATS)}")
