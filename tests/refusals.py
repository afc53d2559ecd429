"""Errors by their class and the setting that they name, whatever their sentence is."""

import pytest

from slipstream.errors import ConfigError


def refused(setting, kind=ConfigError):
    """Expects an error of this kind that names the setting first."""
    return pytest.raises(kind, check=lambda error: error.setting == setting)
