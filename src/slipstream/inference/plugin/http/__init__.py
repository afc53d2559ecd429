"""Inference for foreign clients: vLLM's own HTTP handlers over our engine, on a separate listener."""
