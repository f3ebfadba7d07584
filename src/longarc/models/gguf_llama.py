"""Llama-type models in GGUF format, rewritten as Hugging Face directories.

llama.cpp rotates neighbouring pairs and for that stores the rows of ``q_proj`` and ``k_proj`` in another order; it is
undone here. Quantised tensors are dequantised to fp32: the numbers stay what the file says they are, and what
quantisation lost stays lost.
"""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from longarc.config.model import LlamaConfig
from longarc.errors import CheckpointError, boundary
from longarc.models.gguf_file import GgufFile
from longarc.models.hf_config import config_to_hf
from longarc.models.hf_files import Outgoing, write_directory
from longarc.models.llama import Llama, head_width

_TOP: Final[Mapping[str, str]] = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}
_LAYER: Final[Mapping[str, str]] = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_ROTATED: Final = ("attn_q", "attn_k")
_SHARD_BYTES: Final = 256_000_000


def convert_gguf(file: GgufFile, target: Path, *, max_shard_bytes: int = _SHARD_BYTES) -> None:
    """Write ``config.json`` and fp32 weights of a model; nothing is written before everything was found right.

    Args:
        file: a model of llama.cpp's architecture ``llama``.
        target: exists.
        max_shard_bytes: the size of a file; there are several, and an index, where one is not enough.

    Raises:
        CheckpointError: the file holds another kind of model, or its tensors are not those of the model that
            its settings describe.
    """
    config = gguf_config(file)
    with torch.device("meta"):
        expected = {name: tuple(t.shape) for name, t in Llama(config).state_dict().items()}
    sources = {name: _gguf_name(name) for name in expected}
    _check(file, expected, sources)
    heads = {
        "attn_q": config.num_attention_heads,
        "attn_k": config.num_key_value_heads,
    }
    outgoing = [
        Outgoing(name, 4 * torch.Size(shape).numel(), partial(_read, file, sources[name], heads))
        for name, shape in expected.items()
    ]
    content = {**config_to_hf(config, dtype="float32"), **_special_ids(file)}
    write_directory(outgoing, content, target, max_shard_bytes=max_shard_bytes)


def gguf_config(file: GgufFile) -> LlamaConfig:
    """Return the shape of the model.

    Raises:
        CheckpointError: another architecture, scaled rotations, or a setting that is missing or wrong.
    """
    kind = file.setting("general.architecture", str)
    if kind != "llama":
        raise CheckpointError(
            f"{file.path} holds a model of architecture {kind!r}; only 'llama' is rewritten"
        )
    scaling = file.setting("llama.rope.scaling.type", str, "none")
    if scaling != "none" or "rope_freqs.weight" in file.shapes:
        raise CheckpointError(
            f"{file.path} scales its rotations (llama.rope.scaling.type={scaling!r}), which is not rewritten; take "
            f"the checkpoint in Hugging Face format"
        )
    hidden = file.setting("llama.embedding_length", int)
    heads = file.setting("llama.attention.head_count", int)
    width = file.setting("llama.attention.key_length", int, 0) or None
    with boundary(CheckpointError, f"the settings of {file.path} describe no model"):
        config = LlamaConfig(
            vocab_size=file.shapes.get("token_embd.weight", (0,))[0],
            hidden_size=hidden,
            num_hidden_layers=file.setting("llama.block_count", int),
            num_attention_heads=heads,
            num_key_value_heads=file.setting("llama.attention.head_count_kv", int, heads),
            head_dim=None if width == hidden / heads else width,
            intermediate_size=file.setting("llama.feed_forward_length", int),
            rope_theta=file.setting("llama.rope.freq_base", float, 1e4),
            rms_norm_eps=file.setting("llama.attention.layer_norm_rms_epsilon", float),
            tie_word_embeddings="output.weight" not in file.shapes,
            max_position_embeddings=file.setting("llama.context_length", int),
        )
    rotated = file.setting("llama.rope.dimension_count", int, head_width(config))
    if rotated != head_width(config):
        raise CheckpointError(
            f"llama.rope.dimension_count={rotated} in {file.path} rotates a part of each head, which is "
            f"{head_width(config)} wide; this family rotates whole heads here"
        )
    return config


def _gguf_name(name: str) -> str:
    parts = name.split(".")
    if parts[1] == "layers":
        return f"blk.{parts[2]}.{_LAYER['.'.join(parts[3:-1])]}.{parts[-1]}"
    return f"{_TOP['.'.join(parts[:-1])]}.{parts[-1]}"


def _check(
    file: GgufFile, expected: Mapping[str, tuple[int, ...]], sources: Mapping[str, str]
) -> None:
    found = file.shapes
    for name, shape in expected.items():
        source = sources[name]
        if source not in found:
            raise CheckpointError(
                f"{file.path} lacks tensor {source!r} of shape {list(shape)}, which becomes {name!r}; copy the "
                f"file again"
            )
        if found[source] != shape:
            raise CheckpointError(
                f"tensor {source!r} of {file.path} has shape {list(found[source])}, but its settings ask for "
                f"{list(shape)}; copy the file again"
            )
    others = sorted(found.keys() - set(sources.values()))
    if others:
        raise CheckpointError(
            f"{file.path} holds {len(others)} tensors that a plain Llama does not have, the first is {others[0]!r} "
            f"of shape {list(found[others[0]])}; take the checkpoint in Hugging Face format"
        )


def _read(file: GgufFile, source: str, heads: Mapping[str, int]) -> Tensor:
    tensor = file.read(source)
    part = source.split(".")[-2]
    return halves_together(tensor, num_heads=heads[part]) if part in _ROTATED else tensor


def halves_together(rows: Tensor, *, num_heads: int) -> Tensor:
    """Return the rows of a projection with the first of all pairs of a head before the second of all.

    llama.cpp has the two rows of each pair next to each other.
    """
    pairs = rows.view(num_heads, -1, 2, *rows.shape[1:])
    return pairs.transpose(1, 2).reshape(rows.shape)


def _special_ids(file: GgufFile) -> dict[str, Any]:
    names = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    keys = {ours: f"tokenizer.ggml.{theirs}_token_id" for ours, theirs in names.items()}
    return {ours: file.setting(key, int) for ours, key in keys.items() if file.has(key)}
