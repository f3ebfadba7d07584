"""The prompt of the next turn: stored ids and what follows them, or a conversation rendered whole."""

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from longarc.gateway.openings import Openings
from longarc.gateway.tree import Node, SessionTree, id_array
from longarc.records.message import Message, ToolSpec
from longarc.tokens.chat_format import ChatFormat, StoredTurn


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """What the engine is given."""

    parent: Node | None
    """The stored turn that it continues; None where it was rendered whole."""
    num_matched: int
    """Messages that the parent stands for [messages]."""
    num_stored: int
    """Ids that the parent stands for [tokens]."""
    stored_digest: "hashlib.blake2b"
    """Of these, to be continued by whoever adds to them."""
    ids: "array[int]"
    """To be read only: what opens conversations is shared."""


class Prompts:
    """Builds the prompts of one session."""

    def __init__(
        self,
        chat_format: ChatFormat,
        openings: Openings,
        tree: SessionTree,
        *,
        clear_thinking: bool,
    ) -> None:
        self._format = chat_format
        self._openings = openings
        self._tree = tree
        self._clear_thinking = clear_thinking

    def build(
        self,
        messages: Sequence[Message],
        keys: Sequence[bytes],
        tools: Sequence[ToolSpec],
        matched: tuple[Node | None, int],
        *,
        thinking: bool,
    ) -> Prompt:
        """Return the prompt of a conversation.

        Where the format would not show the stored turns as they were, the conversation becomes a branch with the
        prompt that the format does show; answers in it carry the reasoning that was sampled.

        Args:
            messages: the whole conversation.
            keys: their identities.
            tools: the tools of the prompt.
            matched: the deepest stored turn that the conversation continues, and how many messages it covers.
            thinking: whether the answer begins with reasoning.

        Raises:
            ContractError: stored ids are not what the engine saw.
        """
        parent, num_matched = matched
        if parent is not None:
            stored, digest = self._tree.stored(parent)
            messages = self._tree.as_answered(messages, keys, parent)
            turn = StoredTurn(
                prompt_ids=stored[: len(stored) - len(parent.sampled_ids)],
                sampled_ids=parent.sampled_ids,
                messages=messages[:num_matched],
                tools=tools,
                clear_thinking=self._clear_thinking,
            )
            tail = self._format.tail_after(turn, messages[num_matched:], thinking=thinking)
            if tail is not None:
                return Prompt(
                    parent=parent,
                    num_matched=num_matched,
                    num_stored=len(stored),
                    stored_digest=digest,
                    ids=stored + id_array(tail),
                )
        return Prompt(
            parent=None,
            num_matched=0,
            num_stored=0,
            stored_digest=self._tree.stored(None)[1],
            ids=self._openings.prompt(messages, tools, thinking=thinking),
        )
