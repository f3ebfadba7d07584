"""Tensors of ChatGLM2, ChatGLM3 and GLM-4-9B checkpoints under the names of ``GlmForCausalLM``.

Both rotate neighbouring pairs in the first half of a head, and both put the gate before the other half of the
fused feed-forward. What differs are names, and that queries, keys and values are one matrix::

    query_key_value rows   [ heads x width | groups x width | groups x width ]   ->  q_proj, k_proj, v_proj

Tensors keep their dtype. Names and shapes come first, so that a checkpoint can be read tensor by tensor.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate, pairwise

from torch import Tensor

from longarc.errors import CheckpointError
from longarc.models.elders.chatglm_config import ChatGlmConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class GlmTensor:
    """A tensor of ``GlmForCausalLM``: some or all rows of one of the checkpoint."""

    name: str
    source: str
    """Name in the checkpoint."""
    rows: tuple[int, int]
    """The first, and the one behind the last."""
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    def part_of(self, source: Tensor) -> Tensor:
        """Return the rows as a view."""
        return source[slice(*self.rows)]


def glm_state_dict(config: ChatGlmConfig, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors under the names of ``GlmForCausalLM``, as views that share the memory of those given.

    Raises:
        CheckpointError: as ``glm_tensors``.
    """
    found = glm_tensors(config, {name: tuple(tensor.shape) for name, tensor in tensors.items()})
    return {tensor.name: tensor.part_of(tensors[tensor.source]) for tensor in found}


def glm_tensors(config: ChatGlmConfig, given: Mapping[str, tuple[int, ...]]) -> list[GlmTensor]:
    """Return all tensors of ``GlmForCausalLM`` by where they are in a checkpoint, in its order.

    Args:
        config: of the checkpoint.
        given: shape of each of its tensors.

    Raises:
        CheckpointError: a tensor is missing, has another shape, or belongs to something that would be
            lost (a quantised checkpoint, a trained prefix).
    """
    shapes = _shapes(config)
    # The table of frequencies is a buffer that both sides compute.
    left = {name for name in given if not name.endswith("rotary_pos_emb.inv_freq")}
    missing, unexpected = sorted(shapes.keys() - left), sorted(left - shapes.keys())
    if missing:
        raise CheckpointError(
            f"the checkpoint lacks {len(missing)} tensors of its config, the first is {missing[0]!r}; merge "
            f"all of its shards, and take the config.json beside them"
        )
    if unexpected:
        raise CheckpointError(
            f"the checkpoint holds {len(unexpected)} tensors that would be lost, the first is "
            f"{unexpected[0]!r}; convert the unquantised checkpoint without a trained prefix"
        )
    for name, shape in shapes.items():
        if given[name] != shape:
            raise CheckpointError(
                f"tensor {name!r} has shape {list(given[name])}, but its config says "
                f"{list(shape)}; take the config.json beside the checkpoint"
            )
    return [
        GlmTensor(name=new_name, source=name, rows=(first, end), shape=(end - first, *shape[1:]))
        for name, shape in shapes.items()
        for new_name, (first, end) in _renamed(config, name, shape[0])
    ]


_QKV = "self_attention.query_key_value"
_OUTER = {
    "transformer.embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "transformer.encoder.final_layernorm.weight": "model.norm.weight",
    "transformer.output_layer.weight": "lm_head.weight",
}
_IN_LAYER = {
    "input_layernorm.weight": "input_layernorm.weight",
    "self_attention.dense.weight": "self_attn.o_proj.weight",
    "post_attention_layernorm.weight": "post_attention_layernorm.weight",
    "mlp.dense_h_to_4h.weight": "mlp.gate_up_proj.weight",
    "mlp.dense_4h_to_h.weight": "mlp.down_proj.weight",
}
_LAYERS = "transformer.encoder.layers."


def _rows(config: ChatGlmConfig) -> tuple[int, int, int]:
    """Return how many rows of the fused matrix are queries, keys and values."""
    keys = config.multi_query_group_num * config.kv_channels
    return config.num_attention_heads * config.kv_channels, keys, keys


def _shapes(config: ChatGlmConfig) -> dict[str, tuple[int, ...]]:
    """Return name and shape of every tensor of a checkpoint."""
    hidden, inner = config.hidden_size, config.ffn_hidden_size
    table = (config.padded_vocab_size, hidden)
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        f"{_QKV}.weight": (sum(_rows(config)), hidden),
        "self_attention.dense.weight": (hidden, _rows(config)[0]),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.dense_h_to_4h.weight": (2 * inner, hidden),
        "mlp.dense_4h_to_h.weight": (hidden, inner),
    }
    if config.add_qkv_bias:
        layer[f"{_QKV}.bias"] = (sum(_rows(config)),)
    outer: dict[str, tuple[int, ...]] = dict(zip(_OUTER, (table, (hidden,), table), strict=True))
    return outer | {
        f"{_LAYERS}{index}.{name}": shape
        for index in range(config.num_layers)
        for name, shape in layer.items()
    }


def _renamed(
    config: ChatGlmConfig, name: str, num_rows: int
) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yield what becomes of a tensor: new names, and which rows each is."""
    if name in _OUTER:
        yield _OUTER[name], (0, num_rows)
        return
    index, _, inner = name.removeprefix(_LAYERS).partition(".")
    layer = f"model.layers.{index}"
    if inner in _IN_LAYER:
        yield f"{layer}.{_IN_LAYER[inner]}", (0, num_rows)
        return
    kind = inner.removeprefix(f"{_QKV}.")
    ranges = pairwise(accumulate(_rows(config), initial=0))
    for projection, rows in zip(("q_proj", "k_proj", "v_proj"), ranges, strict=True):
        yield f"{layer}.self_attn.{projection}.{kind}", rows
