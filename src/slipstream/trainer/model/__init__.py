"""The policy: a Transformers model that reads packed rows; LoRA, compilation, and what its layers keep."""
