"""The compiled kernels as Python sees them: one typed call per function of the C interface.

``LONGARC_NATIVE=0`` in the environment turns them off; it is the only variable this package reads.
"""

import ctypes
import logging
import multiprocessing
import os
from functools import cache
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from longarc.config.model import ComputeDtype
from longarc.errors import ContractError, ResourceError
from longarc.models.kernels.build import library_path
from longarc.models.kernels.memory import Arena

_log = logging.getLogger(__name__)

_POINTER, _INTEGER, _REAL = "p", "i", "f"
_SIGNATURES: Final = {
    "pack": "piiiip",
    "pack_bf16": "piiiip",
    "packed_product": "iiippipi",
    "product": "iiiipiipiiipiiii",
    "product_weight": "iiiipiipiipiii",
    "rms_norm": "iipipfpipi",
    "rms_norm_backward": "iipippipppi",
    "layer_norm": "iipippfpi",
    "rotate": "iiipiippifpii",
    "swiglu": "iippi",
    "swiglu_backward": "iippppi",
    "route": "iiippifpp",
    "experts": "iiiiippppppppi",
    "experts_backward": "iiiiippppppppppppi",
    "select": "pipiiippppi",
    "attention": "pipiiiiifpppppppi",
    "attention_backward": "pipiiiiifpppppppppi",
    "logprobs": "iiippppfpppii",
    "logprobs_backward": "iiippppfppppii",
    "sample": "iippppppi",
    "llama_rows": "pppi",
    "mla_rows": "pppi",
    "llama_steps": "ppppi",
    "mla_steps": "ppppi",
    "mla_take": "ppppi",
    "mla_draft": "pppppi",
    "mla_rounds": "pppppi",
}
_TYPES: Final[dict[str, type[ctypes.c_void_p | ctypes.c_int64 | ctypes.c_float]]] = {
    _POINTER: ctypes.c_void_p,
    _INTEGER: ctypes.c_int64,
    _REAL: ctypes.c_float,
}


class NativeLibrary:
    """The loaded library."""

    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(str(path))
        self.path = path
        self._functions = {name: library[f"longarc_{name}"] for name in _SIGNATURES}
        for name, function in self._functions.items():
            function.argtypes = [_TYPES[code] for code in _SIGNATURES[name]]
            function.restype = None
        for name in ("lanes", "packed_size"):
            library[f"longarc_{name}"].restype = ctypes.c_int64
        library["longarc_packed_size"].argtypes = [ctypes.c_int64, ctypes.c_int64]
        self._packed_size = library["longarc_packed_size"]
        self.lanes: int = library["longarc_lanes"]()
        """Positions in one block of a blocked table."""

    def call(self, name: str, *arguments: "Tensor | int | float | None") -> None:
        """Call a function; a tensor is passed as the address of its first number.

        The interpreter lock is released meanwhile. Nothing is checked but the number of arguments:
        callers see to dtype, device, strides and sizes.
        """
        self._functions[name](*[a.data_ptr() if isinstance(a, Tensor) else a for a in arguments])

    def call_structs(
        self,
        name: str,
        shape: ctypes.Structure,
        layers: ctypes.Array[Any],
        *others: ctypes.Structure,
    ) -> None:
        """Call a function of all layers, which takes its arguments as structures."""
        self._functions[name](
            ctypes.addressof(shape),
            layers,
            *(ctypes.addressof(other) for other in others),
            torch.get_num_threads(),
        )

    def packed(
        self, weight: Tensor, arena: Arena | None = None, *, compute_dtype: ComputeDtype = "float32"
    ) -> Tensor:
        """Return a weight [out, in] packed for ``packed_product``; strides are free.

        Args:
            weight: to be packed.
            arena: where it goes if it is to be kept.
            compute_dtype: of the products. In bfloat16 each number of the result holds the bits of two weights.
        """
        num_out, num_in = weight.shape
        is_bf16 = compute_dtype == "bfloat16"
        size = self._packed_size(num_out, -(-num_in // 2) if is_bf16 else num_in)
        packed = torch.empty(size) if arena is None else arena.take(size)
        self.call(
            "pack_bf16" if is_bf16 else "pack",
            *(weight, weight.stride(0), weight.stride(1), num_out, num_in, packed),
        )
        return packed


def native() -> NativeLibrary | None:
    """Return the compiled kernels, or None where they were not built, which is said once, or are turned off.

    Raises:
        ResourceError: the file that holds them is damaged.
    """
    if os.environ.get("LONGARC_NATIVE") == "0":
        return None
    return _load(library_path_once())


def native_for(*tensors: Tensor) -> NativeLibrary | None:
    """Return the kernels where they can work on these tensors: fp32 on the CPU."""
    if all(t.dtype is torch.float32 and t.device.type == "cpu" for t in tensors):
        return native()
    return None


def required() -> NativeLibrary:
    """Return the kernels, which the caller knows to be there.

    Raises:
        ContractError: they are not.
    """
    library = native()
    if library is None:
        raise ContractError("a native kernel was called, but the kernels are not loaded")
    return library


def check_ids(ids: Tensor, limit: int) -> None:
    """Refuse token ids outside the vocabulary, which a kernel would read memory for.

    Raises:
        ContractError: an id is negative or too large.
    """
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < limit:
        raise ContractError(
            f"token ids span {int(ids.min())}..{int(ids.max())}, but the vocabulary is 0..{limit - 1}: "
            f"the tokenizer does not match the model"
        )


@cache
def library_path_once() -> Path:
    """Return where the library lies; found out once, because that reads the sources."""
    return library_path()


@cache
def _load(path: Path) -> NativeLibrary | None:
    if path.exists():
        try:
            return NativeLibrary(path)
        except (OSError, AttributeError) as error:
            raise ResourceError(
                f"the native kernels in {path} cannot be loaded: {error}. Remove the file and build them again with: "
                f"python -m longarc.models.kernels.build"
            ) from error
    if multiprocessing.parent_process() is None:  # or each process of a step would say it
        _log.warning(
            "the native kernels of these sources are not built (%s is not there): torch computes everything, several "
            "times slower. Build them with: python -m longarc.models.kernels.build",
            path,
        )
    return None
