"""Drafts of the MTP layer in native code: one depth at a time, or rounds of speculative decoding in one call.

The cache has one more layer, the MTP layer's, and the main model's states; see ``cpu/draft.h`` for where a row lies.
The C++ side of a round is ``cpu/rounds.h``.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from longarc.config.model import GlmMoeDsaConfig
from longarc.models.cache import CacheShape
from longarc.models.kernels import structs
from longarc.models.kernels.decode import NativeGlmMoeDsa, Weights, rows_of
from longarc.models.kernels.native import check_ids
from longarc.models.kernels.paged_tables import Table
from longarc.models.kernels.steps import Interrupt, stop_lists


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundDraws:
    """How the tokens of some rounds are drawn; sequences have a value for each of the call's."""

    max_rounds: int
    num_drafts: int
    """Tokens to draft in a round, where the budget allows it."""
    least_probability: float
    """No draft is made that would give its chain a smaller probability in the eyes of the MTP layer."""
    temperatures: Sequence[float]
    """0 takes the most likely token."""
    seeds: Sequence[int]
    num_drawn: Sequence[int]
    """Position in each seed's stream of the next token's draw."""
    budgets: Sequence[int]
    """Tokens that may be drawn, at least 1."""
    due: Sequence[int]
    """No round follows one after which a sequence has drawn as many."""
    stop_ids: Sequence[Sequence[int]]
    """Of each sequence: no round follows one that draws one of these, and no token follows it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """What some rounds drew."""

    token_ids: list[list[int]]
    """Of each sequence; at least one token."""
    logprobs: list[list[float]]
    """Of the tokens [nats]."""
    is_finite: list[bool]
    """Whether the logits of the last token were; where not, it means nothing."""
    num_drafted: list[int]
    """Drafts that were verified, by depth."""
    num_accepted: list[int]
    """Drafts that stayed, by depth."""


class DraftingGlmMoeDsa(NativeGlmMoeDsa):
    """The GLM-5 family with its MTP layer, which is the layer behind the last."""

    def __init__(
        self,
        weights: Weights,
        angles: tuple[Tensor, Tensor],
        config: GlmMoeDsaConfig,
        shape: CacheShape,
    ) -> None:
        """Allocate the rows of all layers and pack the weights.

        Args:
            weights: of a model with an MTP layer, by their names in the module tree.
            angles: cosine and sine of every position.
            config: of the model.
            shape: sequences, pages and lengths.
        """
        self._draft = structs.Draft()
        self._draft_output = torch.empty(0)
        super().__init__(_with_named_layer(weights, config), angles, config, shape)

    def under(self, weights: Weights) -> "DraftingGlmMoeDsa":
        """Return the same rows with packed weights of its own; nothing is packed before ``prepare``."""
        other = super().under(_with_named_layer(weights, self._config))
        assert isinstance(other, DraftingGlmMoeDsa)
        return other

    @staticmethod
    def _num_layers_of(config: GlmMoeDsaConfig) -> int:
        return config.num_hidden_layers + 1

    @staticmethod
    def _tables_of(config: GlmMoeDsaConfig) -> dict[str, Table]:
        tables = NativeGlmMoeDsa._tables_of(config)
        behind = config.num_hidden_layers
        index_layers = (*config.indexed_layers, behind)
        return {
            **tables,
            "index_keys": Table(1, config.index_head_dim, True, index_layers),
            "states": Table(1, config.hidden_size, False, (behind,)),
        }

    def _rows_of_layer(self, layer: int) -> dict[str, Tensor]:
        return {name: rows for name, rows in self.layer(layer).items() if name != "states"}

    def _has_indexer(self, layer: int) -> bool:
        return layer == self._config.num_hidden_layers or super()._has_indexer(layer)

    def _has_experts(self, layer: int) -> bool:
        return layer == self._config.num_hidden_layers or super()._has_experts(layer)

    def _pack_layers(self) -> ctypes.Array[Any]:
        layers, config = super()._pack_layers(), self._config
        behind = config.num_hidden_layers
        norms = {
            "token_norm": "enorm.weight",
            "state_norm": "hnorm.weight",
            "head_norm": "shared_head.norm.weight",
        }
        self._draft = structs.Draft(
            **structs.addresses({key: self._weight(behind, name) for key, name in norms.items()}),
            joint=self._pack(self._weight(behind, "eh_proj.weight")),
            states=self.layer(behind)["states"].data_ptr(),
            feeds_normed=config.mtp_feeds_normed,
            advances=config.mtp_query_position == "advance",
        )
        # What drafts are drawn from need not be exact: the main model decides with its own numbers.
        self._draft_output = self._library.packed(
            self._output_weight(), self._arena, compute_dtype="bfloat16"
        )
        return layers

    def take(
        self,
        token_ids: Int[Tensor, " new"],
        hidden: Float[Tensor, "new hidden"],
        slots: Sequence[int],
        starts: Sequence[int],
        counts: Sequence[int],
    ) -> None:
        """Keep states of the main model, and leave the rows of depth 1 of their tokens.

        Args:
            token_ids: sequence after sequence, as given to ``hidden``.
            hidden: what that returned for them, all of them.
            slots: slot of each sequence.
            starts: position of each sequence's first token; what is before has been taken.
            counts: tokens of each sequence.
        """
        layers = self._fresh_layers()
        slots_N, positions_N = rows_of(slots, starts, counts)
        tokens_N, hidden_NH = token_ids.contiguous(), hidden.contiguous()
        self._library.call_structs(
            "mla_take",
            self._shape(is_sparse=True),
            layers,
            self._row_struct(tokens_N, slots_N, positions_N, hidden_NH),
            self._draft,
        )

    def chain(
        self, slots: Sequence[int], lengths: Sequence[int], *, is_sparse: bool
    ) -> "NativeChain":
        """Begin a chain of drafts for each sequence.

        Args:
            slots: slot of each sequence.
            lengths: tokens of each whose states have been taken; the next one has been drawn.
            is_sparse: attend to the selection of the layer's indexer only.
        """
        return NativeChain(self, slots, lengths, is_sparse=is_sparse)

    def draft_depth(
        self,
        token_ids: Int[Tensor, " B"],
        slots: Int[Tensor, " B"],
        positions: Int[Tensor, " B"],
        depth: structs.Depth,
        *,
        is_sparse: bool,
    ) -> None:
        """Compute one depth; ``depth`` says where what goes in and comes out lies."""
        layers = self._fresh_layers()
        rows = self._row_struct(token_ids, slots, positions, token_ids)
        self._library.call_structs(
            "mla_draft", self._shape(is_sparse), layers, rows, self._draft, depth
        )

    def turned(self, positions: Int[Tensor, " B"], depth: int) -> Int[Tensor, " B"]:
        """Return where the query of a depth stands, of sequences whose newest tokens have these positions."""
        advance = depth - 1 if self._config.mtp_query_position == "advance" else 0
        # A caller drafts for all of a batch what some of it has no room for, and does not look at that.
        return (positions - 1 + advance).clamp(max=len(self._angles[0]) - 1)

    @property
    def selected_room(self) -> int:
        """Numbers that the selection of a row has room for."""
        longest = self.shape.slot_pages * self.shape.page_tokens
        return min(self._config.num_selected, longest) + self._library.lanes

    def rounds(
        self,
        token_ids: Sequence[int],
        slots: Sequence[int],
        lengths: Sequence[int],
        draws: RoundDraws,
        interrupt: Interrupt,
        *,
        is_sparse: bool,
    ) -> Verified:
        """Draft behind the newest token of each sequence, verify, and so on.

        Ends after the last round of ``draws``, after one in which a sequence drew a stop id, came to its budget or
        to what is due, or met logits that are not finite, or when interrupted; makes one round at least. All
        tokens but the last of each sequence are in the cache then, and have been taken.

        Args:
            token_ids: the newest token of each sequence, which is not in the cache yet.
            slots: slot of each sequence.
            lengths: tokens of each that are.
            draws: how tokens are drawn.
            interrupt: set from another thread, it ends the call after its current round.
            is_sparse: attend to the indexers' selections only.

        Raises:
            ContractError: the tokens do not fit the cache, or an id is not in the vocabulary.
        """
        layers = self._fresh_layers()
        vocab, num_rows = self._output_weight().shape[0], len(token_ids)
        room = draws.max_rounds * (draws.num_drafts + 1)
        self.check(list(slots), list(lengths), [min(budget, room) for budget in draws.budgets])
        # A call of few rounds takes little time, and each tensor some of it: few tensors.
        told = torch.tensor(
            [token_ids, slots, lengths, draws.seeds, draws.num_drawn, draws.budgets, draws.due]
        )
        tokens_B, slots_B, lengths_B, seeds_B, num_drawn_B, budgets_B, due_B = told.unbind()
        check_ids(tokens_B, vocab)
        temperatures_B = torch.tensor(draws.temperatures, dtype=torch.float32)
        stop_ids, stop_ends = stop_lists(draws.stop_ids)
        sizes = [num_rows * room, num_rows, num_rows, draws.num_drafts, draws.num_drafts]
        found = torch.split(torch.empty(sum(sizes), dtype=torch.long), sizes)
        tokens_BR, counts_B, finite_B, drafted_D, accepted_D = found
        logprobs_BR = torch.empty(num_rows * room)
        rounds = structs.Rounds(
            max_rounds=draws.max_rounds,
            num_drafts=draws.num_drafts,
            least_probability=draws.least_probability,
            vocab=vocab,
            interrupt=interrupt.address,
            **structs.addresses(
                {
                    "output": self._output,
                    "draft_output": self._draft_output,
                    "temperatures": temperatures_B,
                    "seeds": seeds_B,
                    "num_drawn": num_drawn_B,
                    "budgets": budgets_B,
                    "due": due_B,
                    "stop_ids": stop_ids,
                    "stop_ends": stop_ends,
                    "tokens": tokens_BR,
                    "logprobs": logprobs_BR,
                    "counts": counts_B,
                    "is_finite": finite_B,
                    "drafted": drafted_D,
                    "accepted": accepted_D,
                }
            ),
        )
        rows = self._row_struct(tokens_B, slots_B, lengths_B, self.new_states(num_rows))
        self._library.call_structs(
            "mla_rounds", self._shape(is_sparse), layers, rows, self._draft, rounds
        )
        ends = [(row * room, count) for row, count in enumerate(counts_B.tolist())]
        return Verified(
            token_ids=[tokens_BR[at : at + n].tolist() for at, n in ends],
            logprobs=[logprobs_BR[at : at + n].tolist() for at, n in ends],
            is_finite=list(map(bool, finite_B.tolist())),
            num_drafted=drafted_D.tolist(),
            num_accepted=accepted_D.tolist(),
        )


class NativeChain:
    """Drafts of some sequences, one depth after another."""

    def __init__(
        self,
        cache: DraftingGlmMoeDsa,
        slots: Sequence[int],
        lengths: Sequence[int],
        *,
        is_sparse: bool,
    ) -> None:
        self._cache = cache
        self._slots, self._positions = torch.tensor(slots), torch.tensor(lengths)
        self._is_sparse = is_sparse
        self._depth = 0
        self._fed, self._hidden = cache.new_states(len(slots)), cache.new_states(len(slots))
        self._selected = torch.empty(len(slots), cache.selected_room, dtype=torch.int32)

    def read(self, token_ids: Int[Tensor, " B"]) -> Float[Tensor, "B V"]:
        """Read a token of each sequence and return the logits of the draft behind it.

        Args:
            token_ids: at first the newest token of each sequence, then what was drafted last.
        """
        self._depth += 1
        turned = self._cache.turned(self._positions, self._depth)
        tokens = token_ids.contiguous()
        depth = structs.Depth(
            depth=self._depth,
            **structs.addresses(
                {
                    "turned": turned,
                    "fed": self._fed,
                    "hidden": self._hidden,
                    "selected": self._selected,
                }
            ),
        )
        self._cache.draft_depth(
            tokens, self._slots, self._positions, depth, is_sparse=self._is_sparse
        )
        return self._cache.logits(self._hidden)


def _with_named_layer(weights: Weights, config: GlmMoeDsaConfig) -> Weights:
    """Return the weights with the MTP layer's also under the name of the layer behind the last."""
    layer = f"model.layers.{config.num_hidden_layers}."
    named = {
        layer + name.removeprefix("mtp."): weight
        for name, weight in weights.items()
        if name.startswith("mtp.")
    }
    return {**weights, **named}
