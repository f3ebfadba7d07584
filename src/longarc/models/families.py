"""What the models of each family are made of, read from a Hugging Face ``config.json``.

More families than LongArc builds: the arithmetic of a published config needs no code of its layers.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from pydantic import ValidationError

from longarc.config.settings import problems_of, read_strictly
from longarc.errors import ConfigError
from longarc.models.elders.chatglm_config import glm_config, read_chatglm_config
from longarc.models.hf_fields import check_numbers
from longarc.models.hf_rope import stated_context
from longarc.models.hf_shapes import (
    ExpertShape,
    GlmShape,
    GroupedShape,
    IndexedShape,
    LatentShape,
    LlamaShape,
    MoeGroupedShape,
    Qwen3Shape,
    QwenShape,
    Shape,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Parameters that occur in several copies of one size: a layer's attention, an expert, ..."""

    name: str
    size: int
    """Parameters of one copy."""
    copies: int
    """Copies in the main model."""
    copies_per_token: int
    """Copies of the main model that take part in computing one token; a table look-up is no computation."""
    mtp_copies: int = 0
    """Copies in the layers for multi-token prediction."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextRead:
    """What a token computes for each key in its context."""

    name: str
    flops_per_key: int
    """All layers of the main model together [FLOP]."""
    max_keys: int | None = None
    """Keys a token reads at most [tokens]; None = its whole context."""

    def num_keys(self, context_length: int) -> int:
        """Return how many of ``context_length`` keys a token reads."""
        return context_length if self.max_keys is None else min(context_length, self.max_keys)


@dataclass(frozen=True, slots=True, kw_only=True)
class Anatomy:
    """The parts of a model, and what a token leaves behind and reads."""

    family: str
    parts: tuple[Part, ...]
    num_layers: int
    """Layers of the main model."""
    num_mtp_layers: int
    """Layers for multi-token prediction, stored behind them."""
    num_router_biases: int
    """Buffers that correct the choice of experts; no parameters, and in no count."""
    cache: Mapping[str, int]
    """Numbers that a token leaves in the cache of the main model, by kind; all layers together."""
    mtp_cache: int
    """Numbers that a token leaves in the cache of the layers for multi-token prediction."""
    draft_states: int
    """Numbers of the main model's last state, which a token leaves too where drafts are made while sampling."""
    reads: tuple[ContextRead, ...]
    max_context: int
    """Longest context [tokens]."""


def anatomy_of(raw: Mapping[str, Any]) -> Anatomy:
    """Return what the model of a ``config.json`` is made of.

    Raises:
        ConfigError: the family is not known here, or a field is missing or wrong.
    """
    if raw.get("model_type") == "chatglm":
        raw = glm_config(read_chatglm_config(raw))
    family = _FAMILIES.get(str(raw.get("model_type")))
    if family is None:
        raise ConfigError(
            f"model_type {raw.get('model_type')!r} in config.json cannot be counted; known: "
            f"{', '.join(sorted([*_FAMILIES, 'chatglm']))}"
        )
    shape, anatomy = family
    # A null says the same as a field that is not there: the family's default.
    said = {name: value for name, value in raw.items() if value is not None}
    try:
        read = {name: said[name] for name in shape.model_fields if name in said}
        read_shape = read_strictly(shape, read)
        check_numbers(read)
        found = anatomy(read_shape)
    except ValidationError as error:
        raise ConfigError(
            f"config.json does not describe a model of type {raw['model_type']}: "
            f"{problems_of(error, nulls=raw.keys() - said.keys())}"
        ) from error
    return replace(found, max_context=stated_context(raw, found.max_context))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Attention:
    """One layer's attention."""

    size: int
    cache: Mapping[str, int]
    flops_per_key: int
    num_layer_norms: int = 2
    indexer: "_Indexer | None" = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Indexer:
    """One indexer."""

    size: int
    copies: int
    key_width: int
    flops_per_key: int
    num_selected: int


def _grouped_attention(shape: GroupedShape, *, output_bias: bool = False) -> _Attention:
    queries = shape.num_attention_heads * shape.head_width
    keys = shape.key_heads * shape.head_width
    biases = shape.attention_bias * (queries + 2 * keys + output_bias * shape.hidden_size)
    return _Attention(
        size=2 * shape.hidden_size * (queries + keys) + biases,
        cache={"keys and values": 2 * keys},
        flops_per_key=4 * queries,
    )


