"""A folder or bucket of environments: `push` adds one, `pull` copies one out, and `located` finds the one of a run
file.

Nothing of an environment is imported before the digest of its unpacked files equals the requested one: neither
the registry nor its writers need to be trusted.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path

from slipstream.config.environment import EnvironmentConfig
from slipstream.config.python_objects import is_python_object
from slipstream.envs.store.content import digest_of, digest_of_folder, files_in, unpack, write_archive
from slipstream.envs.store.places import Archive, Registry
from slipstream.errors import ConfigError, DataError
from slipstream.processes.temporary import cache_root, private_folder, temporary

MAIN = "environment.py"
"""The file for a run to load."""
_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}"
_REFERENCE = re.compile(rf"({_NAME})@([0-9a-f]{{12,64}})(?::(\w+))?")
_FORM = "name@digest, with at least 12 digits of the digest that `slipstream env push` printed"


@dataclass(frozen=True)
class Reference:
    """`name@digest` or `name@digest:Class`. The digest may be its first digits."""

    name: str
    digest: str
    attribute: str = ""

    @property
    def shown(self) -> str:
        """With the first digits only."""
        return f"{self.name}@{self.digest:.12}"


@dataclass(frozen=True)
class Pushed:
    """An environment in a registry."""

    reference: str
    registry: str
    """Its address, as a run file names it."""
    archive: str
    """The path or address of its archive there."""
    num_files: int
    num_left_out: int
    is_new: bool


def reference_of(text: str) -> Reference:
    """Raises ConfigError for a text of another form."""
    found = _REFERENCE.fullmatch(text)
    if found is None:
        raise ConfigError(f"{text!r:.80} names no environment by digest: write {_FORM}")
    return Reference(found[1], found[2], found[3] or "")


def is_reference(name: str) -> bool:
    """Whether an `environment.name` is meant to be one."""
    return "@" in name and not is_python_object(name) and ".py" not in name and "/" not in name


def push(folder: Path, address: str, name: str = "") -> Pushed:
    """Add the environment in `folder` to a registry; a folder is made if it is not there. Raises ConfigError."""
    if not (folder / MAIN).is_file():
        raise ConfigError(f"{folder} has no {MAIN}, which is what a run loads: name the environment's file so")
    name = name or folder.resolve().name
    if not re.fullmatch(_NAME, name):
        raise ConfigError(f"{name!r} cannot be an environment's name: give letters, digits, '.', '_' and '-' as --name")
    files, num_left_out = files_in(folder, is_working=True)
    digest = digest_of(files)
    registry = Registry(address)
    try:
        with temporary("environment") as here:
            whole = [found for found in registry.archives(name, digest) if _is_whole(registry, found, here)]
            if whole:
                place = whole[0].place
            else:
                file = here / "archive.tar"
                write_archive(file, files)
                if digest_of(files) != digest:
                    raise ConfigError(f"{folder} was changed while it was pushed: push it again")
                place = registry.put(name, digest, file)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be packed ({error.strerror}): make room, or set TMPDIR") from error
    return Pushed(f"{name}@{digest}", registry.address, place, len(files), num_left_out, is_new=not whole)


def pull(text: str, address: str, folder: Path) -> Path:
    """Copy an environment into the new or empty `folder`, to work on it. Executes nothing. Raises ConfigError and
    DataError."""
    reference = reference_of(text)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} is not an empty folder: give a new one")
    registry = Registry(address)
    archive = _archive(reference, registry)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _unpacked(registry, archive, folder.parent) as whole:
            _check(reference, archive, whole)
            for path in whole.rglob("*"):
                path.chmod(0o755 if path.is_dir() else 0o644)
            whole.chmod(0o755)
            whole.replace(folder)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written ({error.strerror}): give another folder") from error
    return folder


def located(section: EnvironmentConfig) -> EnvironmentConfig:
    """The section with the path of a verified file in place of `name@digest`; any other as it is. Raises ConfigError
    and DataError."""
    names = [section.name, *(part.name for part in section.mixture.values())]
    if not any(map(is_reference, names)):
        if section.registry:
            raise ConfigError("environment.registry has no effect: environment.name is no name@digest: remove it")
        return section
    opened = functools.cache(lambda: Registry(section.registry)) if section.registry else None
    mixture = {
        name: part.model_copy(update={"name": _located(part.name, opened)}) for name, part in section.mixture.items()
    }
    name = _located(section.name, opened)
    return section.model_copy(update={"name": name, "registry": "", "mixture": mixture})


def _located(name: str, opened: Callable[[], Registry] | None) -> str:
    """The path of a reference's verified file; any other name as it is."""
    if not is_reference(name):
        return name
    reference = reference_of(name)
    file = _on_this_machine(reference, opened) / MAIN
    return f"{file}:{reference.attribute}" if reference.attribute else str(file)


