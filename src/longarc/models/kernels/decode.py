"""A decoder's incremental forward as one native call per step: packed weights, blocked cache, all layers.

The eager twin is ``Decoder.extend`` over a ``PagedCache``. Weights are packed again when they changed.
"""

import copy
import ctypes
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
from jaxtyping import Int
from torch import Tensor

from longarc.config.model import ComputeDtype, GlmMoeDsaConfig, LlamaConfig
from longarc.errors import ContractError
from longarc.models.cache import CacheShape
from longarc.models.kernels import structs
from longarc.models.kernels.memory import Arena
from longarc.models.kernels.native import check_ids, native_for, required
from longarc.models.kernels.paged_tables import BlockedPagedCache, Table
from longarc.models.kernels.steps import Drawn, Draws, Interrupt
from longarc.models.rope import latent_softmax_scale
from longarc.models.routed_rows import RoutingShape

Weights: TypeAlias = Mapping[str, Tensor]
"""Parameters and buffers by their Hugging Face names; norms are read in place, matrices are packed."""


class NativeDecoder(BlockedPagedCache, ABC):
    """A paged cache that also runs new tokens of its sequences through all layers."""

    _family: str
    """Prefix of the names of its native functions."""

    def __init__(
        self,
        weights: Weights,
        angles: tuple[Tensor, Tensor],
        tables: Mapping[str, Table],
        shape: CacheShape,
        *,
        num_layers: int,
        compute_dtype: ComputeDtype = "float32",
    ) -> None:
        self._library = required()
        self._compute_dtype: ComputeDtype = compute_dtype
        super().__init__(tables, shape, num_layers=num_layers, lanes=self._library.lanes)
        self._weights = dict(weights)
        self._angles = angles
        self._num_layers = num_layers
        self._state: list[int] = []
        self._arena = Arena()
        self._output = torch.empty(0)
        self._layers: ctypes.Array[Any]
        self._fresh_layers()

    def under(self, weights: Weights) -> "NativeDecoder":
        """Return the same rows with packed weights of its own; nothing is packed before ``prepare``."""
        other = copy.copy(self)
        other._weights = dict(weights)
        other._state = []
        return other

    def prepare(self) -> None:
        """Pack the weights if they changed."""
        self._fresh_layers()

    def hidden(
        self,
        token_ids: Tensor,
        slots: Sequence[int],
        starts: Sequence[int],
        counts: Sequence[int],
        *,
        is_sparse: bool,
        ends_only: bool = False,
    ) -> Tensor:
        """Write the new tokens into the cache and return their final hidden states.

        Args:
            token_ids: sequence after sequence.
            slots: slot of each sequence.
            starts: position of each sequence's first new token.
            counts: new tokens of each sequence.
            is_sparse: attend to the indexer's selection only.
            ends_only: return the last new token of each sequence alone, and spare the rest the last layer.
        """
        layers = self._fresh_layers()
        slots_N, positions_N = rows_of(slots, starts, counts)
        tokens_N = token_ids.contiguous()
        hidden = self.new_states(len(tokens_N))
        rows = self._row_struct(tokens_N, slots_N, positions_N, hidden)
        # A row that is spared the last layer is not routed there.
        rows.ends_only = ends_only and self.routed is None
        self._library.call_structs(f"{self._family}_rows", self._shape(is_sparse), layers, rows)
        return hidden[torch.tensor(counts).cumsum(0) - 1] if ends_only else hidden

    def steps(
        self,
        token_ids: Int[Tensor, " B"],
        slots: Sequence[int],
        starts: Sequence[int],
        draws: Draws,
        interrupt: Interrupt,
        *,
        is_sparse: bool,
    ) -> Drawn:
        """Append one token to each sequence, draw the next from it, append that one, and so on.

        Ends after the last step of ``draws``, after one that drew a stop id or from logits that were not
        finite, or when interrupted; makes one step at least.

        Args:
            token_ids: the first new token of each sequence.
            slots: slot of each sequence.
            starts: position of each sequence's first new token.
            draws: how tokens are drawn.
            interrupt: set from another thread, it ends the call after its current step.
            is_sparse: attend to the indexer's selection only.

        Raises:
            ContractError: the tokens do not fit the cache, or an id is not in the vocabulary.
        """
        layers = self._fresh_layers()
        vocab = self._output_weight().shape[0]
        check_ids(token_ids, vocab)
        max_steps, num_rows = draws.uniforms.shape
        self.check(list(slots), list(starts), [max_steps] * num_rows)
        stop_ids, stop_ends = draws.stops()
        tokens_B, slots_B, starts_B = (
            token_ids.contiguous(),
            torch.tensor(slots),
            torch.tensor(starts),
        )
        hidden = self.new_states(num_rows)
        tokens_SB = torch.empty(max_steps, num_rows, dtype=torch.long)
        logprobs_SB = torch.empty(max_steps, num_rows)
        finite_B = torch.empty(num_rows, dtype=torch.long)
        temperatures_B, uniforms_SB = draws.temperatures.contiguous(), draws.uniforms.contiguous()
        steps = structs.Steps(
            max_steps=max_steps,
            vocab=vocab,
            interrupt=interrupt.address,
            **structs.addresses(
                {
                    "output": self._output,
                    "temperatures": temperatures_B,
                    "uniforms": uniforms_SB,
                    "stop_ids": stop_ids,
                    "stop_ends": stop_ends,
                    "tokens": tokens_SB,
                    "logprobs": logprobs_SB,
                    "is_finite": finite_B,
                }
            ),
        )
        self._library.call_structs(
            f"{self._family}_steps",
            self._shape(is_sparse),
            layers,
            self._row_struct(tokens_B, slots_B, starts_B, hidden),
            steps,
        )
        made = steps.num_steps
        return Drawn(tokens_SB[:made], logprobs_SB[:made], finite_B.bool())

    def new_states(self, num_rows: int) -> Tensor:
        """Return room for the final hidden states of as many rows."""
        return torch.empty(num_rows, self._weights["model.embed_tokens.weight"].shape[1])

    def _row_struct(
        self, tokens: Tensor, slots: Tensor, positions: Tensor, hidden: Tensor
    ) -> structs.Rows:
        return structs.Rows(
            num=len(tokens),
            slot_pages=self.shape.slot_pages,
            page_shift=self.shape.page_tokens.bit_length() - 1,
            fp8_rows=bool(self.rounding),
            **structs.addresses(
                {
                    "tokens": tokens,
                    "slots": slots,
                    "positions": positions,
                    "pages": self.page_table,
                    "embedding": self._weights["model.embed_tokens.weight"],
                    "cos": self._angles[0],
                    "sin": self._angles[1],
                    "final_norm": self._weights["model.norm.weight"],
                    "hidden": hidden,
                }
            ),
        )

    def logits(self, hidden: Tensor) -> Tensor:
        """Project final hidden states to the vocabulary."""
        self._fresh_layers()
        weight = self._output_weight()
        logits = torch.empty(len(hidden), weight.shape[0])
        self._library.call(
            "packed_product",
            *(len(hidden), *weight.shape, hidden.contiguous(), self._output),
            *(self._compute_dtype == "bfloat16", logits, torch.get_num_threads()),
        )
        return logits

    def _output_weight(self) -> Tensor:
        tied = self._weights["model.embed_tokens.weight"]
        return self._weights.get("lm_head.weight", tied).detach()

    @abstractmethod
    def _shape(self, is_sparse: bool) -> ctypes.Structure:
        """Return the sizes."""

    @abstractmethod
    def _pack_layers(self) -> ctypes.Array[Any]:
        """Pack the weights of all layers."""

    def _fresh_layers(self) -> ctypes.Array[Any]:
        # Flat lists of integers: this runs in every step, and tuples would wake the garbage collector.
        weights = self._weights.values()
        state = [w._version for w in weights]
        state.extend(map(Tensor.data_ptr, weights))
        if state != self._state:
            if not native_for(*self._weights.values()):
                raise ContractError(
                    "the model's weights are no longer fp32 on the CPU; make a new cache after moving it"
                )
            self._arena = Arena()
            self._layers = self._pack_layers()
            self._output = self._packed(self._output_weight())
            self._state = state
        return self._layers

    def _weight(self, layer: int, name: str) -> Tensor:
        return self._weights[f"model.layers.{layer}.{name}"].detach()

    def _pack(self, *weights: Tensor) -> int:
        """Pack weights that share their input into one, and return its address."""
        return self._packed(torch.cat(weights)).data_ptr()

    def _packed(self, weight: Tensor) -> Tensor:
        return self._library.packed(weight, self._arena, compute_dtype=self._compute_dtype)

    def _pack_each(self, weights: Sequence[Tensor]) -> int:
        """Pack weights one after another, and return the address of the first."""
        packed = torch.cat([self._library.packed(weight) for weight in weights])
        return self._arena.take(len(packed)).copy_(packed).data_ptr()

    def _dense(self, layer: int, prefix: str, suffix: str = "") -> dict[str, int]:
        gate, up, down = (
            self._weight(layer, f"{prefix}.{name}_proj.weight") for name in ("gate", "up", "down")
        )
        return {
            f"{suffix}gate_up": self._pack(gate, up),
            f"{suffix}down": self._pack(down),
            f"{suffix}width": gate.shape[0],
        }


