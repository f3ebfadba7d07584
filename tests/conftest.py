"""What every test shares: one compute thread that sleeps while it waits, as tests share the cores."""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("OMP_NUM_THREADS", "1")
