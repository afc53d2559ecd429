"""Packages that were built for another torch are named before anything imports them."""

import importlib.metadata
import platform

import pytest

from slipstream.errors import ConfigError
from slipstream.launch.preflight.torch_builds import check_torch_builds


def check(**versions):
    def version_of(name):
        if name not in versions:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    check_torch_builds(version_of)


def test_builds_for_cuda_beside_a_torch_for_the_cpu_are_named(monkeypatch):
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    with pytest.raises(ConfigError, match=r"torchvision 0\.28\.0 cannot .* `pip uninstall torchvision` "):
        check(torch="2.13.0+cpu", torchvision="0.28.0", torchaudio="2.11.0+cpu")
    check(torch="2.13.0+cpu", torchvision="0.28.0+cpu")
    check(torch="2.13.0", torchvision="0.28.0", torchcodec="0.17.0")
    check(torch="2.13.0+cpu")
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    check(torch="2.13.0+cpu", torchvision="0.28.0")
