"""Secrets by name from the file `.env` in the folder of a submission.

Guarantees: a run reads the file at its start, so its values are stored nowhere else. It gets the variables by name in
its settings, and the keys of hub and tracker. The environment's own values win.
"""

from __future__ import annotations

import io
import os
from pathlib import Path

from slipstream.config import RunConfig
from slipstream.errors import ConfigError
from slipstream.regular_files import read_regular

ALWAYS = ("HF_TOKEN", "WANDB_API_KEY")


def secrets_of(config: RunConfig, folder: Path) -> dict[str, str]:
    """The variables of a run in `.env` of a folder, but for known ones. Raises ConfigError."""
    try:
        text = read_regular(folder / ".env").decode()
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{folder / '.env'} cannot be read ({error}): repair it, or remove it") from None
    try:
        from dotenv import dotenv_values
    except ModuleNotFoundError:
        raise ConfigError(f"{folder / '.env'} needs python-dotenv: pip install python-dotenv") from None

    names = {*ALWAYS, *(config.environment.variables if config.environment else ())}
    names |= {config.teacher.key_variable} if config.teacher else set()
    names |= {config.redis.password_variable} if config.redis else set()
    found = dotenv_values(stream=io.StringIO(text), interpolate=False)
    return {name: value for name, value in found.items() if value and name in names - os.environ.keys()}
