"""Checks before any process starts: model files, vLLM options, characters that the tokenizer lacks."""
