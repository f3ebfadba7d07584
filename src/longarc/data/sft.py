"""Demonstrations of several experts, mixed, as training documents.

The order depends on the seed and the position alone: a resume at a cursor goes on exactly, and no
expert keeps a state.
"""

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from typing import Protocol, runtime_checkable

from longarc.data.documents import Document
from longarc.errors import ConfigError
from longarc.records.conversation import Conversation
from longarc.tokens.chat_format import ChatFormat, RenderedChat


@runtime_checkable
class Expert(Protocol):
    """Something that can show how its tasks are done."""

    def demonstration(self, index: int, *, error_frac: float = 0.0) -> Conversation:
        """Return demonstration number ``index`` >= 0, always the same; training problems only.

        Args:
            index: position in an endless sequence.
            error_frac: share of demonstrations that hold a mistake and its correction, for experts
                that can make mistakes.
        """
        ...


@runtime_checkable
class RecordedExpert(Expert, Protocol):
    """An expert that has finitely many conversations, and can show them all."""

    def all_demonstrations(self) -> Iterator[Conversation]:
        """Yield every conversation once."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertShare:
    """An expert and its part of the mixture."""

    expert: Expert
    share_frac: float = 1.0
    """Relative; shares are normalised."""


def conversations(
    experts: Mapping[str, ExpertShare], *, cursor: int, error_frac: float, seed: int = 0
) -> Iterator[Conversation]:
    """Yield the mixture from position ``cursor`` on; never ends.

    Raises:
        ConfigError: there is no expert, or a share is not positive.
    """
    if not experts:
        raise ConfigError("there is no expert to imitate; name at least one task family")
    names = sorted(experts)
    shares = [experts[name].share_frac for name in names]
    if min(shares) <= 0:
        raise ConfigError(f"shares {dict(zip(names, shares, strict=True))} must be positive")
    for index in count(cursor):
        rng = random.Random(f"conversations/{seed}/{index}")
        name = rng.choices(names, weights=shares)[0]
        yield experts[name].expert.demonstration(index, error_frac=error_frac)


def conversation_document(
    conversation: Conversation, chat_format: ChatFormat, *, max_tokens: int
) -> Document:
    """Render a conversation: the assistant's tokens are trained on, but for its untrained messages.

    Raises:
        ConfigError: it is longer than ``max_tokens``; cutting it would teach half an answer.
    """
    rendered = _rendered(conversation, chat_format)
    if len(rendered.token_ids) > max_tokens:
        raise ConfigError(
            f"a demonstration of {conversation.family!r} has {len(rendered.token_ids)} tokens, the stage "
            f"allows {max_tokens}; make the family's demonstrations easier or raise the context"
        )
    return Document(token_ids=rendered.token_ids, train_mask=rendered.train_mask)


def check_recorded(
    name: str, expert: RecordedExpert, chat_format: ChatFormat, *, max_tokens: int
) -> None:
    """Refuse recorded conversations that are longer than a document may be, before any step is taken.

    Args:
        name: of the family.
        expert: whose conversations are looked at.
        chat_format: how a conversation becomes tokens.
        max_tokens: what a document may have [tokens].

    Raises:
        ConfigError: some are longer.
    """
    shown = list(expert.all_demonstrations())
    lengths = [len(_rendered(conversation, chat_format).token_ids) for conversation in shown]
    num_longer = sum(length > max_tokens for length in lengths)
    if num_longer:
        raise ConfigError(
            f"{num_longer} of the {len(shown)} conversations of {name!r} have more than the {max_tokens} tokens of "
            f"micro_batch_tokens, the longest {max(lengths)}; raise that, or leave long ones out with the family's "
            f"max_chars"
        )


def _rendered(conversation: Conversation, chat_format: ChatFormat) -> RenderedChat:
    return chat_format.render(
        conversation.messages,
        conversation.tools,
        thinking=conversation.thinking,
        clear_thinking=False,  # as in a rollout, where every turn extends the one before
        add_generation_prompt=False,
        untrained=conversation.untrained,
    )
