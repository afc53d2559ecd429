"""Patches of vLLM's classes: a table of them (`patch_table`), and one module for each subject."""
