"""The structures of ``cpu/new_rows.h``, ``llama.h``, ``mla.h``, ``steps.h``, ``draft.h`` and ``rounds.h`` in ctypes: same
names, same order, same types.
"""

import ctypes
from typing import ClassVar, TypeAlias

from torch import Tensor

_CField: TypeAlias = tuple[
    str,
    type[ctypes.Structure | ctypes.c_void_p | ctypes.c_int64 | ctypes.c_float | ctypes.c_double],
]


def _pointers(names: str) -> list[_CField]:
    return [(name, ctypes.c_void_p) for name in names.split()]


def _integers(names: str) -> list[_CField]:
    return [(name, ctypes.c_int64) for name in names.split()]


def _reals(names: str) -> list[_CField]:
    return [(name, ctypes.c_float) for name in names.split()]


class Rows(ctypes.Structure):
    """The new tokens of one call."""

    _fields_: ClassVar[list[_CField]] = [
        *_pointers("tokens slots positions pages"),
        *_integers("num slot_pages page_shift"),
        *_pointers("embedding cos sin final_norm hidden"),
        *_integers("ends_only fp8_rows"),
    ]


class Steps(ctypes.Structure):
    """How tokens are drawn in a call of several steps, and where they go."""

    _fields_: ClassVar[list[_CField]] = [
        *_integers("max_steps vocab"),
        *_pointers("output temperatures uniforms stop_ids stop_ends interrupt"),
        *_pointers("tokens logprobs is_finite"),
        *_integers("num_steps"),
    ]


class FeedForward(ctypes.Structure):
    """Weights and sizes of one feed-forward, dense or experts."""

    _fields_: ClassVar[list[_CField]] = [
        *_pointers("gate_up down router router_bias shared_gate_up shared_down"),
        *_integers("num_experts num_chosen width shared_width normalise"),
        *_reals("scale"),
    ]


class LlamaLayer(ctypes.Structure):
    """Weights and cache of one layer of a Llama-type decoder."""

    _fields_: ClassVar[list[_CField]] = [
        *_pointers("input_norm qkv output post_norm qkv_bias output_bias q_norm k_norm"),
        *_pointers("gate up down keys values"),
    ]


class LlamaShape(ctypes.Structure):
    """Sizes of a Llama-type decoder."""

    _fields_: ClassVar[list[_CField]] = [
        *_integers("num_layers hidden num_heads num_key_heads dim width is_bf16"),
        *_reals("eps scale"),
    ]


class MlaLayer(ctypes.Structure):
    """Weights and cache of one layer of the GLM-5 family."""

    _fields_: ClassVar[list[_CField]] = [
        *_pointers("input_norm input q_norm kv_norm query key_absorb value_absorb output"),
        *_pointers("index_norm_weight index_norm_bias post_norm"),
        ("feed_forward", FeedForward),
        *_pointers("latents index_keys routed selected"),
    ]


class MlaShape(ctypes.Structure):
    """Sizes of a decoder of the GLM-5 family."""

    _fields_: ClassVar[list[_CField]] = [
        *_integers("num_layers hidden num_heads q_rank latent nope rope value"),
        *_integers("index_heads index_dim index_topk is_sparse routed_bytes selected_bytes"),
        *_reals("eps latent_eps index_eps scale index_scale"),
    ]


class Draft(ctypes.Structure):
    """What the MTP layer has besides a layer's own weights."""

    _fields_: ClassVar[list[_CField]] = [
        *_pointers("token_norm state_norm joint head_norm states"),
        *_integers("feeds_normed advances"),
    ]


class Depth(ctypes.Structure):
    """One depth of drafts."""

    _fields_: ClassVar[list[_CField]] = [
        *_integers("depth"),
        *_pointers("turned fed hidden selected"),
    ]


class Rounds(ctypes.Structure):
    """How tokens are drafted and drawn in a call of several rounds, and where they go."""

    _fields_: ClassVar[list[_CField]] = [
        *_integers("max_rounds num_drafts vocab"),
        ("least_probability", ctypes.c_double),
        *_pointers("output draft_output temperatures seeds num_drawn budgets due"),
        *_pointers("stop_ids stop_ends interrupt"),
        *_pointers("tokens logprobs counts is_finite drafted accepted"),
    ]


def addresses(tensors: dict[str, Tensor]) -> dict[str, int]:
    """Return the addresses of tensors by name; the caller keeps the tensors alive."""
    return {name: tensor.data_ptr() for name, tensor in tensors.items()}
