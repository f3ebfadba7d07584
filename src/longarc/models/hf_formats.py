"""The forms in which a matrix of the model can lie in a file, and how each is read.

=========  ==========================================  =====================================================
form       tensors                                     the matrix is
=========  ==========================================  =====================================================
plain      ``X.weight``                                 itself, in any floating dtype
fused      ``experts.gate_up_proj``, ``.down_proj``     a slice of what transformers holds in memory
fp8        ``X.weight``, ``X.weight_scale_inv``         e4m3 times the scale of its block
int4       ``X.weight_packed``, ``_scale``, ``_shape``  codes times the scale of their group
=========  ==========================================  =====================================================

Source: FP8 blocks, DeepSeek-V3, arXiv:2412.19437, section 3.3; INT4, compressed-tensors "pack-quantized".
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from longarc.algos.int4 import (
    CODES_PER_WORD,
    int4_dequantised,
    int4_quantised,
    packed_int4,
    unpacked_int4,
)
from longarc.errors import CheckpointError, ConfigError, ContractError
from longarc.models.hf_files import Outgoing, StoredTensor, TensorFiles
from longarc.models.hf_quantisation import Quantisation

FLOATS = ("F64", "F32", "BF16", "F16")
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj)\.weight")


class Form(ABC):
    """One matrix as it lies in the files."""

    @abstractmethod
    def names(self) -> tuple[str, ...]:
        """Return the tensors that it is made of."""

    @abstractmethod
    def check(self, files: TensorFiles, shape: tuple[int, ...]) -> None:
        """Compare shapes and dtypes with a matrix of the model.

        Raises:
            CheckpointError: names the tensor, what it is and what was expected.
        """

    @abstractmethod
    def read(self, files: TensorFiles) -> Tensor:
        """Return the matrix, in whatever floating dtype comes out."""


def form_of(
    name: str,
    stored: Mapping[str, StoredTensor],
    quantisation: Quantisation,
    *,
    num_experts: int,
) -> Form | None:
    """Return the form in which a tensor of the model is there; None where it is not.

    Args:
        name: of the model's tensor.
        stored: what the files hold.
        quantisation: how they hold it.
        num_experts: routed experts of a layer, which a fused tensor has to have.
    """
    if name in stored:
        if stored[name].dtype == "F8_E4M3":
            return _Fp8(name, quantisation.block)
        return _Plain(name)
    if f"{name}_packed" in stored and quantisation.group_size is not None:
        return _Int4(name, quantisation.group_size)
    expert = _EXPERT.fullmatch(name)
    if expert is not None:
        experts, index, projection = expert.groups()
        fused = f"{experts}.{'down_proj' if projection == 'down_proj' else 'gate_up_proj'}"
        if fused in stored:
            return _Fused(fused, int(index), projection, num_experts)
    return None


@dataclass(frozen=True, slots=True)
class _Plain(Form):
    name: str

    def names(self) -> tuple[str, ...]:
        return (self.name,)

    def check(self, files: TensorFiles, shape: tuple[int, ...]) -> None:
        _require(files, self.name, shape, FLOATS)

    def read(self, files: TensorFiles) -> Tensor:
        return files.read(self.name)


@dataclass(frozen=True, slots=True)
class _Fused(Form):
    name: str
    index: int
    projection: str
    num_experts: int

    def names(self) -> tuple[str, ...]:
        return (self.name,)

    def check(self, files: TensorFiles, shape: tuple[int, ...]) -> None:
        rows = shape[0] if self.projection == "down_proj" else 2 * shape[0]
        _require(files, self.name, (self.num_experts, rows, *shape[1:]), FLOATS)

    def read(self, files: TensorFiles) -> Tensor:
        matrix = files.read(self.name, self.index)
        if self.projection == "down_proj":
            return matrix
        gate, up = matrix.chunk(2)
        return gate if self.projection == "gate_proj" else up


@dataclass(frozen=True, slots=True)
class _Fp8(Form):
    name: str
    block: tuple[int, int] | None

    def names(self) -> tuple[str, ...]:
        return (self.name, self._scale)

    @property
    def _scale(self) -> str:
        return f"{self.name}_scale_inv"

    def check(self, files: TensorFiles, shape: tuple[int, ...]) -> None:
        if self.block is None:
            raise CheckpointError(
                f"tensor {self.name!r} has dtype F8_E4M3 in {files.where}, but config.json does not say which "
                f"blocks share a scale; use the config.json that belongs to it, with a quantization_config of "
                f"quant_method fp8"
            )
        if len(shape) != 2:
            raise CheckpointError(
                f"tensor {self.name!r} of shape {list(shape)} has dtype F8_E4M3 in {files.where}, but only "
                f"matrices have blocks that share a scale; convert it to BF16"
            )
        _require(files, self.name, shape, ("F8_E4M3",))
        blocks = tuple(-(-size // block) for size, block in zip(shape, self.block, strict=True))
        _require(files, self._scale, blocks, ("F32",))

    def read(self, files: TensorFiles) -> Tensor:
        assert self.block is not None
        scales = files.read(self._scale).clone()
        values = files.read(self.name).float()
        rows, columns = values.shape
        scales = scales.repeat_interleave(self.block[1], dim=1)[:, :columns]
        for index, scale in enumerate(
            scales
        ):  # the scales of all rows at once would be a second matrix
            first = index * self.block[0]
            values[first : min(first + self.block[0], rows)] *= scale
        return values


@dataclass(frozen=True, slots=True)
class _Int4(Form):
    name: str
    group_size: int

    def names(self) -> tuple[str, ...]:
        return tuple(f"{self.name}_{part}" for part in ("packed", "scale", "shape"))

    def check(self, files: TensorFiles, shape: tuple[int, ...]) -> None:
        packed, scale, stated = self.names()
        rows, columns = shape
        if columns % self.group_size or columns % CODES_PER_WORD:
            raise CheckpointError(
                f"tensor {self.name!r} has {columns} columns in this model, which are no whole groups of "
                f"{self.group_size}; use the config that the checkpoint was made with"
            )
        _require(files, packed, (rows, columns // CODES_PER_WORD), ("I32",))
        _require(files, scale, (rows, columns // self.group_size), ("BF16",))
        _require(files, stated, (2,), ("I64", "I32"))
        if tuple(files.read(stated).tolist()) != shape:
            raise CheckpointError(
                f"tensor {stated!r} in {files.where} says {files.read(stated).tolist()}, but this model "
                f"needs {list(shape)}; use the config that the checkpoint was made with"
            )

    def read(self, files: TensorFiles) -> Tensor:
        packed, scale, _ = self.names()
        codes = unpacked_int4(files.read(packed))
        return int4_dequantised(codes, files.read(scale))


def int4_outgoing(name: str, matrix: Tensor, group_size: int) -> list[Outgoing]:
    """Return what an INT4 matrix is exported as: codes, scales and shape.

    Raises:
        ConfigError: its rows are no whole groups, or no whole words of codes.
        ContractError: when it is written: it holds a number that is not finite.
    """
    rows, columns = matrix.shape
    if group_size < 1 or columns % group_size or columns % CODES_PER_WORD:
        raise ConfigError(
            f"INT4 groups of {group_size} numbers do not fit {name!r}, whose rows have {columns}; choose a group size "
            f"that divides {columns}"
        )

    def codes() -> Tensor:
        return packed_int4(int4_quantised(matrix, group_size)[0])

    def scales() -> Tensor:
        scales = int4_quantised(matrix, group_size)[1]
        # A NaN or infinity of any number is in its group's scale; its code would be a number like any other.
        if not bool(scales.isfinite().all()):
            raise ContractError(
                f"{name!r} holds numbers that are not finite, which no INT4 code stands for; export a "
                f"checkpoint from before the training diverged"
            )
        return scales

    return [
        Outgoing(f"{name}_packed", rows * columns // 2, codes),
        Outgoing(f"{name}_scale", rows * columns // group_size * 2, scales),
        Outgoing(f"{name}_shape", 16, lambda: torch.tensor(matrix.shape)),
    ]


def is_routed_expert(name: str) -> bool:
    """Say whether a tensor is a matrix of one routed expert, which is what becomes INT4."""
    return _EXPERT.fullmatch(name) is not None


def _require(
    files: TensorFiles, name: str, shape: tuple[int, ...], dtypes: tuple[str, ...]
) -> None:
    stored = files.tensors.get(name)
    if stored is None:
        raise CheckpointError(
            f"{files.where} lacks the tensor {name!r} of dtype {dtypes[0]} and shape {list(shape)}, without "
            f"which its matrix cannot be read; copy the files again"
        )
    if stored.shape != shape:
        raise CheckpointError(
            f"tensor {name!r} has shape {list(stored.shape)} in {files.where}, but this model needs "
            f"{list(shape)}; use the config that the checkpoint was made with"
        )
    if stored.dtype not in dtypes:
        raise CheckpointError(
            f"tensor {name!r} has dtype {stored.dtype} in {files.where}, but {' or '.join(dtypes)} is "
            f"expected; convert it, or use the config.json that belongs to it"
        )
