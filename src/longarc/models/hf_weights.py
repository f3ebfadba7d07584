"""Weights on disk under their Hugging Face names, and directories that ``transformers`` reads and writes.

In memory the experts of a layer are stacked; on disk each has its own tensors. Everything else has one
name in both places.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from longarc.errors import CheckpointError
from longarc.models.build import build_model
from longarc.models.decoder_base import Decoder
from longarc.models.hf_config import config_from_hf, config_to_hf
from longarc.models.moe import Experts

WEIGHTS_FILE = "model.safetensors"


def named_tensors(model: Decoder) -> dict[str, Tensor]:
    """Return every tensor of the model by its Hugging Face name, as views that share its memory."""
    tensors: dict[str, Tensor] = {}
    stacked = {
        name: module for name, module in model.named_modules() if isinstance(module, Experts)
    }
    for name, tensor in model.state_dict().items():
        if name.rpartition(".")[0] not in stacked:
            tensors[name] = tensor
    for name, experts in stacked.items():
        for index in range(experts.gate_up_proj.shape[0]):
            gate, up = experts.gate_up_proj[index].detach().chunk(2)
            tensors[f"{name}.{index}.gate_proj.weight"] = gate
            tensors[f"{name}.{index}.up_proj.weight"] = up
            tensors[f"{name}.{index}.down_proj.weight"] = experts.down_proj[index].detach()
    return tensors


def save_weights(model: Decoder, path: Path | str) -> None:
    """Write all weights to one safetensors file, which appears whole or not at all."""
    path = Path(path)
    tensors = {name: tensor.contiguous() for name, tensor in named_tensors(model).items()}
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    save_file(tensors, partial, metadata={"format": "pt"})
    os.replace(partial, path)


def load_weights(model: Decoder, path: Path | str) -> None:
    """Copy all weights of a safetensors file into the model; nothing is copied if anything is wrong.

    Raises:
        CheckpointError: the file is missing or truncated, or its tensors are not those of the model.
    """
    _load([Path(path)], model, ignored=())


def save_pretrained_dir(model: Decoder, directory: Path | str) -> None:
    """Write ``config.json`` and ``model.safetensors`` as ``transformers`` reads them."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    config = config_to_hf(model.config, dtype=str(model.output_weight.dtype).removeprefix("torch."))
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    save_weights(model, directory / WEIGHTS_FILE)


def load_pretrained_dir(directory: Path | str, *, dtype: torch.dtype = torch.float32) -> Decoder:
    """Build the model of a directory that ``transformers`` or ``save_pretrained_dir`` wrote.

    Tensors of multi-token-prediction layers (behind the last decoder layer) are not read.

    Raises:
        CheckpointError: config or weights are missing, damaged, or do not belong together.
        ConfigError: the architecture has a feature that LongArc does not build.
    """
    directory = Path(directory)
    try:
        raw = json.loads((directory / "config.json").read_bytes())
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{directory}/config.json cannot be read: {error}. Give a directory that holds a Hugging "
            f"Face config.json and *.safetensors"
        ) from error
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise CheckpointError(
            f"{directory} holds no *.safetensors file; convert the weights to safetensors first"
        )
    config = config_from_hf(raw)
    model = build_model(config, seed=0, dtype=dtype)
    num_extra = int(raw.get("num_nextn_predict_layers") or 0)
    first = config.num_hidden_layers
    _load(files, model, ignored=[f"model.layers.{first + i}." for i in range(num_extra)])
    return model


def _load(files: list[Path], model: Decoder, *, ignored: list[str] | tuple[str, ...]) -> None:
    expected = named_tensors(model)
    shapes: dict[str, tuple[int, ...]] = {}
    places: dict[str, Path] = {}
    for path in files:
        for name, shape in _shapes(path).items():
            if not name.startswith(tuple(ignored)):
                shapes[name], places[name] = shape, path
    if model.lm_head is None:
        shapes.pop("lm_head.weight", None)  # some writers repeat the embedding under this name
    _check(expected, shapes, files[0] if len(files) == 1 else files[0].parent)
    for path in files:
        with safe_open(path, framework="pt") as opened, torch.no_grad():
            for name in shapes:
                if places[name] == path:
                    expected[name].copy_(opened.get_tensor(name))


def _shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Read names and shapes; also proves that the file is as long as its header says."""
    try:
        with safe_open(path, framework="pt") as opened:
            return {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"weights file {path} cannot be read: {error}. It is missing, truncated or not a "
            f"safetensors file; copy it again, or resume from an earlier checkpoint"
        ) from error


def _check(
    expected: Mapping[str, Tensor], found: Mapping[str, tuple[int, ...]], where: Path
) -> None:
    missing = sorted(expected.keys() - found.keys())
    if missing:
        raise CheckpointError(
            f"{where} lacks {len(missing)} tensors of this model, the first is {missing[0]!r} with shape "
            f"{list(expected[missing[0]].shape)}; load it into the model it was made for"
        )
    unexpected = sorted(found.keys() - expected.keys())
    if unexpected:
        raise CheckpointError(
            f"{where} holds {len(unexpected)} tensors this model does not have, the first is "
            f"{unexpected[0]!r} with shape {list(found[unexpected[0]])}; load it into the model it was "
            f"made for"
        )
    for name, tensor in expected.items():
        if tuple(tensor.shape) != found[name]:
            raise CheckpointError(
                f"tensor {name!r} has shape {list(found[name])} in {where}, but this model needs "
                f"{list(tensor.shape)}; use the config that the checkpoint was made with"
            )
