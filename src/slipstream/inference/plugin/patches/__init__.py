"""Changes to vLLM's own code: one table of them, and a module for each."""
