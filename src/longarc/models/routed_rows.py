"""What tokens were routed to, kept beside their rows in a cache, and the bytes in which it travels to the trainer.

::

    pass of the engine --> RoutedRows, page by page --> blob of each token --> wire, log, ledger --> Routing of a pack

A choice lies where its token's rows lie: whoever shares a page or copies of it has its choices too. The bytes of a token
are the experts of each layer that has some, best first, and then what each indexer selected. A token that sees no more
keys than an indexer selects has none of the latter: all were selected. Beyond that they are a bit for each position up
to the token's own, or the positions, whichever is shorter; both are little-endian.

Shape letters: L layers with experts, I indexers, N tokens, k experts of a token, S keys of a token, B bytes.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from longarc.algos.selection import NO_KEY
from longarc.config.model import GlmMoeDsaConfig, ModelConfig
from longarc.errors import ConfigError, ContractError
from longarc.models.routing import Routing, routes
from longarc.records.sampling import RoutingReplay

Numbers: TypeAlias = npt.NDArray[Any]

_BLOCK_NUMBERS = 1 << 23
"""Bits that are unpacked at a time [bytes]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingShape:
    """Which choices of a token are kept, and how many bytes each takes."""

    num_expert_layers: int
    """0 where experts are not kept."""
    num_chosen: int
    expert_bytes: Literal[1, 2]
    num_indexers: int
    """0 where keys are not kept."""
    num_selected: int
    position_bytes: Literal[2, 4]

    @classmethod
    def of(
        cls, config: ModelConfig, kept: RoutingReplay, *, attention: Literal["dense", "sparse"]
    ) -> "RoutingShape | None":
        """Return the shape of what a model chooses; None where nothing is to be kept.

        Raises:
            ConfigError: the model does not choose what is to be kept.
        """
        if kept == "none":
            return None
        asked = f"{kept!r} of rollout.routing_replay or --records-routing"
        if not routes(config):
            raise ConfigError(
                f"{asked}: the routing of a {config.family} model cannot be recorded or replayed, only that of "
                f"glm_moe_dsa; leave it out"
            )
        assert isinstance(config, GlmMoeDsaConfig)
        num_expert_layers = config.num_hidden_layers - config.first_k_dense_replace
        if num_expert_layers <= 0 and kept == "experts":
            raise ConfigError(
                f"{asked}: the model has no layer with experts (first_k_dense_replace={config.first_k_dense_replace} of "
                f"num_hidden_layers={config.num_hidden_layers}); leave it out"
            )
        if kept == "experts_and_keys" and attention == "dense":
            raise ConfigError(
                f"{asked}: the model attends to every key, so that none are selected; take 'experts', or convert it with "
                f"a dsa stage (longarc serve needs --attention sparse for a Hugging Face directory that was)"
            )
        return cls(
            num_expert_layers=max(0, num_expert_layers),
            num_chosen=config.num_experts_per_tok,
            expert_bytes=1 if config.n_routed_experts <= 1 << 8 else 2,
            num_indexers=len(config.indexed_layers) if kept == "experts_and_keys" else 0,
            num_selected=config.num_selected,
            position_bytes=2 if config.max_position_embeddings <= 1 << 16 else 4,
        )

    @property
    def expert_dtype(self) -> str:
        """Of experts in memory and on their way."""
        return f"<u{self.expert_bytes}"

    @property
    def position_dtype(self) -> str:
        """Of selected positions likewise."""
        return f"<u{self.position_bytes}"

    @property
    def row_bytes(self) -> int:
        """What a token takes beside its rows in a cache [bytes]."""
        experts = self.num_expert_layers * self.num_chosen * self.expert_bytes
        return experts + self.num_indexers * self.num_selected * self.position_bytes

    @property
    def _experts_size(self) -> int:
        return self.num_expert_layers * self.num_chosen * self.expert_bytes

    def blob_bytes(self, position: int) -> int:
        """Return the length of the blob of a token at this position [bytes]."""
        return self._experts_size + self.num_indexers * self._keys_size(position)

    def _keys_size(self, position: int) -> int:
        """Return what the selection of one indexer takes [bytes]."""
        if position < self.num_selected:
            return 0
        return min(position // 8 + 1, self.num_selected * self.position_bytes)

    def _is_bits(self, position: int) -> bool:
        return position // 8 + 1 < self.num_selected * self.position_bytes

    def _block_tokens(self, width: int) -> int:
        return max(1, _BLOCK_NUMBERS // max(1, width * self.num_indexers))

    # To bytes --------------------------------------------------------------------------------

    def encode(self, experts_LNk: Numbers, keys_INS: Numbers, first_position: int) -> list[bytes]:
        """Return the blobs of consecutive tokens.

        Args:
            experts_LNk: of each layer; no layers where they are not kept.
            keys_INS: of each indexer likewise; not read of a token that sees no more keys than S.
            first_position: of the first token.
        """
        num_tokens = experts_LNk.shape[1]
        experts_NLk = np.ascontiguousarray(
            experts_LNk.transpose(1, 0, 2).astype(self.expert_dtype, copy=False)
        )
        experts = [row.tobytes() for row in experts_NLk]
        if not self.num_indexers:
            return experts
        selections = [
            blob
            for start, stop in self._runs(first_position, num_tokens)
            for blob in self._encoded_keys(keys_INS[:, start:stop], first_position + start)
        ]
        return [own + keys for own, keys in zip(experts, selections, strict=True)]

    def _runs(self, first_position: int, num_tokens: int) -> Iterator[tuple[int, int]]:
        """Split consecutive tokens where their keys are written otherwise, and into blocks."""
        start = 0
        while start < num_tokens:
            position, stop = first_position + start, start + 1
            kind = (position < self.num_selected, self._is_bits(position))
            most = start + self._block_tokens(first_position + num_tokens)
            while stop < min(num_tokens, most):
                position = first_position + stop
                if (position < self.num_selected, self._is_bits(position)) != kind:
                    break
                stop += 1
            yield start, stop
            start = stop

    def _encoded_keys(self, keys_INS: Numbers, first_position: int) -> list[bytes]:
        num_tokens = keys_INS.shape[1]
        if first_position < self.num_selected:
            return [b""] * num_tokens
        if not self._is_bits(first_position):
            rows = np.ascontiguousarray(keys_INS.transpose(1, 0, 2)).astype(self.position_dtype)
            return [row.tobytes() for row in rows]
        width = (first_position + num_tokens + 7) // 8 * 8
        bits = np.zeros((self.num_indexers, num_tokens, width), dtype=bool)
        np.put_along_axis(bits, keys_INS.astype(np.int64), values=True, axis=2)
        packed = np.packbits(bits, axis=2, bitorder="little")
        # Bytes of all indexers side by side, so that what a longer neighbour has more is at the end.
        packed_NBI = np.ascontiguousarray(packed.transpose(1, 2, 0))
        return [packed_NBI[i, : (first_position + i) // 8 + 1].tobytes() for i in range(num_tokens)]

    # From bytes ------------------------------------------------------------------------------

    def decode(self, blobs: Sequence[bytes], positions: Sequence[int]) -> Routing:
        """Return the routing of tokens that stand at these positions of their sequences.

        Raises:
            ContractError: a blob has not the length that this model's choices take there.
        """
        for index, (blob, position) in enumerate(zip(blobs, positions, strict=True)):
            if len(blob) != self.blob_bytes(position):
                raise ContractError(
                    f"the recorded routing of packed token {index}, at position {position}, has {len(blob)} bytes, but "
                    f"this model's takes {self.blob_bytes(position)}: it was recorded for another model or with another "
                    f"rollout.routing_replay, or not at all"
                )
        experts, size = None, self._experts_size
        if self.num_expert_layers:
            flat = np.frombuffer(b"".join(blob[:size] for blob in blobs), self.expert_dtype)
            shape = (len(blobs), self.num_expert_layers, self.num_chosen)
            experts = torch.from_numpy(flat.reshape(shape).transpose(1, 0, 2).astype(np.int64))
        if not self.num_indexers:
            return Routing(experts=experts)
        keys_NIS = np.full((len(blobs), self.num_indexers, self.num_selected), NO_KEY, np.int32)
        places = np.asarray(positions)
        self._fill_all(keys_NIS, places)
        is_some: Numbers = places >= self.num_selected
        is_bits = places // 8 + 1 < self.num_selected * self.position_bytes
        self._fill_bits(keys_NIS, blobs, places, np.flatnonzero(is_some & is_bits))
        for index in np.flatnonzero(is_some & ~is_bits).tolist():
            flat = np.frombuffer(blobs[index], self.position_dtype, offset=size)
            keys_NIS[index] = flat.reshape(self.num_indexers, self.num_selected)
        return Routing(
            experts=experts,
            keys=torch.from_numpy(np.ascontiguousarray(keys_NIS.transpose(1, 0, 2))),
        )

    def _fill_all(self, keys_NIS: Numbers, places: Numbers) -> None:
        """Give tokens that see few keys all of them."""
        few = np.flatnonzero(places < self.num_selected)
        every = np.arange(self.num_selected, dtype=np.int32)
        keys_NIS[few] = np.where(every <= places[few, None], every, NO_KEY)[:, None]

    def _fill_bits(
        self, keys_NIS: Numbers, blobs: Sequence[bytes], places: Numbers, indices: Numbers
    ) -> None:
        if not len(indices):
            return
        size, width = self._experts_size, int(places[indices].max()) // 8 + 1
        step = self._block_tokens(8 * width)
        for start in range(0, len(indices), step):
            block = indices[start : start + step]
            whole = width * self.num_indexers
            joined = b"".join(blobs[index][size:].ljust(whole, b"\0") for index in block)
            packed_NBI = np.frombuffer(joined, np.uint8).reshape(-1, width, self.num_indexers)
            bits = np.unpackbits(packed_NBI.transpose(0, 2, 1), axis=2, bitorder="little")
            if (bits.sum(axis=2, dtype=np.int64) != self.num_selected).any():
                raise ContractError(
                    f"a recorded selection names not {self.num_selected} keys, as this model's indexers select: it was "
                    f"recorded for another model, or damaged"
                )
            found = np.flatnonzero(bits.reshape(-1)) % (8 * width)
            keys_NIS[block] = found.reshape(len(block), self.num_indexers, self.num_selected)


class RoutedRows:
    """The choices of every row of a cache, in the memory of this process."""

    def __init__(self, shape: RoutingShape, num_rows: int) -> None:
        """Make room, which the system gives as it is written to.

        Args:
            shape: what is kept of a row.
            num_rows: of the cache.
        """
        self.shape = shape
        self.experts = np.zeros(
            (shape.num_expert_layers, num_rows, shape.num_chosen), shape.expert_dtype
        )
        self.keys = np.zeros(
            (shape.num_indexers, num_rows, shape.num_selected), shape.position_dtype
        )

    @property
    def num_bytes(self) -> int:
        """Memory of all choices [bytes]."""
        return self.experts.nbytes + self.keys.nbytes

    def put(self, rows: Numbers, routing: Routing) -> None:
        """Keep the choices of a pass whose tokens lie in these rows."""
        if self.shape.num_expert_layers and routing.experts is not None:
            self.experts[:, rows] = routing.experts.cpu().numpy().astype(self.experts.dtype)
        if self.shape.num_indexers and routing.keys is not None:
            self.keys[:, rows] = routing.keys.cpu().numpy().astype(self.keys.dtype)

    def copy(self, source: int, target: int, count: int) -> None:
        """Copy the choices of some rows to others."""
        for table in (self.experts, self.keys):
            table[:, target : target + count] = table[:, source : source + count]

    def take(self, rows: Numbers, first_position: int) -> "RoutedTokens":
        """Return a copy of the choices of consecutive tokens, which lie in these rows."""
        return RoutedTokens(
            self.shape,
            self.experts.take(rows, axis=1),
            self.keys.take(rows, axis=1),
            first_position,
        )


@dataclass(frozen=True, slots=True)
class RoutedTokens:
    """The choices of consecutive tokens of one sequence."""

    shape: RoutingShape
    experts: Numbers
    """[L, N, k]."""
    keys: Numbers
    """[I, N, S]."""
    first_position: int


def blobs_of(pieces: Sequence[RoutedTokens]) -> list[bytes]:
    """Return the bytes of tokens, of which each piece goes on where the one before it ends."""
    if not pieces:
        return []
    return pieces[0].shape.encode(
        np.concatenate([piece.experts for piece in pieces], axis=1),
        np.concatenate([piece.keys for piece in pieces], axis=1),
        pieces[0].first_position,
    )
