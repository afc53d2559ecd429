"""Checks before any process starts: model files, vLLM options, characters missing in the tokenizer."""
