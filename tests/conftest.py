"""What every test shares: one compute thread that sleeps while it waits, as tests share the cores."""

import os
from pathlib import Path

from hypothesis import settings

ROOT = Path(__file__).parents[1]

# The same examples in every run, so that a change fails or passes for what it is. To look further:
# LONGARC_HYPOTHESIS=search, and what it finds becomes a test of its own.
settings.register_profile("repeatable", derandomize=True)
settings.register_profile("search", print_blob=True)
settings.load_profile(os.environ.get("LONGARC_HYPOTHESIS", "repeatable"))

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("OMP_NUM_THREADS", "1")
if not Path("/dev/nvidiactl").exists():
    # Read when triton is imported: without a GPU its kernels are interpreted.
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Processes that tests start import the tree under test, as pytest does, and not an installed package.
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
)
