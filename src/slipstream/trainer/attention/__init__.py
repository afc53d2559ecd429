"""Attention over packed rows: sequences of one row do not attend to one another."""
