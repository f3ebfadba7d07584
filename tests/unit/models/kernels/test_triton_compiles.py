"""The Triton kernels compile for a GPU and fit on it, also where there is none: Triton brings its own assembler."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[4]
HOPPER_SHARED_BYTES = 227 << 10
"""What one program may have at most."""


@pytest.mark.slow
@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
def test_every_kernel_fits_a_gpu_at_the_size_of_glm_5(tmp_path):
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "0",
        "TRITON_CACHE_DIR": str(tmp_path),
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), *sys.path]),
    }
    script = Path(__file__).with_name("triton_compile.py")
    done = subprocess.run(
        [sys.executable, "-W", "error", str(script), "bfloat16", "512", "64"],
        env=environment, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    shared = json.loads(done.stdout)
    assert len(shared) == 7
    assert max(shared.values()) <= HOPPER_SHARED_BYTES, shared
