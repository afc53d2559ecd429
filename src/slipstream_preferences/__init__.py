"""Learning from judged completions: the section [preferences] (docs/preferences.md)."""
