"""The chat formats by name, and those that users bring by import path."""

from collections.abc import Callable
from typing import Any, Final

from longarc.config.format_names import FORMAT_NAMES
from longarc.config.load_object import load_object
from longarc.errors import ConfigError, boundary
from longarc.tokens.chat_format import ChatFormat
from longarc.tokens.chatml import ChatMlFormat
from longarc.tokens.glm import GlmFormat, GlmVersion
from longarc.tokens.renderer_format import Renderer, RendererFormat, RendererTokenizer
from longarc.tokens.template_source import TemplateSource
from longarc.tokens.tokenizer import Tokenizer

_GLM: Final[dict[str, GlmVersion]] = {
    "glm-4.5": "glm-4.5",
    "glm-4.7": "glm-4.7",
    "glm-5": "glm-4.7",
    "glm-5.2": "glm-5.2",
}


def make_chat_format(
    name: str, tokenizer: Tokenizer, *, template: TemplateSource | None = None
) -> ChatFormat:
    """Return a chat format over a tokenizer.

    Args:
        name: one of ``FORMAT_NAMES``, or ``package.module:name`` of a function or class that is called with the
            tokenizer and gives a ``ChatFormat`` or a Renderer. A Renderer's class gets the tokenizer in the form
            that Renderers use.
        tokenizer: of the model.
        template: what ``template`` renders with.

    Raises:
        ConfigError: there is no such format, or the import path gives something else.
        CheckpointError: the tokenizer lacks the format's control tokens.
    """
    if name in _GLM:
        return GlmFormat(tokenizer, version=_GLM[name])
    if name == "chatml":
        return ChatMlFormat(tokenizer)
    if name == "template":
        if template is None:
            raise ConfigError("chat_format 'template' needs a template; none was given")
        return template.chat_format(tokenizer)
    if ":" not in name:
        raise ConfigError(
            f"there is no chat format {name!r}; use one of {', '.join(FORMAT_NAMES)} or an import path"
        )
    return _imported(name, tokenizer)


def _imported(path: str, tokenizer: Tokenizer) -> ChatFormat:
    factory: Any = load_object(path, kind=Callable)  # type: ignore[arg-type]
    wants_view = isinstance(factory, type) and hasattr(factory, "bridge_to_next_turn")
    with boundary(ConfigError, f"chat format {path!r} cannot be made for this tokenizer"):
        made = factory(RendererTokenizer(tokenizer) if wants_view else tokenizer)
    if isinstance(made, ChatFormat):
        return made
    if isinstance(made, Renderer):
        return RendererFormat(tokenizer, made)
    raise ConfigError(
        f"chat format {path!r} gave a {type(made).__name__}, which is neither a ChatFormat "
        f"(longarc.tokens.chat_format) nor a Renderer (render, parse_response, get_stop_token_ids, "
        f"bridge_to_next_turn)"
    )
