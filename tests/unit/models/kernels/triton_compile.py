"""Compiles the Triton kernels for a GPU that need not be there; needs a process without TRITON_INTERPRET.

Prints for each kernel its name and the memory that its programs share [bytes]. Usage: triton_compile.py DTYPE VALUE REST
"""

import json
import sys

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from longarc.models.kernels.triton import attention, selection

HOPPER = GPUTarget("cuda", 90, 32)
LONG = ("rows", "counts", "order", "starts", "key_rows", "first_keys", "selected")
WIDE = ("log_sums", "deltas", "grad_keys", "grad_table", "scores", "weight")
INTEGERS = ("num_heads", "num_selected", "first_query", "room")
NAMES = {torch.bfloat16: "bf16", torch.float32: "fp32", torch.float64: "fp64"}


def type_of(name, dtype):
    """Return the type of an argument in Triton's words."""
    if name in INTEGERS:
        return "i32"
    if name in LONG:
        return "*i64"
    return "*" + NAMES[torch.promote_types(dtype, torch.float32) if name in WIDE else dtype]


def shared_bytes(kernel, dtype, constants):
    """Compile one kernel; ``constants`` may have more than it takes."""
    options = {"enable_fp_fusion": constants["enable_fp_fusion"]}
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    signature = {
        name: "constexpr" if name in constants else type_of(name, dtype)
        for name in kernel.arg_names
    }
    source = ASTSource(kernel, signature, constexprs=constants)
    return triton.compile(source, target=HOPPER, options=options).metadata.shared


def main():
    dtype, value, rest = getattr(torch, sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    sizes = attention.Sizes(
        num_queries=100,
        num_heads=64,
        num_selected=2048,
        value=value,
        rest=rest,
        scale=0.0625,
        dtype=dtype,
    )
    constants = {**sizes.constants(), "WIDTH": value + rest, "BLOCK": 128}
    kernels = [
        getattr(attention, f"_{name}")
        for name in ("attend", "mass", "to_query", "to_keys", "sum_rows")
    ]
    found = {kernel.__name__: shared_bytes(kernel, dtype, constants) for kernel in kernels}
    constants = selection.selection_constants(num_heads=32, width=128, dtype=dtype)
    for kernel in (selection._score, selection._choose):
        found[kernel.__name__] = shared_bytes(kernel, dtype, constants)
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main()
