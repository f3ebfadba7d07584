"""New attention learns to give what the old gave, before the model trains on text again.

The old model runs over the documents; each replaced layer sees the input that the old layer saw and is
trained towards the output that it gave, by squared error over the squares of that output. Nothing else is trained.

Source: Jet-Nemotron, Gu et al., arXiv:2508.15884, as GLM-5 (arXiv:2602.15763, section 2.1.2) follows it for linear
attention; that both align features first is the report's word, the loss is ours.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from longarc.config.training import OptimizerConfig
from longarc.errors import ContractError
from longarc.models.decoder_base import Decoder
from longarc.records.metric import Metric
from longarc.trainer.freeze import train_only
from longarc.trainer.optim import MuonAdamW
from longarc.trainer.packing import Document, pack_shared
from longarc.trainer.update import clip_gradients, divide_gradients, learning_rate


class AttentionAlignment:
    """Takes documents, one optimizer step at a time."""

    def __init__(
        self,
        model: Decoder,
        teacher: Decoder,
        layers: Sequence[int],
        *,
        optimizer: OptimizerConfig,
        num_steps: int,
        micro_batch_tokens: int,
    ) -> None:
        """Prepare the attention of ``layers``; of ``model``, everything else is frozen.

        Args:
            model: is trained in place.
            teacher: the model that it was converted from; attends densely.
            layers: whose attention was replaced.
            optimizer: rates and momenta.
            num_steps: for the schedule [optimizer steps].
            micro_batch_tokens: tokens computed together [tokens].

        Raises:
            ContractError: there are no layers, or the models do not have them.
        """
        num_layers = min(len(model.model.layers), len(teacher.model.layers))
        if not layers or not all(0 <= layer < num_layers for layer in layers):
            raise ContractError(
                f"layers {list(layers)} cannot be aligned: name at least one of layers 0..{num_layers - 1}"
            )
        self._pairs = {_attention(teacher, layer): _attention(model, layer) for layer in layers}
        self._teacher = teacher
        prefixes = tuple(f"model.layers.{layer}.self_attn." for layer in layers)
        train_only(model, lambda name: name.startswith(prefixes))
        self._config, self._num_steps = optimizer, num_steps
        self._micro_batch_tokens = micro_batch_tokens
        self._optimizer = MuonAdamW(model, model.config, optimizer)
        self.step_index = 0
        """Optimizer steps taken."""

    def step(self, documents: Sequence[Document]) -> tuple[Metric, ...]:
        """Take one optimizer step; return the squared error of a layer over that of giving nothing.

        Raises:
            ContractError: there is nothing to train on, or the loss is not finite; weights are unchanged.
        """
        self._optimizer.zero_grad()
        errors = dict.fromkeys(self._pairs.values(), 0.0)
        energies = dict.fromkeys(self._pairs.values(), 0.0)
        for micro_batch in pack_shared(documents, micro_batch_tokens=self._micro_batch_tokens):
            with torch.no_grad(), _recorded(self._pairs) as calls:
                self._teacher(micro_batch.token_ids, micro_batch.layout, attention="dense")
            for mixer, (x, step, wanted) in calls.items():
                error = _squares(_output(mixer(x, step)) - wanted, step.num_tokens)
                error.backward()  # type: ignore[no-untyped-call]
                errors[mixer] += error.item()
                energies[mixer] += _squares(wanted, step.num_tokens).item()
        total = sum(errors.values())
        if not math.isfinite(total) or not all(energies.values()):
            raise ContractError(
                f"the alignment error of step {self.step_index} is {total} where the layers should give "
                f"{sum(energies.values())}; the weights are unchanged. Lower the learning rate, or look for "
                f"damaged weights or a step without documents"
            )
        for mixer, energy in energies.items():
            divide_gradients([p for p in mixer.parameters() if p.requires_grad], energy)
        clip_gradients(self._optimizer.parameters, max_norm=self._config.grad_clip)
        self._optimizer.step(
            learning_rate(self.step_index, self._config, num_steps=self._num_steps)
        )
        self.step_index += 1
        relative = sum(errors[mixer] / energies[mixer] for mixer in errors)
        return (Metric("loss/alignment", relative, len(errors)),)


def _attention(model: Decoder, layer: int) -> nn.Module:
    return model.get_submodule(f"model.layers.{layer}.self_attn")


@contextmanager
def _recorded(
    pairs: Mapping[nn.Module, nn.Module],
) -> Iterator[dict[nn.Module, tuple[Tensor, Any, Tensor]]]:
    """Note, for each module in the place of another, what the other was given and what it gave."""
    calls: dict[nn.Module, tuple[Tensor, Any, Tensor]] = {}

    def note(module: nn.Module, given: tuple[Any, ...], output: Any) -> None:
        calls[pairs[module]] = (given[0], given[1], _output(output))

    handles = [module.register_forward_hook(note) for module in pairs]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def _output(output: Any) -> Tensor:
    """Return the attention output alone; some layers return their indexer's loss with it."""
    tensor: Tensor = output[0] if isinstance(output, tuple) else output
    return tensor


def _squares(x: Tensor, num_tokens: int) -> Tensor:
    """Sum the squares of all tokens' numbers, in fp32 or better."""
    return x[:num_tokens].to(torch.promote_types(x.dtype, torch.float32)).square().sum()
