"""Generation: supervised vLLM processes, and the client that talks to them."""
