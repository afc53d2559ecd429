"""Parses the run file and the command line into one checked config, and writes a config as TOML."""
