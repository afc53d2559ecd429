"""Processes of a run: how they start, speak, notice each other's death or stall, and what they leave."""
