"""Where compilers keep what they have made, so that the next run need not make it again.

Guarantees: the folder is this user's alone (0700), because code is loaded from it; nothing in it is found by a process
for which it is not valid; a variable that is set decides for itself; without a folder that can be used everything goes
on, in the compilers' usual places. torch and Triton write whole files under names of their content, so that runs may
share it. It may be removed at any time.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import shutil
import stat
import sys
import tempfile
from collections.abc import Callable, Generator, Mapping
from pathlib import Path

from slipstream.runlog import versions

_PLACES = {"TORCHINDUCTOR_CACHE_DIR": "torch", "TRITON_CACHE_DIR": "triton", "VLLM_CACHE_ROOT": "vllm"}
_CARDS = Path("/proc/driver/nvidia/gpus")
_CPU = Path("/proc/cpuinfo")
_OF_CPU = ("vendor_id", "cpu family", "model", "model name", "flags", "Features", "CPU part")
_PRIVATE = 0o700


@contextlib.contextmanager
def lasting_caches(warn: Callable[[str], None]) -> Generator[None]:
    """Inside, compilers of this process and of those that it starts keep what they make; `warn` is told where that
    cannot be."""
    wanted = {name: folder for name, folder in _PLACES.items() if os.environ.get(name) in (None, "", _torchs_own(name))}
    try:
        root = private_folder(cache_root(os.environ) / key()) if wanted else None
    except (OSError, RuntimeError) as error:
        warn(f"what is compiled is not kept for the next run ({error}): set XDG_CACHE_HOME to a folder of your own")
        root = None
    if root is None:
        yield
        return
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update({name: str(root / folder) for name, folder in wanted.items()})
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def _torchs_own(name: str) -> str | None:
    """What torch itself has put into a variable that nobody had set: it does so once parts of it are imported."""
    own = sys.modules.get("torch._inductor.runtime.cache_dir_utils")
    return own.default_cache_dir() if own and name == "TORCHINDUCTOR_CACHE_DIR" else None


def cache_root(environment: Mapping[str, str]) -> Path:
    """The folder of all caches, by the rules of XDG. Raises RuntimeError where the user has no home."""
    given = environment.get("XDG_CACHE_HOME", "")
    return (Path(given) if given.startswith("/") else Path.home() / ".cache") / "slipstream"


def key() -> str:
    """A name that changes with whatever decides whether compiled code is valid: versions, compiler, CPU and cards."""
    found = [f"{name} {version}" for name, version in sorted(versions().items()) if name != "transformers"]
    found += [platform.machine(), _compiler(), *_described(_CPU, _OF_CPU), *_cards()]
    return hashlib.sha256("\n".join(found).encode()).hexdigest()[:16]


def private_folder(folder: Path) -> Path:
    """`folder`, and the one that it is in, made where they are not there. Raises OSError where one of them is not this
    user's alone (whoever owns the outer one could put another in its place), or takes no files."""
    folder.parent.parent.mkdir(parents=True, exist_ok=True, mode=_PRIVATE)
    for each in (folder.parent, folder):
        with contextlib.suppress(FileExistsError):
            each.mkdir(mode=_PRIVATE)
        state = each.lstat()
        if not stat.S_ISDIR(state.st_mode) or state.st_uid != os.geteuid() or stat.S_IMODE(state.st_mode) & 0o077:
            raise OSError(f"{each} is not a folder that only you may use")
    with tempfile.TemporaryFile(dir=folder):
        return folder


def _compiler() -> str:
    """The one that torch calls for a CPU, as far as its file tells it apart."""
    path = shutil.which(os.environ.get("CXX") or "g++") or shutil.which("clang++")
    if path is None:
        return ""
    real = Path(path).resolve()
    with contextlib.suppress(OSError):
        state = real.stat()
        return f"{real} {state.st_size} {state.st_mtime_ns}"
    return str(real)


def _cards() -> list[str]:
    """Names of the GPUs that the driver knows, each once; without importing torch."""
    found: set[str] = set()
    with contextlib.suppress(OSError):
        for card in _CARDS.iterdir():
            found.update(_described(card / "information", ("Model",)))
    return sorted(found)


def _described(file: Path, names: tuple[str, ...]) -> list[str]:
    """The first value of each of `names` in a file of `name : value` lines."""
    found: dict[str, str] = {}
    with contextlib.suppress(OSError):
        for line in file.read_text(errors="replace").split("\n"):
            name, _, value = line.partition(":")
            if name.strip() in names:
                found.setdefault(name.strip(), value.strip())
    return [f"{name} {found[name]}" for name in names if name in found]
