"""Errors by their class and the setting that they name, whatever their sentence is."""

import contextlib

import pytest

from slipstream.errors import ConfigError


@contextlib.contextmanager
def refuses(setting, kind=ConfigError):
    """Expects an error of this kind that names the setting first."""
    with pytest.raises(kind) as raised:
        yield raised
    assert raised.value.setting == setting, raised.value
