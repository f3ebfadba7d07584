"""Random conversations over the Renderers of the ``renderers`` package; run by test_renderers.py where it is installed.

Prints one JSON line for each Renderer: its name, what was played, and how many turns it did not continue.
"""

import asyncio
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from renderers.configs import GLM5RendererConfig, GLM45RendererConfig, Qwen3RendererConfig
from renderers.glm5 import GLM5Renderer
from renderers.glm45 import GLM45Renderer
from renderers.qwen3 import Qwen3Renderer

from drift_cases import Conversation
from longarc.tokens.chat_format import ChatFormat
from longarc.tokens.formats import make_chat_format
from longarc.tokens.renderer_format import Renderer, RendererFormat, RendererTokenizer
from longarc.tokens.tokenizer import Tokenizer
from token_samples import qwen_tokenizer, small_tokenizer


def glm45(tokenizer: Tokenizer) -> Renderer:
    """Named by import path, as a recipe does."""
    return GLM45Renderer(RendererTokenizer(tokenizer), GLM45RendererConfig())


def glm5(tokenizer: Tokenizer) -> Renderer:
    return GLM5Renderer(RendererTokenizer(tokenizer), GLM5RendererConfig())


def qwen3(tokenizer: Tokenizer) -> Renderer:
    return Qwen3Renderer(RendererTokenizer(tokenizer), Qwen3RendererConfig())


async def play(name: str, num_conversations: int) -> dict[str, object]:
    """Play conversations over one Renderer; a drift raises."""
    is_glm = name.startswith("glm")
    tokenizer = small_tokenizer() if is_glm else qwen_tokenizer()
    chat_format: ChatFormat = make_chat_format(f"{__name__}:{name}", tokenizer)
    assert isinstance(chat_format, RendererFormat)
    counts: dict[str, int] = {}
    for seed in range(num_conversations):
        conversation = Conversation(seed, formats=((chat_format, is_glm),))
        await conversation.play()
        for what, count in conversation.counts.items():
            counts[what] = counts.get(what, 0) + count
    return {"renderer": name, "rewrites": chat_format.rewrites.num, **counts}


def main() -> None:
    for name in ("glm45", "glm5", "qwen3"):
        sys.stdout.write(json.dumps(asyncio.run(play(name, int(sys.argv[1])))) + "\n")


if __name__ == "__main__":
    main()
