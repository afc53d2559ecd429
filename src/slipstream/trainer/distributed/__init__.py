"""Training over several ranks: FSDP2, the commands of rank 0, and weights in the engine's own memory."""
