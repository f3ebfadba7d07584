"""Isolated boxes for untrusted commands, built on bubblewrap and one small exec server."""
