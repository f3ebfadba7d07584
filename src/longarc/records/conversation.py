"""A finished conversation to imitate: what experts produce and supervised fine-tuning reads."""

from dataclasses import dataclass

from longarc.errors import ContractError
from longarc.records.message import Message, Role, ToolSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """Messages of which the assistant's are trained on, but for the ones that are marked."""

    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...] = ()
    untrained: frozenset[int] = frozenset()
    """Positions of assistant messages that stay in context but carry no loss (a mistake before its correction)."""
    thinking: bool = False
    """True where the assistant's messages were made with thinking on."""
    family: str = ""
    """Task family of the demonstration; empty where there is none."""
    difficulty: float = 0.0

    def __post_init__(self) -> None:
        for position in self.untrained:
            if not 0 <= position < len(self.messages):
                raise ContractError(
                    f"untrained message {position} does not exist: the conversation has {len(self.messages)} messages"
                )
            if self.messages[position].role is not Role.ASSISTANT:
                raise ContractError(
                    f"untrained message {position} is a {self.messages[position].role} message; "
                    "only assistant messages can be trained on, so only they are marked"
                )
