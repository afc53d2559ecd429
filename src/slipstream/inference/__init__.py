"""Generation: the supervised vLLM process, the client that talks to it, and a scripted stand-in for tests."""
