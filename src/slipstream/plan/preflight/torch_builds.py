"""Checks that torch and the packages with operators for it have builds for the same machine.

vLLM's CPU build asks for torch's CPU build and for any torchvision, torchaudio and torchcodec. If an index has CPU
builds of torch alone, pip takes CUDA builds of the others, and neither transformers nor vLLM can be imported.
"""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess
import sys

from slipstream.errors import ConfigError

_WITH_OPERATORS = ("torchvision", "torchaudio", "torchcodec")
_IMPORT_S = 120.0


def can_import(name: str) -> bool:
    """Whether the package can be imported after torch: a new process tries, unless this one has done it."""
    if name in sys.modules:
        return True
    command = [sys.executable, "-c", f"import torch, {name}"]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=_IMPORT_S
        )
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0


def check_torch_builds() -> None:
    """Raise ConfigError if packages for CUDA are beside a torch for the CPU, and cannot be imported.

    A CPU build's version ends with `+cpu`; a version without a suffix is the default build, for CUDA on x86-64.
    """
    versions: dict[str, str] = {}
    for name in ("torch", *_WITH_OPERATORS):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    torch = versions.pop("torch", "")
    if not torch.endswith("+cpu") or platform.machine() != "x86_64":
        return
    for_cuda = [name for name, version in versions.items() if "+" not in version and not can_import(name)]
    if for_cuda:
        found = ", ".join(f"{name} {versions[name]}" for name in for_cuda)
        raise ConfigError(
            f"{found} cannot be loaded beside torch {torch}, because they were built for CUDA: run "
            f"`pip uninstall {' '.join(for_cuda)}` (models of text need none of them), or install their CPU builds"
        )
