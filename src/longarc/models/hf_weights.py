"""Weights on disk under their Hugging Face names, and directories that ``transformers`` reads and writes.

In memory the experts of a layer are stacked; on disk each has its own tensors, unless a file has them
fused. Everything else has one name in both places.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeGuard

import torch
from torch import Tensor, nn

from longarc.config.model import ComputeDtype, ModelConfig
from longarc.config.transformers_model import TransformersConfig
from longarc.errors import CheckpointError, ConfigError
from longarc.models.build import build_model
from longarc.models.decoder_base import Decoder
from longarc.models.hf_config import computing_in, config_from_hf, config_to_hf, without_mtp
from longarc.models.hf_files import (
    CONFIG_FILE,
    MAX_SHARD_BYTES,
    Outgoing,
    TensorFiles,
    write_directory,
    write_file,
)
from longarc.models.hf_formats import Form, form_of, int4_outgoing, is_routed_expert
from longarc.models.hf_quantisation import (
    Quantisation,
    quantisation_from_hf,
    quantisation_to_hf,
)
from longarc.models.hf_transformers import with_mtp_of_files
from longarc.models.moe import Experts
from longarc.runs.files import make_directory

MTP_PREFIX = "mtp."
"""Of the MTP layer's tensors in memory."""
_MTP_COPIES = ("embed_tokens.weight", "shared_head.head.weight")


def named_tensors(model: Decoder) -> dict[str, Tensor]:
    """Return every tensor of the model by its Hugging Face name, as views that share its memory."""
    return _with_hf_names(model, _separate(model))


def _separate(model: Decoder) -> dict[str, Tensor]:
    """Return every tensor by its name in memory, the experts one by one."""
    tensors: dict[str, Tensor] = {}
    stacked = {name: module for name, module in model.named_modules() if _is_stacked(module)}
    for name, tensor in model.state_dict().items():
        if name.rpartition(".")[0] not in stacked:
            tensors[name] = tensor
    for name, experts in stacked.items():
        for index in range(len(experts.gate_up_proj)):
            gate, up = experts.gate_up_proj[index].detach().chunk(2)
            tensors[f"{name}.{index}.gate_proj.weight"] = gate
            tensors[f"{name}.{index}.up_proj.weight"] = up
            tensors[f"{name}.{index}.down_proj.weight"] = experts.down_proj[index].detach()
    return tensors


def _is_stacked(module: nn.Module) -> TypeGuard[Experts]:
    """Say whether a module holds all experts of a layer, ours or transformers'; both stack them alike."""
    return getattr(getattr(module, "gate_up_proj", None), "ndim", 0) == 3