def _latent_attention(shape: LatentShape, indexer: _Indexer | None = None) -> _Attention:
    hidden, heads = shape.hidden_size, shape.num_attention_heads
    latent_row = shape.kv_lora_rank + shape.qk_rope_head_dim
    biases = shape.attention_bias * (shape.q_lora_rank + latent_row + hidden)
    size = (
        hidden * shape.q_lora_rank
        + shape.q_lora_rank * heads * (shape.qk_nope_head_dim + shape.qk_rope_head_dim)
        + hidden * latent_row
        + shape.kv_lora_rank * heads * (shape.qk_nope_head_dim + shape.v_head_dim)
        + heads * shape.v_head_dim * hidden
        + (shape.q_lora_rank + shape.kv_lora_rank)  # the norms of both latents
        + biases
    )
    return _Attention(
        size=size,
        cache={"latent rows": latent_row},
        # Absorbed form: a head compares with the whole row and adds up its latent part.
        flops_per_key=2 * heads * (latent_row + shape.kv_lora_rank),
        indexer=indexer,
    )


def _indexer(shape: IndexedShape) -> _Indexer:
    queries = shape.index_n_heads * shape.index_head_dim
    projections = shape.q_lora_rank * queries + shape.hidden_size * (
        shape.index_head_dim + shape.index_n_heads
    )
    return _Indexer(
        size=projections + 2 * shape.index_head_dim,  # a LayerNorm has weight and bias
        copies=shape.num_indexers,
        key_width=shape.index_head_dim,
        flops_per_key=2 * shape.index_n_heads * (shape.index_head_dim + 1),
        num_selected=shape.index_topk,
    )


def _frame(shape: Shape, attention: _Attention, *, mtp: int) -> list[Part]:
    """Return what every decoder has around its feed-forwards."""
    table, layers = shape.vocab_size * shape.hidden_size, shape.num_hidden_layers
    tied = shape.tie_word_embeddings
    parts = [Part(name="embedding", size=table, copies=1, copies_per_token=int(tied))]
    if not tied:
        parts.append(Part(name="output head", size=table, copies=1, copies_per_token=1))
    norms = attention.num_layer_norms * shape.hidden_size
    parts += [
        _everywhere("attention", attention.size, layers, mtp),
        _everywhere("norms of a layer", norms, layers, mtp),
        _everywhere("final norm", shape.hidden_size, 1),
    ]
    if attention.indexer is not None:
        parts.append(_everywhere("indexer", attention.indexer.size, attention.indexer.copies, mtp))
    if mtp:
        # The projection of embedding and hidden state, the norms of both, and the norm before the head.
        joint = 2 * shape.hidden_size * shape.hidden_size + 3 * shape.hidden_size
        parts.append(_everywhere("MTP projection, norms", joint, 0, mtp))
    return parts


def _everywhere(name: str, size: int, copies: int, mtp_copies: int = 0) -> Part:
    """Return a part all of whose copies every token uses."""
    return Part(name=name, size=size, copies=copies, copies_per_token=copies, mtp_copies=mtp_copies)


def _anatomy(
    family: str,
    shape: Shape,
    attention: _Attention,
    feed_forwards: list[Part],
    *,
    mtp: int = 0,
    num_router_biases: int = 0,
) -> Anatomy:
    layers, indexer = shape.num_hidden_layers, attention.indexer
    cache = {kind: width * layers for kind, width in attention.cache.items()}
    mtp_cache = mtp * sum(attention.cache.values())
    reads = [
        ContextRead(
            name="attention",
            flops_per_key=attention.flops_per_key * layers,
            max_keys=None if indexer is None else indexer.num_selected,
        )
    ]
    if indexer is not None:
        cache["index keys"] = indexer.key_width * indexer.copies
        mtp_cache += mtp * indexer.key_width
        reads.append(
            ContextRead(name="indexer", flops_per_key=indexer.flops_per_key * indexer.copies)
        )
    return Anatomy(
        family=family,
        parts=(*_frame(shape, attention, mtp=mtp), *feed_forwards),
        num_layers=layers,
        num_mtp_layers=mtp,
        num_router_biases=num_router_biases,
        cache=cache,
        mtp_cache=mtp_cache,
        draft_states=shape.hidden_size if mtp else 0,
        reads=tuple(reads),
        max_context=shape.max_position_embeddings,
    )


def _dense_parts(shape: Shape, *, biases: int = 0) -> list[Part]:
    size = 3 * shape.hidden_size * shape.intermediate_size + biases
    return [_everywhere("dense feed-forward", size, shape.num_hidden_layers)]