def _on_this_machine(reference: Reference, opened: Callable[[], Registry] | None) -> Path:
    """The verified folder of this unpacked environment. `opened` opens the registry if the environment is not here
    yet."""
    try:
        cache = private_folder(cache_root(os.environ) / "environments")
    except (OSError, RuntimeError) as error:
        raise ConfigError(
            f"environment.name = {reference.shown} cannot be unpacked ({error}): set XDG_CACHE_HOME to a folder "
            "of your own"
        ) from error
    found = sorted(cache.glob(f"{reference.name}@{reference.digest}*"))
    if len(found) == 1:
        return _verified(found[0])
    if opened is None:
        raise ConfigError(
            f"environment.name = {reference.shown} is not on this machine: set environment.registry "
            "to the folder or bucket that it was pushed to"
        )
    registry = opened()
    archive = _archive(reference, registry)
    target = cache / f"{reference.name}@{archive.digest}"
    with _unpacked(registry, archive, cache) as whole:
        _check(reference, archive, whole)
        with contextlib.suppress(OSError):  # another run was faster
            whole.replace(target)
    return _verified(target)


def _verified(folder: Path) -> Path:
    """The folder of an unpacked environment. Raises DataError unless its content fits its name."""
    if digest_of_folder(folder) != folder.name.rpartition("@")[2]:
        raise DataError(f"{folder} was changed since it was unpacked: remove it, and it is unpacked again")
    return folder


def _archive(reference: Reference, registry: Registry) -> Archive:
    found = registry.archives(reference.name, reference.digest)
    if len(found) == 1:
        return found[0]
    if found:
        raise ConfigError(
            f"{registry} has {len(found)} environments {reference.name}@{reference.digest}...: give more digits"
        )
    others = registry.archives(reference.name)
    newest = f"its newest is {reference.name}@{others[-1].digest:.12}" if others else f"it has no {reference.name!r}"
    raise ConfigError(f"{registry} has no environment {reference.shown}: {newest}")


def _check(reference: Reference, archive: Archive, whole: Path) -> None:
    """Raise DataError unless an archive's content fits its name and the reference."""
    digest = digest_of_folder(whole)
    if digest != archive.digest or not digest.startswith(reference.digest):
        raise DataError(
            f"{archive.place} holds the environment of digest {digest:.12}, and {reference.shown} was "
            "asked for: it was damaged or replaced, push the environment again"
        )


def _is_whole(registry: Registry, archive: Archive, beside: Path) -> bool:
    """Whether the content of a registry's archive fits its name."""
    try:
        with _unpacked(registry, archive, beside) as whole:
            return digest_of_folder(whole) == archive.digest
    except DataError:
        return False


@contextlib.contextmanager
def _unpacked(registry: Registry, archive: Archive, beside: Path) -> Generator[Path]:
    """Inside, a folder below `beside` with an archive's content; it may be moved away."""
    with temporary("environment", beside) as here:
        file = registry.fetch(archive, here)
        whole = here / "whole"
        whole.mkdir(mode=0o700)
        unpack(file, whole, archive.place)
        yield whole
