"""Programs that measure Slipstream; each module's docstring says how to run it."""
