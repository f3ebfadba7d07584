"""What an engine knows of the text behind tokens, where a request needs it: stop strings and constraints."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from longarc.engine.stop_strings import TokenBytes
from longarc.errors import ConfigError, ContractError, EngineRequestError
from longarc.records.sampling import Sampling
from longarc.tokens.grammar import Grammars, GrammarWalk
from longarc.tokens.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class TokenText:
    """The tokenizer, as far as an engine reads it."""

    token_bytes: TokenBytes
    """What stop strings are looked for in."""
    grammars: Grammars | None = None
    """What constraints become; None refuses them."""

    @classmethod
    def of(cls, tokenizer: Tokenizer, *, vocab_size: int) -> "TokenText":
        """Return what an engine reads of a tokenizer.

        Args:
            tokenizer: of the model.
            vocab_size: of the model [tokens].
        """
        return cls(tokenizer.token_bytes, Grammars(tokenizer, vocab_size=vocab_size))


def check_text(text: TokenText | None, sampling: Sampling) -> None:
    """Refuse what needs text that the engine does not know.

    Raises:
        EngineRequestError: a request asks for it.
    """
    if sampling.stop_strings and text is None:
        raise EngineRequestError(
            f"stop_strings={list(sampling.stop_strings)} need the text of tokens, which this engine was not "
            f"given; send stop_ids, or open the engine with text"
        )
    if sampling.constraint is not None and (text is None or text.grammars is None):
        raise EngineRequestError(
            "output that follows a JSON schema needs the text of tokens, which this engine was not given: there is no "
            "tokenizer.json beside its weights; ask for plain text, or put the file there"
        )


async def walk_of(
    text: TokenText | None, prompt_ids: Sequence[int], sampling: Sampling
) -> GrammarWalk | None:
    """Return where a completion stands in the grammar of its constraint; None where it has none.

    Raises:
        EngineRequestError: the constraint cannot be followed, or what was sampled before does not follow it.
    """
    check_text(text, sampling)
    if sampling.constraint is None or text is None or text.grammars is None:
        return None
    try:
        # A large schema takes longer than others may wait for the event loop.
        walk = await asyncio.to_thread(text.grammars.walk, sampling.constraint, sampling.stop_ids)
        walk.take(prompt_ids[len(prompt_ids) - sampling.num_sampled_before :])
    except (ConfigError, ContractError) as error:
        raise EngineRequestError(str(error)) from error
    return walk
