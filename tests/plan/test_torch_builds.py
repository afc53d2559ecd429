"""Packages that were built for another torch are named before anything imports them."""

import importlib.metadata
import platform

import pytest

from slipstream.errors import ConfigError
from slipstream.plan.preflight import torch_builds
from slipstream.plan.preflight.torch_builds import can_import, check_torch_builds


def test_builds_for_cuda_beside_a_torch_for_the_cpu_are_named(monkeypatch):
    def check(is_usable=False, **versions):
        def version_of(name):
            if name not in versions:
                raise importlib.metadata.PackageNotFoundError(name)
            return versions[name]

        with monkeypatch.context() as patched:
            patched.setattr(importlib.metadata, "version", version_of)
            patched.setattr(torch_builds, "can_import", lambda name: is_usable)
            check_torch_builds()

    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    with pytest.raises(ConfigError, match=r"torchvision 0\.28\.0 cannot .* `pip uninstall torchvision` "):
        check(torch="2.13.0+cpu", torchvision="0.28.0", torchaudio="2.11.0+cpu")
    check(torch="2.13.0+cpu", torchvision="0.28.0+cpu")
    check(torch="2.13.0", torchvision="0.28.0", torchcodec="0.17.0")
    check(torch="2.13.0+cpu")
    check(torch="2.13.0+cpu", torchvision="0.28.0", is_usable=True)
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    check(torch="2.13.0+cpu", torchvision="0.28.0")


def test_whether_a_package_can_be_imported_is_tried(tmp_path, monkeypatch):
    (tmp_path / "breaks_here.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')")
    (tmp_path / "works_here.py").write_text("import sys; assert sys.modules['torch'].is_short")
    (tmp_path / "torch.py").write_text("is_short = True")  # the whole one takes seconds
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert can_import("works_here")
    assert not can_import("breaks_here")
    assert not can_import("is_not_there")


def test_what_has_been_imported_here_is_not_tried_again(monkeypatch):
    monkeypatch.setattr(torch_builds.subprocess, "run", None)
    assert can_import("pytest")
