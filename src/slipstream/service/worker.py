"""The training process: `slipstream` in the folder of the first argument. It ends with its supervisor."""

from __future__ import annotations

import os
import runpy
import sys

from slipstream.processes import lifeline


def main() -> None:
    """Run the command of the other arguments."""
    lifeline.Parent()
    os.chdir(sys.argv.pop(1))
    runpy.run_module("slipstream.cli", run_name="__main__")


if __name__ == "__main__":
    main()
