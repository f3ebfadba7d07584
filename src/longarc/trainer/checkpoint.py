"""The trainer's part of a checkpoint: weights, moments and counters, for a bit-exact resume."""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from longarc.errors import CheckpointError, ResourceError, boundary
from longarc.models.critic import Critic, load_critic, save_critic
from longarc.models.decoder_base import Decoder
from longarc.models.hf_weights import load_weights, save_weights
from longarc.trainer.optim import MuonAdamW

WEIGHTS_FILE = "model.safetensors"
OPTIMIZER_FILE = "optimizer.safetensors"
COUNTERS_FILE = "trainer.json"
CRITIC_FILE = "critic.safetensors"
"""Weights of the critic, backbone and value head."""
CRITIC_OPTIMIZER_FILE = "critic_optimizer.safetensors"


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
        _save_moments(optimizer, root / OPTIMIZER_FILE)
        (root / COUNTERS_FILE).write_text(json.dumps(dict(counters), sort_keys=True) + "\n")


def load_training_state(directory: str, *, model: Decoder, optimizer: MuonAdamW) -> dict[str, int]:
    """Read what :func:`save_training_state` wrote; return the counters.

    Raises:
        CheckpointError: a file is missing, damaged, or of another model.
    """
    root = Path(directory)
    _require(root, WEIGHTS_FILE, OPTIMIZER_FILE, COUNTERS_FILE)
    moments = _moments(root / OPTIMIZER_FILE)
    try:
        counters = json.loads((root / COUNTERS_FILE).read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(
            f"checkpoint {directory} is damaged: {error}; resume from an earlier one"
        ) from error
    load_weights(model, str(root / WEIGHTS_FILE))
    optimizer.load_state_dict(moments)
    return {str(key): int(value) for key, value in counters.items()}


def save_critic_state(directory: str, *, critic: Critic, optimizer: MuonAdamW) -> None:
    """Write a critic's weights and its optimizer's state beside those of the policy.

    Raises:
        ResourceError: the disk is full or the directory is not writable.
    """
    root = Path(directory)
    with boundary(ResourceError, f"cannot write the checkpoint {directory}"):
        save_critic(critic, root / CRITIC_FILE)
        _save_moments(optimizer, root / CRITIC_OPTIMIZER_FILE)


def load_critic_state(directory: str, *, critic: Critic, optimizer: MuonAdamW) -> None:
    """Read what :func:`save_critic_state` wrote.

    Raises:
        CheckpointError: a file is missing, damaged, or of another critic.
    """
    root = Path(directory)
    _require(root, CRITIC_FILE, CRITIC_OPTIMIZER_FILE)
    moments = _moments(root / CRITIC_OPTIMIZER_FILE)
    load_critic(critic, root / CRITIC_FILE)
    optimizer.load_state_dict(moments)


def _require(root: Path, *names: str) -> None:
    for name in names:
        if not (root / name).is_file():
            raise CheckpointError(
                f"checkpoint {root} has no {name}; it is incomplete: resume from an earlier one"
            )


def _save_moments(optimizer: MuonAdamW, path: Path) -> None:
    state = {key: value.contiguous() for key, value in optimizer.state_dict().items()}
    save_file(state, str(path))


def _moments(path: Path) -> dict[str, torch.Tensor]:
    try:
        state: dict[str, torch.Tensor] = load_file(str(path))
    except SafetensorError as error:
        raise CheckpointError(
            f"checkpoint {path.parent} is damaged: {error}; resume from an earlier one"
        ) from error
    return state
