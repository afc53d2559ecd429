"""From a run file, the command line and the environment to one checked config; and a config back to TOML."""
