"""The policy: a Transformers model for packed rows; LoRA, compilation, and the activations kept by its layers."""
