"""The training process: `slipstream` in the folder of the first argument. It ends with its supervisor."""

from __future__ import annotations

import contextlib
import os
import runpy
import sys
from pathlib import Path

from slipstream.config import load_config
from slipstream.errors import SlipstreamError
from slipstream.processes import lifeline
from slipstream.service.dotenv_file import secrets_of


def main() -> None:
    """Run the command of the other arguments."""
    lifeline.Parent()
    os.chdir(sys.argv.pop(1))
    with contextlib.suppress(SlipstreamError):  # the command says it
        os.environ.update(secrets_of(load_config(Path(sys.argv[2])).config, Path.cwd()))
    runpy.run_module("slipstream.cli", run_name="__main__")


if __name__ == "__main__":
    main()
