"""Compiles every Triton kernel for a GPU that need not be there; run in a process without TRITON_INTERPRET.

Prints one line for each kernel and dtype: its name, the shared memory and the registers that spill.
"""

import re

import triton
from triton import language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from longarc.models.kernels.triton import attention, selection

HOPPER = GPUTarget("cuda", 90, 32)
SHARED_BYTES = 227 << 10
"""What one program may have at most."""
POINTERS = {"rows": "i64", "counts": "i64", "order": "i64", "starts": "i64", "key_rows": "i64", "first_keys": "i64",
            "selected": "i64", "log_sums": "sum", "deltas": "sum", "grad_keys": "sum", "grad_table": "sum",
            "scores": "sum", "weight": "sum"}  # fmt: skip
INTEGERS = ("num_heads", "num_selected", "first_query", "room")


def compile_kernel(kernel, dtype, constants):
    """Compile one kernel with inputs of a dtype."""
    wide = "fp64" if dtype == "fp64" else "fp32"
    signature = {}
    for name in kernel.arg_names:
        if name in constants:
            signature[name] = "constexpr"
        elif name in INTEGERS:
            signature[name] = "i32"
        else:
            kind = POINTERS.get(name, dtype)
            signature[name] = "*" + (wide if kind == "sum" else kind)
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    return triton.compile(ASTSource(kernel, signature, constexprs=constants), target=HOPPER)


def main():
    for dtype in ("fp32", "bf16", "fp64"):
        wide = tl.float64 if dtype == "fp64" else tl.float32
        attend = dict(SCALE=0.0625, SUM=wide, VALUE=512, REST=64, VALUE_BLOCK=512, REST_BLOCK=64, HEADS=32, KEYS=32,
                      WIDTH=576, BLOCK=128)  # fmt: skip
        choose = dict(SUM=wide, WIDTH=128, WIDTH_BLOCK=128, HEADS=32, KEYS=128, BITS=64 if dtype == "fp64" else 32,
                      UINT=tl.uint64 if dtype == "fp64" else tl.uint32)  # fmt: skip
        for module, names, constants in (
            (attention, ("_attend", "_mass", "_to_query", "_to_keys", "_sum_rows"), attend),
            (selection, ("_score", "_choose"), choose),
        ):
            for name in names:
                made = compile_kernel(getattr(module, name), dtype, constants)
                print(name, dtype, made.metadata.shared, flush=True)


if __name__ == "__main__":
    main()
