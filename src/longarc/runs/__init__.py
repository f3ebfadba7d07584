"""Everything on disk: the run directory, the trajectory ledger, checkpoints and metrics."""
