"""Mixtures of experts: the engine's choice of experts, replayed in the trainer."""
