"""Runs inside vLLM's workers: puts a weight file of the trainer into the model that serves.

vLLM mixes the class into its worker (``--worker-extension-cls``) and calls it through ``/collective_rpc``.
vLLM has an environment of its own, so this file is copied there and must import nothing of LongArc.

Two things are done that vLLM's own reload does not do:

* Names and shapes are compared with those of the served checkpoint before anything is touched, because a
  reload that meets a wrong tensor half-way leaves half-new weights behind.
* An output head that shares the embedding's weight is packed again. On a CPU vLLM computes with a packed
  copy of each matrix; a reload packs what it loaded, and a tied head is loaded by nobody. It kept the first
  weights for ever (seen in vLLM 0.32.0; remove `_pack_tied_heads` when a reload does it).
"""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

_HEAD = "lm_head.weight"
"""Some writers repeat a tied head under this name, others leave it out."""


class WeightLoader:
    """Mixed into vLLM's worker, which brings ``model_runner``, ``model_config`` and ``reload_weights``."""

    model_config: Any
    model_runner: Any
    reload_weights: Any
    _longarc_path: str | None = None
    """File of the weights in use; None before the first update."""

    def longarc_load_weights(self, path: str) -> dict[str, Any]:
        """Load a safetensors file; return ``{"seconds": s}``, or ``{"error": why}`` with the old weights in use.

        ``{"error": why, "is_broken": True}`` says that the old ones could not be put back either.
        """
        started = time.perf_counter()
        try:
            self._longarc_check(path)
        except Exception as error:  # noqa: BLE001 - whatever it is goes to LongArc, which raises it
            return {"error": f"{type(error).__name__}: {error}"}
        try:
            self._longarc_load(path)
        except Exception as error:  # noqa: BLE001
            return self._longarc_put_back(f"{type(error).__name__}: {error}")
        self._longarc_path = path
        return {"seconds": time.perf_counter() - started}

    def _longarc_put_back(self, why: str) -> dict[str, Any]:
        try:
            if self._longarc_path is not None:
                self._longarc_load(self._longarc_path)
            else:
                self.reload_weights()
                _pack_tied_heads(self.model_runner.get_model())
        except Exception as error:  # noqa: BLE001
            return {"error": f"{why}; then {type(error).__name__}: {error}", "is_broken": True}
        return {"error": why}

    def _longarc_check(self, path: str) -> None:
        served = _shapes(*sorted(Path(self.model_config.model).glob("*.safetensors")))
        offered = _shapes(Path(path))
        if _HEAD not in served or _HEAD not in offered:
            served.pop(_HEAD, None)
            offered.pop(_HEAD, None)
        for name in sorted(served.keys() | offered.keys()):
            if served.get(name) != offered.get(name):
                raise ValueError(
                    f"tensor {name!r} has shape {offered.get(name)} in {path}, the served model has "
                    f"{served.get(name)} (None: not there)"
                )

    def _longarc_load(self, path: str) -> None:
        self.reload_weights(weights_iterator=_tensors(path))
        _pack_tied_heads(self.model_runner.get_model())


def _shapes(*paths: Path) -> dict[str, list[int]]:
    """Return the shape of every tensor, from the headers alone."""
    shapes: dict[str, list[int]] = {}
    for path in paths:
        # Also finds a file that ends early.
        with safe_open(path, framework="pt") as file:
            shapes |= {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
    return shapes


def _tensors(path: str) -> Iterator[tuple[str, torch.Tensor]]:
    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 - not a mapping
            yield name, file.get_tensor(name)


def _pack_tied_heads(model: torch.nn.Module) -> None:
    """Process again every module whose weight is another module's."""
    owners: dict[int, torch.nn.Module] = {}
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if weight is None or not weight.numel():
            continue
        if owners.setdefault(weight.data_ptr(), module) is not module:
            process = getattr(
                getattr(module, "quant_method", None), "process_weights_after_loading", None
            )
            if process is not None:
                process(module)
