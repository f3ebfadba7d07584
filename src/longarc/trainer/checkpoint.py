"""The trainer's part of a checkpoint: weights, moments and counters, for a bit-exact resume."""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from longarc.errors import CheckpointError, ResourceError, boundary
from longarc.models.decoder_base import Decoder
from longarc.models.hf_weights import load_weights, save_weights
from longarc.trainer.optim import MuonAdamW

WEIGHTS_FILE = "model.safetensors"
OPTIMIZER_FILE = "optimizer.safetensors"
COUNTERS_FILE = "trainer.json"


def save_training_state(
    directory: str, *, model: Decoder, optimizer: MuonAdamW, counters: Mapping[str, int]
) -> None:
    """Write weights, optimizer state and counters into an existing directory.

    Atomicity is the caller's: a checkpoint counts once its manifest is written.

    Raises:
        ResourceError: the disk is full or the directory is not writable.
    """
    root = Path(directory)
    with boundary(ResourceError, f"cannot write the checkpoint {directory}"):
        save_weights(model, str(root / WEIGHTS_FILE))
        state = {key: value.contiguous() for key, value in optimizer.state_dict().items()}
        save_file(state, str(root / OPTIMIZER_FILE))
        (root / COUNTERS_FILE).write_text(json.dumps(dict(counters), sort_keys=True) + "\n")


def load_training_state(directory: str, *, model: Decoder, optimizer: MuonAdamW) -> dict[str, int]:
    """Read what :func:`save_training_state` wrote; return the counters.

    Raises:
        CheckpointError: a file is missing, damaged, or of another model.
    """
    root = Path(directory)
    for name in (WEIGHTS_FILE, OPTIMIZER_FILE, COUNTERS_FILE):
        if not (root / name).is_file():
            raise CheckpointError(
                f"checkpoint {directory} has no {name}; it is incomplete: resume from an earlier one"
            )
    try:
        state: dict[str, torch.Tensor] = load_file(str(root / OPTIMIZER_FILE))
        counters = json.loads((root / COUNTERS_FILE).read_text())
    except (SafetensorError, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(
            f"checkpoint {directory} is damaged: {error}; resume from an earlier one"
        ) from error
    load_weights(model, str(root / WEIGHTS_FILE))
    optimizer.load_state_dict(state)
    return {str(key): int(value) for key, value in counters.items()}
