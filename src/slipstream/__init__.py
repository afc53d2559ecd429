"""Slipstream post-trains language models: vLLM generates, PyTorch trains, new weights slip into the running engine."""

__version__ = "0.1.0"
