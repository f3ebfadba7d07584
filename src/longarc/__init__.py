"""LongArc: train long-horizon agentic, reasoning and coding models, from pre-training to agentic RL."""

__version__ = "0.1.0"
