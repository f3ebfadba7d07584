"""Directories of ChatGLM2, ChatGLM3 and GLM-4-9B, rewritten as ones of ``GlmForCausalLM`` shard by shard."""

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from longarc.errors import CheckpointError, ConfigError
from longarc.models.elders.chatglm_config import RatioScales, glm_config, read_chatglm_config
from longarc.models.elders.chatglm_weights import GlmTensor, glm_tensors
from longarc.models.hf_files import MAX_SHARD_BYTES, Outgoing, TensorFiles, write_directory
from longarc.runs.files import check_new_directory, new_directory

_FLOATS = {
    "F64": ("float64", 8),
    "F32": ("float32", 4),
    "BF16": ("bfloat16", 2),
    "F16": ("float16", 2),
}
"""By safetensors' name of a dtype: torch's name, and the bytes of a number."""
_SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


def convert_chatglm_dir(
    source: Path,
    target: Path,
    *,
    ratio_scales: RatioScales = "base",
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write ``config.json`` and weights that ``GlmForCausalLM`` reads; no more than a shard is in memory.

    Tensors keep their dtype. Nothing is written before all names, shapes and dtypes were found right. The
    tokenizer, whose code lies beside the checkpoint, is not converted.

    Args:
        source: holds a ChatGLM ``config.json`` and ``*.safetensors``.
        target: new or empty; is made if need be.
        ratio_scales: what ``rope_ratio`` of the config means, see ``glm_config``.
        max_shard_bytes: the size of a file; there are several, and an index, where one is not enough.

    Raises:
        CheckpointError: config or weights are missing or damaged, or do not belong together.
        ConfigError: the config is another model's, or of one that cannot be converted; or the target is
            not empty.
        ResourceError: the target cannot be made, or the disk has too little room.
    """
    check_new_directory(target)
    raw = _read_config(source / "config.json")
    config = read_chatglm_config(raw)
    with TensorFiles.of_directory(source) as files:
        shapes = {name: stored.shape for name, stored in files.tensors.items()}
        tensors = glm_tensors(config, shapes)
        outgoing = [_outgoing(files, tensor) for tensor in tensors]
        dtype, _ = _FLOATS[files.tensors[tensors[0].source].dtype]
        # Named even where they are null: transformers would else add those of GLM-4-9B.
        special_tokens = {name: raw.get(name) for name in _SPECIAL_TOKENS}
        content = {
            **glm_config(config, ratio_scales=ratio_scales),
            **special_tokens,
            "dtype": dtype,
        }
        with new_directory(target):
            write_directory(outgoing, content, target, max_shard_bytes=max_shard_bytes)


def _outgoing(files: TensorFiles, tensor: GlmTensor) -> Outgoing:
    dtype = files.tensors[tensor.source].dtype
    if dtype not in _FLOATS:
        raise CheckpointError(
            f"tensor {tensor.source!r} has dtype {dtype} in {files.where}, but {', '.join(_FLOATS)} can be "
            f"converted; take the unquantised checkpoint"
        )
    _, num_bytes = _FLOATS[dtype]
    return Outgoing(tensor.name, tensor.numel * num_bytes, partial(_read, files, tensor))


def _read(files: TensorFiles, tensor: GlmTensor) -> Tensor:
    whole = files.read(tensor.source)
    part = tensor.part_of(whole)
    # A view of a part would keep the whole in memory, once for each part.
    return part if len(part) == len(whole) else part.clone()


def _read_config(path: Path) -> Mapping[str, Any]:
    try:
        raw = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path} cannot be read: {error}. Give a directory that holds the config.json and the "
            f"*.safetensors of a ChatGLM checkpoint"
        ) from error
    if not isinstance(raw, dict):
        raise ConfigError(
            f"{path} holds a JSON {type(raw).__name__}, but a config.json is an object"
        )
    return raw
