"""Environment variables of this process for a time, which its children inherit."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Generator, Mapping


@contextlib.contextmanager
def variables_set(values: Mapping[str, str]) -> Generator[None]:
    """Sets environment variables within the block."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
