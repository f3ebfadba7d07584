"""What every test shares: one compute thread that sleeps while it waits, as tests share the cores."""

import os
from pathlib import Path

ROOT = Path(__file__).parents[1]

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("OMP_NUM_THREADS", "1")
if not Path("/dev/nvidiactl").exists():
    # Read when triton is imported: without a GPU its kernels are interpreted.
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Processes that tests start import the tree under test, as pytest does, and not an installed package.
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
)
