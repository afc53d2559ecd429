"""Inference for foreign clients: vLLM's own HTTP handlers over our engine, on a listener of their own.

Imported only by an engine that has such a listener: everything here imports vLLM's front end.
"""
