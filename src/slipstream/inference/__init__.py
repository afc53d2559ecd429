"""Generation: supervised vLLM processes, and their client."""
