"""Generation: supervised vLLM processes, the client that talks to them, and a scripted stand-in for tests."""