class NativeLlama(NativeDecoder):
    """The Llama-type decoder."""

    _family = "llama"

    def __init__(
        self,
        weights: Weights,
        angles: tuple[Tensor, Tensor],
        config: LlamaConfig,
        shape: CacheShape,
    ) -> None:
        self._config = config
        self._dim = config.head_dim or config.hidden_size // config.num_attention_heads
        heads = config.num_key_value_heads
        super().__init__(
            weights,
            angles,
            {"keys": Table(heads, self._dim, True), "values": Table(heads, self._dim, False)},
            shape,
            num_layers=config.num_hidden_layers,
            compute_dtype=config.compute_dtype,
        )

    def _shape(self, is_sparse: bool) -> ctypes.Structure:
        config = self._config
        return structs.LlamaShape(
            num_layers=config.num_hidden_layers,
            hidden=config.hidden_size,
            num_heads=config.num_attention_heads,
            num_key_heads=config.num_key_value_heads,
            dim=self._dim,
            width=config.intermediate_size,
            is_bf16=self._compute_dtype == "bfloat16",
            eps=config.rms_norm_eps,
            scale=float(self._dim) ** -0.5,
        )

    def _pack_layers(self) -> ctypes.Array[Any]:
        layers: ctypes.Array[Any] = (structs.LlamaLayer * self._num_layers)()
        for i in range(self._num_layers):
            q, k, v, o = (self._weight(i, f"self_attn.{name}_proj.weight") for name in "qkvo")
            layers[i] = structs.LlamaLayer(
                input_norm=self._weight(i, "input_layernorm.weight").data_ptr(),
                qkv=self._pack(q, k, v),
                output=self._pack(o),
                post_norm=self._weight(i, "post_attention_layernorm.weight").data_ptr(),
                **self._extras(i),
                **{
                    name: self._pack(self._weight(i, f"mlp.{name}_proj.weight"))
                    for name in ("gate", "up", "down")
                },
                **structs.addresses(self.layer(i)),
            )
        return layers

    def _extras(self, layer: int) -> dict[str, int]:
        """Return the addresses of what not every model has: biases, and norms of queries and keys."""
        extras: dict[str, int] = {}
        if self._config.attention_bias != "none":
            biases = [self._weight(layer, f"self_attn.{name}_proj.bias") for name in "qkv"]
            # One behind the other, as their projections are packed; read in place they would not be.
            joined = self._arena.take(sum(len(bias) for bias in biases))
            extras["qkv_bias"] = joined.copy_(torch.cat(biases)).data_ptr()
        if self._config.attention_bias == "all":
            extras["output_bias"] = self._weight(layer, "self_attn.o_proj.bias").data_ptr()
        if self._config.qk_norm:
            for name in ("q_norm", "k_norm"):
                extras[name] = self._weight(layer, f"self_attn.{name}.weight").data_ptr()
        return extras


