"""A critic: any decoder with a value head in the place of its output projection.

::

    ids -> backbone (a policy's layers, copied) -> hidden state of each token -> value head -> V

The number of a row is the value of the state *behind* its token: what the rollout is expected to earn once that token
is there. The value of the state in which token t is sampled is therefore the number of row t - 1, which is also the row
that predicts token t; an observation between two actions is thus seen by the value of the second one.

Source: SAO (arXiv:2607.07508): token-level values from a critic that starts as a copy of the policy.
"""

from pathlib import Path

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from longarc.config.model import ModelConfig
from longarc.errors import CheckpointError
from longarc.models.activations import Activations
from longarc.models.build import build_model
from longarc.models.decoder_base import Attention, Decoder, ForwardOutput
from longarc.models.hf_files import TensorFiles
from longarc.models.hf_weights import load_tensors, named_tensors, save_tensors
from longarc.models.layout import Layout

VALUE_HEAD = "value_head"
"""First part of the names of the head's tensors, in memory and on disk."""


class Critic(nn.Module):
    """A backbone and a linear value head, which computes in fp32 or better."""

    def __init__(self, backbone: Decoder) -> None:
        """Take over a decoder: its output projection and its layer for multi-token prediction are dropped.

        The head is zero, so that a new critic expects nothing of any state.
        """
        super().__init__()
        backbone.lm_head = None
        if "mtp" in dict(backbone.named_children()):
            setattr(backbone, "mtp", None)  # noqa: B010 - not every decoder has such a layer
        self.backbone = backbone
        weight = backbone.output_weight
        self.value_head = nn.Linear(
            weight.shape[1],
            1,
            dtype=torch.promote_types(weight.dtype, torch.float32),
            device=weight.device,
        )
        nn.init.zeros_(self.value_head.weight)
        nn.init.zeros_(self.value_head.bias)

    @property
    def config(self) -> ModelConfig:
        """Shape of the backbone."""
        return self.backbone.config

    @property
    def dtype(self) -> torch.dtype:
        """Of the backbone's weights."""
        return self.backbone.output_weight.dtype

    def forward(
        self,
        token_ids: Int[Tensor, " tokens"],
        layout: Layout,
        rows: Int[Tensor, " rows"],
        *,
        attention: Attention,
        activations: Activations | None = None,
    ) -> Float[Tensor, " rows"]:
        """Return the values of chosen rows of a packed layout.

        Args:
            token_ids: ids, in the order of the layout's spans.
            layout: which tokens belong to one sequence.
            rows: tokens behind which the state is valued; one may be named several times.
            attention: which keys are attended to, as in ``Decoder.forward``.
            activations: what becomes of the layers' activations until backward; None keeps them.

        Raises:
            ContractError: as ``Decoder.forward``.
        """
        output: ForwardOutput = self.backbone(
            token_ids, layout, attention=attention, activations=activations
        )
        states = output.hidden[rows.to(output.hidden.device)]
        values: Tensor = self.value_head(states.to(self.value_head.weight.dtype))
        return values[:, 0]


def build_critic(config: ModelConfig, *, dtype: torch.dtype = torch.float32) -> Critic:
    """Build a critic whose weights are still to be loaded.

    Raises:
        ConfigError: no tensor can have such sizes.
        ResourceError: the memory cannot hold the weights.
    """
    return Critic(build_model(config, seed=0, dtype=dtype))


def save_critic(critic: Critic, path: Path | str) -> None:
    """Write all weights to one safetensors file, the backbone's under their Hugging Face names."""
    save_tensors(_tensors(critic), path)


def load_critic(critic: Critic, path: Path | str) -> None:
    """Copy all weights of a file into the critic; nothing is copied if anything is wrong.

    Raises:
        CheckpointError: the file is missing or truncated, or its tensors are not those of the critic.
    """
    with TensorFiles.of_file(Path(path)) as files:
        missing = [name for name in _head(critic) if name not in files.tensors]
    if missing:
        raise CheckpointError(
            f"{path} has no {missing[0]}: these are the weights of a policy, not of a critic. Start the critic "
            f"from the policy, or name a stage that trained one"
        )
    load_tensors(_tensors(critic), path)


def _tensors(critic: Critic) -> dict[str, Tensor]:
    return {**named_tensors(critic.backbone), **_head(critic)}


def _head(critic: Critic) -> dict[str, Tensor]:
    return {
        f"{VALUE_HEAD}.{name}": tensor for name, tensor in critic.value_head.state_dict().items()
    }