def _with_hf_names(model: Decoder, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename the MTP layer, which published checkpoints number as the one behind the last."""
    behind = f"model.layers.{model.config.num_hidden_layers}."
    return {
        behind + name.removeprefix(MTP_PREFIX) if name.startswith(MTP_PREFIX) else name: tensor
        for name, tensor in tensors.items()
    }


def save_weights(model: Decoder, path: Path | str) -> None:
    """Write all weights to one safetensors file, which appears whole or not at all."""
    save_tensors(named_tensors(model), path)


def save_tensors(tensors: Mapping[str, Tensor], path: Path | str) -> None:
    """Write tensors to one safetensors file, which appears whole or not at all."""
    write_file(_outgoing(tensors), Path(path))


def load_weights(model: Decoder, path: Path | str) -> None:
    """Copy all weights of a safetensors file into the model; nothing is copied if anything is wrong.

    Raises:
        CheckpointError: the file is missing or truncated, or its tensors are not those of the model.
    """
    with TensorFiles.of_file(Path(path)) as files:
        _load(
            files,
            named_tensors(model),
            Quantisation(),
            ignored=_ignored(model),
            num_experts=_num_experts(model),
        )


def load_tensors(expected: Mapping[str, Tensor], path: Path | str) -> None:
    """Fill tensors from a file that :func:`save_tensors` wrote; none is filled if anything is wrong.

    Raises:
        CheckpointError: the file is missing or truncated, or holds other tensors.
    """
    with TensorFiles.of_file(Path(path)) as files:
        _load(files, expected, Quantisation(), ignored=())


def save_pretrained_dir(
    model: Decoder,
    directory: Path | str,
    *,
    experts: Literal["separate", "fused", "int4"] = "separate",
    int4_group_size: int = 32,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write ``config.json`` and the weights as ``transformers`` reads them.

    Args:
        model: is written from where it lies; no copy is made.
        directory: is made if need be; a model that it holds is replaced, once the new one is complete.
        experts: each with its own tensors, as published checkpoints have them; fused, as transformers holds
            them in memory; or rounded to INT4, with the codes and scales that training with the same group
            size computes with.
        int4_group_size: numbers that share a scale; read with ``"int4"`` alone.
        max_shard_bytes: the size of a file; there are several, and an index, where one is not enough.

    Raises:
        ConfigError: transformers has no such architecture, or there are no routed experts that could be
            rounded, or the group size does not divide their widths.
        ResourceError: the directory cannot be made, or the disk has too little room.
    """
    directory = Path(directory)
    config = config_to_hf(model.config, dtype=str(model.output_weight.dtype).removeprefix("torch."))
    if experts == "fused":
        outgoing = _outgoing(_with_hf_names(model, model.state_dict()))
    elif experts == "int4":
        outgoing = _int4_outgoing(model, int4_group_size)
        config["quantization_config"] = quantisation_to_hf(int4_group_size)
    else:
        outgoing = _outgoing(named_tensors(model))
    make_directory(directory)
    write_directory(outgoing, config, directory, max_shard_bytes=max_shard_bytes)


def load_pretrained_dir(
    directory: Path | str,
    *,
    dtype: torch.dtype = torch.float32,
    compute_dtype: ComputeDtype | None = None,
) -> Decoder:
    """Build the model of a directory that ``transformers`` or ``save_pretrained_dir`` wrote.

    One file or many, experts separate or fused, FP8 blocks and INT4 groups are read, tensor by tensor. Where the
    files lack the MTP layer that the config names, as those that transformers saves do, it is not built.

    Args:
        directory: with a ``config.json``.
        dtype: of the weights.
        compute_dtype: of products, where it is not to be what ``config.json`` says.

    Raises:
        CheckpointError: config or weights are missing, damaged, or do not belong together.
        ConfigError: the architecture has a feature that LongArc does not build.
    """
    directory = Path(directory)
    raw = _config(directory)
    config = computing_in(config_from_hf(raw), compute_dtype)
    quantisation = quantisation_from_hf(raw)
    behind = f"model.layers.{config.num_hidden_layers}."
    with TensorFiles.of_directory(directory) as files:
        has_mtp = any(name.startswith(behind) for name in files.tensors)
        if isinstance(config, TransformersConfig):
            config = with_mtp_of_files(config, is_there=has_mtp)
        elif not has_mtp:
            config = without_mtp(config)
        model = build_model(config, seed=0, dtype=dtype)
        # Some publishers repeat the main model's tables in the MTP layer, which shares them.
        _load(
            files,
            named_tensors(model),
            quantisation,
            ignored=[*_ignored(model), *(behind + name for name in _MTP_COPIES)],
            num_experts=_num_experts(model),
        )
    return model


def pretrained_config(directory: Path | str) -> ModelConfig:
    """Return what the ``config.json`` of a directory describes; no weights are looked at.

    Raises:
        CheckpointError: it is missing or damaged.
        ConfigError: the architecture has a feature that LongArc does not build, or the weights are stored in a
            way that cannot be read.
    """
    raw = _config(Path(directory))
    config = config_from_hf(raw)
    quantisation_from_hf(raw)
    return config


def _config(directory: Path) -> dict[str, Any]:
    try:
        raw = json.loads((directory / CONFIG_FILE).read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{directory / CONFIG_FILE} cannot be read: {error}. Give a directory that holds a Hugging "
            f"Face config.json and *.safetensors"
        ) from error
    if not isinstance(raw, dict):
        raise CheckpointError(
            f"{directory / CONFIG_FILE} holds a JSON {type(raw).__name__}, but a config.json is an object; copy it "
            f"again from where the weights come from"
        )
    return raw


def _outgoing(tensors: Mapping[str, Tensor]) -> list[Outgoing]:
    return [
        Outgoing(name, tensor.nbytes, lambda tensor=tensor: tensor)  # type: ignore[misc]
        for name, tensor in tensors.items()
    ]


def _int4_outgoing(model: Decoder, group_size: int) -> list[Outgoing]:
    outgoing: list[Outgoing] = []
    named = named_tensors(model)
    for name, tensor in named.items():
        if is_routed_expert(name):
            outgoing += int4_outgoing(name, tensor, group_size)
        else:
            outgoing += _outgoing({name: tensor})
    if len(outgoing) == len(named):
        raise ConfigError(
            f"a {model.config.family} model has no routed experts to round to INT4; write it without"
        )
    return outgoing


def _ignored(model: Decoder) -> list[str]:
    """Return what a file may hold beside the model's tensors: some writers repeat the embedding under this name."""
    return ["lm_head.weight"] if model.lm_head is None else []


def _num_experts(model: Decoder) -> int:
    number: int = getattr(model.config, "n_routed_experts", 0)
    return number


def _load(
    files: TensorFiles,
    expected: Mapping[str, Tensor],
    quantisation: Quantisation,
    *,
    ignored: Sequence[str],
    num_experts: int = 0,
) -> None:
    found = {n: s for n, s in files.tensors.items() if not n.startswith(tuple(ignored))}
    forms = {name: form_of(name, found, quantisation, num_experts=num_experts) for name in expected}
    there = {name: form for name, form in forms.items() if form is not None}
    _refuse_missing(expected, there, files)
    used = {name for form in there.values() for name in form.names()}
    for name in sorted(found.keys() - used):
        raise CheckpointError(
            f"{files.where} holds {len(found.keys() - used)} tensors this model does not have, the first is "
            f"{name!r} with shape {list(found[name].shape)}; load it into the model it was made for"
        )
    for name, form in there.items():
        form.check(files, tuple(expected[name].shape))
    with torch.no_grad():
        for name, form in there.items():
            expected[name].copy_(form.read(files))


def _refuse_missing(
    expected: Mapping[str, Tensor], there: Mapping[str, Form], files: TensorFiles
) -> None:
    missing = sorted(expected.keys() - there.keys())
    if missing:
        raise CheckpointError(
            f"{files.where} lacks {len(missing)} tensors of this model, the first is {missing[0]!r} with shape "
            f"{list(expected[missing[0]].shape)}; load it into the model it was made for"
        )
