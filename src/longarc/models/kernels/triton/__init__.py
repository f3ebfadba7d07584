"""Triton kernels of sparse attention and key selection; imported only where triton is installed."""
