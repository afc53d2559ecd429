"""Weight bridges: one file each, the trainer's publisher and the engine's receiver together."""
