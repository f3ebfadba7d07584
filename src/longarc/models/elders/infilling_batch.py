"""Blank-infilling examples on one packed token axis, and who sees whom on it.

Part A of an example sees itself whole; Part B sees Part A and itself causally; examples do not see one
another. Part A lies before Part B, so for a query q and a key k of one example this is

    k <= q  or  k in Part A

Source: GLM, arXiv:2103.10360, section 2.1 and figure 2.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from longarc.errors import ContractError
from longarc.models.elders.blank_infilling import InfillingExample

MaskMod: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""FlexAttention's question: may, in batch b and head h, query q attend to key k?"""


@dataclass(frozen=True, slots=True, kw_only=True)
class InfillingBatch:
    """Packed examples; the fields are those of ``InfillingExample``, one after another."""

    token_ids: Int[Tensor, " tokens"]
    target_ids: Int[Tensor, " tokens"]
    train_mask: Bool[Tensor, " tokens"]
    positions: Int[Tensor, " tokens"]
    block_positions: Int[Tensor, " tokens"]
    example_of: Int[Tensor, " tokens"]
    """Which example a token belongs to, from 0."""
    is_context: Bool[Tensor, " tokens"]
    """True in Part A."""

    @classmethod
    def of(cls, examples: Sequence[InfillingExample]) -> "InfillingBatch":
        """Pack examples.

        Raises:
            ContractError: there are none.
        """
        if not examples:
            raise ContractError("there are no examples to pack; give at least one")
        lengths = torch.tensor([len(example.token_ids) for example in examples])
        return cls(
            token_ids=_joined([example.token_ids for example in examples]),
            target_ids=_joined([example.target_ids for example in examples]),
            train_mask=_joined([example.train_mask for example in examples]).bool(),
            positions=_joined([example.positions for example in examples]),
            block_positions=_joined([example.block_positions for example in examples]),
            example_of=torch.arange(len(examples)).repeat_interleave(lengths),
            is_context=torch.cat(
                [
                    torch.arange(len(example.token_ids)) < example.num_context_tokens
                    for example in examples
                ]
            ),
        )

    def mask_mod(self) -> MaskMod:
        """Return who sees whom, for ``torch.nn.attention.flex_attention.create_block_mask``."""
        example_of, is_context = self.example_of, self.is_context
        # A lambda, because torch counts arguments in ``__code__``, where any decorator hides them.
        return lambda batch, head, query, key: (
            (example_of[query] == example_of[key]) & ((key <= query) | is_context[key])
        )

    def dense_mask(self) -> Bool[Tensor, "tokens tokens"]:
        """Return the same as a table of queries times keys, True = visible, for short sequences and tests.

        Made the other way round, from each example's square, so that one checks the other.
        """
        table = torch.zeros((len(self.token_ids), len(self.token_ids)), dtype=torch.bool)
        first = 0
        for num_tokens in self.example_of.bincount().tolist():
            end = first + num_tokens
            num_context_tokens = int(self.is_context[first:end].sum())
            table[first:end, first:end] = torch.ones((num_tokens, num_tokens)).tril().bool()
            table[first:end, first : first + num_context_tokens] = True
            first = end
        return table


def _joined(fields: Sequence[Sequence[int]]) -> Int[Tensor, " tokens"]:
    return torch.tensor([value for field in fields for value in field], dtype=torch.long)
