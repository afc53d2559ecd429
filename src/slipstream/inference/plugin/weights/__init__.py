"""Weights inside vLLM's workers: the receiver, the maps of parameters to engine memory, LoRA adapters."""