class NativeGlmMoeDsa(NativeDecoder):
    """The GLM-5 family."""

    _family = "mla"

    def __init__(
        self,
        weights: Weights,
        angles: tuple[Tensor, Tensor],
        config: GlmMoeDsaConfig,
        shape: CacheShape,
    ) -> None:
        self._config = config
        super().__init__(
            weights, angles, self._tables_of(config), shape, num_layers=self._num_layers_of(config)
        )

    def keep_routing(self, shape: RoutingShape) -> None:
        """From now on keep what each new token is routed to; see ``PagedCache``."""
        super().keep_routing(shape)
        self._state = []  # the layers have to be told where

    @staticmethod
    def _num_layers_of(config: GlmMoeDsaConfig) -> int:
        return config.num_hidden_layers

    @staticmethod
    def _tables_of(config: GlmMoeDsaConfig) -> dict[str, Table]:
        return {
            "latents": Table(1, config.kv_lora_rank + config.qk_rope_head_dim, False),
            "index_keys": Table(1, config.index_head_dim, True, config.indexed_layers),
        }

    def _shape(self, is_sparse: bool) -> ctypes.Structure:
        config = self._config
        latent_eps = config.latent_norm_eps
        return structs.MlaShape(
            num_layers=config.num_hidden_layers,
            hidden=config.hidden_size,
            num_heads=config.num_attention_heads,
            q_rank=config.q_lora_rank,
            latent=config.kv_lora_rank,
            nope=config.qk_nope_head_dim,
            rope=config.qk_rope_head_dim,
            value=config.v_head_dim,
            index_heads=config.index_n_heads,
            index_dim=config.index_head_dim,
            index_topk=config.num_selected,
            is_sparse=is_sparse,
            **self._routing_sizes(),
            eps=config.rms_norm_eps,
            latent_eps=config.rms_norm_eps if latent_eps is None else latent_eps,
            index_eps=1e-6,
            scale=latent_softmax_scale(
                config.qk_nope_head_dim + config.qk_rope_head_dim, config.rope_scaling
            ),
            index_scale=float(config.index_n_heads * config.index_head_dim) ** -0.5,
        )

    def _pack_layers(self) -> ctypes.Array[Any]:
        layers: ctypes.Array[Any] = (structs.MlaLayer * self._num_layers)()
        for i in range(self._num_layers):
            layers[i] = structs.MlaLayer(
                **self._attention(i),
                feed_forward=structs.FeedForward(**self._feed_forward(i)),
                **structs.addresses(self._rows_of_layer(i)),
                **self._routing_of_layer(i),
            )
        return layers

    def _routing_sizes(self) -> dict[str, int]:
        if self.routed is None:
            return {}
        shape = self.routed.shape
        return {"routed_bytes": shape.expert_bytes, "selected_bytes": shape.position_bytes}

    def _routing_of_layer(self, layer: int) -> dict[str, int]:
        """Return where a layer writes what it routes to; the MTP layer, whose drafts nobody replays, writes nothing."""
        if self.routed is None or layer >= self._config.num_hidden_layers:
            return {}
        places: dict[str, int] = {}
        shape, indexed = self.routed.shape, self._config.indexed_layers
        if shape.num_expert_layers and self._has_experts(layer):
            place = layer - self._config.first_k_dense_replace
            places["routed"] = self.routed.experts[place].ctypes.data
        if shape.num_indexers and layer in indexed:
            places["selected"] = self.routed.keys[indexed.index(layer)].ctypes.data
        return places

    def _rows_of_layer(self, layer: int) -> dict[str, Tensor]:
        return self.layer(layer)

    def _attention(self, layer: int) -> dict[str, int]:
        config = self._config
        norms = {
            "input_norm": "input_layernorm.weight",
            "q_norm": "self_attn.q_a_layernorm.weight",
            "kv_norm": "self_attn.kv_a_layernorm.weight",
            "post_norm": "post_attention_layernorm.weight",
        }
        inputs, queries = ["q_a_proj", "kv_a_proj_with_mqa"], ["q_b_proj"]
        if self._has_indexer(layer):
            norms["index_norm_weight"] = "self_attn.indexer.k_norm.weight"
            norms["index_norm_bias"] = "self_attn.indexer.k_norm.bias"
            inputs += ["indexer.wk", "indexer.weights_proj"]
            queries += ["indexer.wq_b"]
        kv_b, output = self._projections(layer, ["kv_b_proj", "o_proj"])
        absorb = kv_b.view(config.num_attention_heads, -1, config.kv_lora_rank)
        key_absorb, value_absorb = torch.split(
            absorb, [config.qk_nope_head_dim, config.v_head_dim], dim=1
        )
        return {
            **structs.addresses({key: self._weight(layer, name) for key, name in norms.items()}),
            "input": self._pack(*self._projections(layer, inputs)),
            "query": self._pack(*self._projections(layer, queries)),
            "key_absorb": self._pack_each(key_absorb.mT.unbind()),
            "value_absorb": self._pack_each(value_absorb.unbind()),
            "output": self._pack(output),
        }

    def _has_indexer(self, layer: int) -> bool:
        return self._config.indexer_kinds[layer] == "full"

    def _has_experts(self, layer: int) -> bool:
        return layer >= self._config.first_k_dense_replace

    def _projections(self, layer: int, names: Sequence[str]) -> list[Tensor]:
        return [self._weight(layer, f"self_attn.{name}.weight") for name in names]

    def _feed_forward(self, layer: int) -> dict[str, int | float]:
        config = self._config
        if not self._has_experts(layer):
            return dict(self._dense(layer, "mlp"))
        shared = (
            self._dense(layer, "mlp.shared_experts", "shared_") if config.n_shared_experts else {}
        )
        return {
            "gate_up": self._pack_each(self._weight(layer, "mlp.experts.gate_up_proj").unbind()),
            "down": self._pack_each(self._weight(layer, "mlp.experts.down_proj").unbind()),
            "router": self._pack(self._weight(layer, "mlp.gate.weight")),
            "router_bias": self._weight(layer, "mlp.gate.e_score_correction_bias").data_ptr(),
            "num_experts": config.n_routed_experts,
            "num_chosen": config.num_experts_per_tok,
            "width": config.moe_intermediate_size,
            "normalise": config.norm_topk_prob,
            "scale": config.routed_scaling_factor,
            **shared,
        }


def rows_of(
    slots: Sequence[int], starts: Sequence[int], counts: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Return slot and position of every new token."""
    if max(counts) == 1:
        return torch.tensor(slots), torch.tensor(starts)
    counts_S = torch.tensor(counts)
    slots_N = torch.repeat_interleave(torch.tensor(slots), counts_S)
    shift_S = torch.tensor(starts) - (counts_S.cumsum(0) - counts_S)
    return slots_N, torch.arange(len(slots_N)) + torch.repeat_interleave(shift_S, counts_S)
