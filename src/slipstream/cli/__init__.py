"""The `slipstream` command. A command reads its configuration first and imports heavy code only then."""

from slipstream.cli.app import main

__all__ = ["main"]
