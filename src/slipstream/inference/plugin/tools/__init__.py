"""Tool calls: read out of finished completions with vLLM's tool parsers, in the engine's process."""
