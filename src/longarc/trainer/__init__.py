"""Segments and documents in, better weights out: packing, loss, optimizer step, checkpoints."""
