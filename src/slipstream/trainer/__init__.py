"""The learner: packed batches, objectives, fp32 masters, checkpoints. Knows nothing of the engine."""
