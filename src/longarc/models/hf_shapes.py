"""The fields of a Hugging Face ``config.json`` on which sizes depend, by kind of model.

Unlike ``config.model`` these also describe models that LongArc does not build; names are those of the file.
"""

from collections.abc import Sized
from typing import Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveInt,
    model_validator,
)

from longarc.config.index_share import IndexerKind, indexer_kinds
from longarc.config.model import MAX_LAYERS


class Shape(BaseModel):
    """Fields that all families have; a config.json holds many more that nothing here depends on."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    vocab_size: PositiveInt
    hidden_size: PositiveInt
    num_hidden_layers: int = Field(gt=0, le=MAX_LAYERS)
    num_attention_heads: PositiveInt
    intermediate_size: PositiveInt
    max_position_embeddings: PositiveInt
    tie_word_embeddings: bool = False
    attention_bias: bool = False


class GroupedShape(Shape):
    """Grouped-query attention."""

    num_key_value_heads: PositiveInt | None = None
    head_dim: PositiveInt | None = None

    @model_validator(mode="after")
    def _heads_fit(self) -> "GroupedShape":
        if self.head_dim is None and self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size={self.hidden_size} is not a multiple of num_attention_heads="
                f"{self.num_attention_heads}; the config needs head_dim"
            )
        return self

    @property
    def key_heads(self) -> int:
        """Key and value heads."""
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def head_width(self) -> int:
        """Width of one head."""
        return self.head_dim or self.hidden_size // self.num_attention_heads


class LlamaShape(GroupedShape):
    """Llama: ``attention_bias`` also means one behind attention."""

    mlp_bias: bool = False


class QwenShape(GroupedShape):
    """Qwen2 and Qwen3, whose later layers may attend to a window."""

    use_sliding_window: bool = False
    sliding_window: PositiveInt | None = 4096
    max_window_layers: NonNegativeInt = 28
    layer_types: tuple[Literal["full_attention", "sliding_attention"], ...] | None = None
    """What attends in each layer; without it, layers from max_window_layers on attend to a window, if any does."""

    @model_validator(mode="after")
    def _kinds_are_whole(self) -> "QwenShape":
        _check_length("layer_types", self.layer_types, self.num_hidden_layers)
        return self

    @property
    def window(self) -> int | None:
        """Keys that a windowed layer reads [tokens]; None where there is no window."""
        return self.sliding_window if self.use_sliding_window else None

    @property
    def num_window_layers(self) -> int:
        """Layers that attend to a window."""
        if self.window is None:
            return 0
        if self.layer_types is not None:
            return self.layer_types.count("sliding_attention")
        return max(0, self.num_hidden_layers - self.max_window_layers)


class Qwen3Shape(QwenShape):
    """Qwen3, whose heads have a width of their own."""

    head_dim: PositiveInt | None = 128


class GlmShape(GroupedShape):
    """The dense GLM-4 models, which have biases unless they say otherwise."""

    attention_bias: bool = True


class ExpertShape(Shape):
    """A mixture of experts behind leading dense layers."""

    moe_intermediate_size: PositiveInt
    n_routed_experts: PositiveInt
    num_experts_per_tok: PositiveInt
    n_shared_experts: NonNegativeInt = 1
    first_k_dense_replace: NonNegativeInt | None = None
    moe_layer_freq: Literal[1] = 1
    mlp_layer_types: tuple[Literal["dense", "sparse"], ...] | None = None
    """Written by transformers, in some families instead of ``first_k_dense_replace``."""
    num_nextn_predict_layers: NonNegativeInt = 0
    """Layers for multi-token prediction."""

    @model_validator(mode="after")
    def _layers_are_said(self) -> "ExpertShape":
        if self.first_k_dense_replace is None and self.mlp_layer_types is None:
            raise ValueError(
                "neither first_k_dense_replace nor mlp_layer_types says which layers have experts"
            )
        _check_length("mlp_layer_types", self.mlp_layer_types, self.num_hidden_layers)
        if self.num_experts_per_tok > self.n_routed_experts:
            raise ValueError(
                f"num_experts_per_tok={self.num_experts_per_tok} exceeds n_routed_experts="
                f"{self.n_routed_experts}"
            )
        return self

    @property
    def num_dense_layers(self) -> int:
        """Layers of the main model without experts."""
        if self.mlp_layer_types is not None:
            return self.mlp_layer_types.count("dense")
        return min(self.first_k_dense_replace or 0, self.num_hidden_layers)


class LatentShape(ExpertShape):
    """Multi-head latent attention."""

    q_lora_rank: PositiveInt
    kv_lora_rank: PositiveInt
    qk_nope_head_dim: PositiveInt
    qk_rope_head_dim: PositiveInt
    v_head_dim: PositiveInt


class IndexedShape(LatentShape):
    """Latent attention over the keys that an indexer selects."""

    index_n_heads: PositiveInt
    index_head_dim: PositiveInt
    index_topk: PositiveInt
    index_topk_freq: PositiveInt = 1
    index_skip_topk_offset: NonNegativeInt = 2
    index_topk_pattern: str | None = Field(None, pattern="^[FS]+$")
    indexer_types: tuple[IndexerKind, ...] | None = None

    @model_validator(mode="after")
    def _patterns_are_whole(self) -> "IndexedShape":
        _check_length("indexer_types", self.indexer_types, self.num_hidden_layers)
        _check_length("index_topk_pattern", self.index_topk_pattern, self.num_hidden_layers)
        return self

    @property
    def num_indexers(self) -> int:
        """Layers with an indexer of their own; the others reuse the selection of the last such layer."""
        kinds = indexer_kinds(
            self.num_hidden_layers,
            frequency=self.index_topk_freq,
            offset=self.index_skip_topk_offset,
            pattern=self.index_topk_pattern,
            types=self.indexer_types,
        )
        return kinds.count("full")


class MoeGroupedShape(GroupedShape, ExpertShape):
    """Grouped-query attention and a mixture of experts."""

    use_qk_norm: bool = False


def _check_length(name: str, pattern: Sized | None, num_layers: int) -> None:
    if pattern is not None and len(pattern) != num_layers:
        raise ValueError(
            f"{name} describes {len(pattern)} layers, but num_hidden_layers={num_layers}"
        )
