"""The engine's side of a weight update: where each parameter lies in vLLM, and what receives new values."""
