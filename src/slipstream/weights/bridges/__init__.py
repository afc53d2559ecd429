"""Weight bridges: one module each, with the trainer's publisher and the engine's half."""
