"""What becomes of a layer's activations between forward and backward: kept, computed again, or in a file.

Source: recomputation, Chen et al., arXiv:1604.06174; offloading by layer, GLM-5, arXiv:2602.15763, section 2.4.1.
"""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from longarc.config.training import ActivationConfig, LayerChoice, chosen_layers
from longarc.errors import ConfigError
from longarc.models.offload import OffloadFile
from longarc.models.selection import Selection


class Activations:
    """Applies an ``ActivationConfig`` to forward passes; a context manager that holds file and thread.

    Gradients are bit for bit those of a pass that keeps everything. A recomputed layer runs in the same
    gradient mode, on the same threads and through the same kernels as the first time, all of which are
    deterministic; so it routes to the same experts and selects the same keys. A selection that it reuses is
    not computed again: it was handed in, and is kept like the rows themselves.
    """

    def __init__(self, config: ActivationConfig) -> None:
        self._config = config
        self._file: OffloadFile | None = None

    def managed(self, layers: nn.ModuleList) -> list[Callable[..., Any]]:
        """Return the layers of one forward pass, to be called in order and once each.

        The backward of the pass before has to be over: what it offloaded is forgotten.

        Raises:
            ConfigError: the settings name a layer that the model does not have.
            ResourceError: there is no place for the file.
        """
        recomputed = self._chosen("recomputed_layers", len(layers))
        offloaded = self._chosen("offloaded_layers", len(layers))
        if not torch.is_grad_enabled():
            return list(layers)
        if offloaded:
            if self._file is None:
                self._file = OffloadFile(self._config.offload_directory)
            self._file.restart()
        return [
            partial(
                _run,
                layer,
                recomputes=index in recomputed,
                file=self._file if index in offloaded else None,
            )
            for index, layer in enumerate(layers)
        ]

    def __enter__(self) -> "Activations":
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _chosen(self, name: str, num_layers: int) -> frozenset[int]:
        choice: LayerChoice = getattr(self._config, name)
        try:
            return chosen_layers(choice, num_layers)
        except ValueError as error:
            raise ConfigError(f"activations.{name}: {error}") from error


def _run(
    layer: nn.Module,
    hidden: Tensor,
    step: Any,
    selection: Selection | None,
    *,
    recomputes: bool,
    file: OffloadFile | None,
) -> Any:
    with nullcontext() if file is None else file.offloaded(layer):
        if not recomputes:
            return layer(hidden, step, selection)
        tensors: list[Tensor] = []
        put_together = None
        if selection is not None:
            tensors, put_together = selection.taken_apart()

        # What is kept until backward are the tensors among the arguments, which can be offloaded; what sits
        # inside other arguments stays in memory.
        def run_again(hidden: Tensor, *tensors: Tensor) -> Any:
            return layer(hidden, step, None if put_together is None else put_together(tensors))

        # Not reentrant: the first forward must run with gradients on, as the second does, because some
        # parts take another kernel without. Nothing in a layer is random.
        return checkpoint(
            run_again, hidden, *tensors, use_reentrant=False, preserve_rng_state=False
        )