def _expert_parts(shape: ExpertShape) -> list[Part]:
    mtp = shape.num_nextn_predict_layers
    sparse = shape.num_hidden_layers - shape.num_dense_layers
    expert = 3 * shape.hidden_size * shape.moe_intermediate_size
    dense = 3 * shape.hidden_size * shape.intermediate_size
    parts = [_everywhere("dense feed-forward", dense, shape.num_dense_layers)]
    parts.append(
        Part(
            name="routed expert",
            size=expert,
            copies=shape.n_routed_experts * sparse,
            copies_per_token=shape.num_experts_per_tok * sparse,
            mtp_copies=shape.n_routed_experts * mtp,
        )
    )
    if shape.n_shared_experts:
        shared = expert * shape.n_shared_experts
        parts.append(_everywhere("shared experts", shared, sparse, mtp))
    router = shape.n_routed_experts * shape.hidden_size
    parts.append(_everywhere("router", router, sparse, mtp))
    return parts


def _mixture(family: str, shape: ExpertShape, attention: _Attention) -> Anatomy:
    mtp = shape.num_nextn_predict_layers
    num_routers = shape.num_hidden_layers - shape.num_dense_layers + mtp
    return _anatomy(
        family,
        shape,
        attention,
        _expert_parts(shape),
        mtp=mtp,
        num_router_biases=num_routers * shape.n_routed_experts,
    )


def _glm_moe_dsa(shape: IndexedShape) -> Anatomy:
    indexer = _indexer(shape)
    is_shared = indexer.copies < shape.num_hidden_layers
    indexers = "indexers shared between layers" if is_shared else "an indexer in every layer"
    return _mixture(
        f"GLM-5: latent attention, sparse ({indexers}), mixture of experts",
        shape,
        _latent_attention(shape, indexer),
    )


def _glm4_moe_lite(shape: LatentShape) -> Anatomy:
    family = "GLM-4.7-Flash: latent attention, mixture of experts"
    return _mixture(family, shape, _latent_attention(shape))


def _glm4_moe(shape: MoeGroupedShape) -> Anatomy:
    family = "GLM-4.5 to 4.7: grouped-query attention, mixture of experts"
    attention = _grouped_attention(shape)
    head_norms = shape.use_qk_norm * 2 * shape.head_width
    return _mixture(family, shape, replace(attention, size=attention.size + head_norms))


def _glm(shape: GlmShape) -> Anatomy:
    family = "GLM-4-9B, ChatGLM2 and 3: grouped-query attention, dense"
    return _anatomy(family, shape, _grouped_attention(shape), _dense_parts(shape))


def _glm4(shape: GlmShape) -> Anatomy:
    family = "GLM-4-0414 and Z1: grouped-query attention, dense, norms around each part"
    attention = replace(_grouped_attention(shape), num_layer_norms=4)
    return _anatomy(family, shape, attention, _dense_parts(shape))


def _llama(shape: LlamaShape) -> Anatomy:
    family = "Llama: grouped-query attention, dense"
    attention = _grouped_attention(shape, output_bias=True)
    biases = shape.mlp_bias * (2 * shape.intermediate_size + shape.hidden_size)
    return _anatomy(family, shape, attention, _dense_parts(shape, biases=biases))


def _qwen2(shape: QwenShape) -> Anatomy:
    family = "Qwen2: grouped-query attention with biases, dense"
    keys = shape.num_attention_heads + 2 * shape.key_heads
    attention = _grouped_attention(shape.model_copy(update={"attention_bias": False}))
    return _qwen(family, shape, replace(attention, size=attention.size + keys * shape.head_width))


def _qwen3(shape: Qwen3Shape) -> Anatomy:
    family = "Qwen3: grouped-query attention with norms of its heads, dense"
    attention = _grouped_attention(shape, output_bias=True)
    return _qwen(family, shape, replace(attention, size=attention.size + 2 * shape.head_width))


def _qwen(family: str, shape: QwenShape, attention: _Attention) -> Anatomy:
    anatomy = _anatomy(family, shape, attention, _dense_parts(shape))
    windows = shape.num_window_layers
    if not windows:
        return anatomy
    flops, full = attention.flops_per_key, shape.num_hidden_layers - windows
    return replace(
        anatomy,
        reads=(
            ContextRead(name="attention", flops_per_key=flops * full),
            ContextRead(name="window", flops_per_key=flops * windows, max_keys=shape.window),
        ),
    )


_FAMILIES: Mapping[str, tuple[type[Shape], Callable[[Any], Anatomy]]] = {
    "glm_moe_dsa": (IndexedShape, _glm_moe_dsa),
    "glm4_moe_lite": (LatentShape, _glm4_moe_lite),
    "glm4_moe": (MoeGroupedShape, _glm4_moe),
    "glm": (GlmShape, _glm),
    "glm4": (GlmShape, _glm4),
    "llama": (LlamaShape, _llama),
    "qwen2": (QwenShape, _qwen2),
    "qwen3": (Qwen3Shape, _qwen3),
}
