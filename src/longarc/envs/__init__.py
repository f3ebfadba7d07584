"""Environments: the worlds that tasks happen in, the agent loop, the graders and the sandboxes."""
