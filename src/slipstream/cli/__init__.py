"""The `slipstream` command. A command reads its configuration first and imports heavy code only then."""

try:
    from slipstream.cli.app import main
except KeyboardInterrupt:  # Ctrl-C while the command is imported
    raise SystemExit(130) from None

__all__ = ["main"]
