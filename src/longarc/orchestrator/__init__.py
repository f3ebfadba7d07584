"""Rollouts against optimizer steps: which task next, how far ahead, what is too old, what is noise."""
