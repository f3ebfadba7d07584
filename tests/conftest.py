"""What every test shares: one compute thread that sleeps while it waits, as tests share the cores."""

import os
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("OMP_NUM_THREADS", "1")
if not Path("/dev/nvidiactl").exists():
    # Read when triton is imported: without a GPU its kernels are interpreted.
    os.environ.setdefault("TRITON_INTERPRET", "1")
