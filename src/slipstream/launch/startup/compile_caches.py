"""Persistent compile caches of torch, Triton and vLLM, so that the next run finds what this one has compiled.

Bytecode of large packages is kept as well, if Python keeps none: a container has PYTHONDONTWRITEBYTECODE, or the user
may not write to the packages. Each process would compile them, for half of the time of vLLM's import. This holds for
this process and its engines. Reward workers and the user's files follow Python's own rules.

Guarantees: the folder belongs to this user alone (mode 0700), because code is loaded from it. Other versions and
devices use other folders. Variables that are set take precedence. Without a usable folder it is temporary: another user
may have made the compilers' usual ones. Runs may share the folder, since torch and Triton name files after their
content, and write them whole or under a lock; so does Python, which checks bytecode by its source's time and size. The
folder may be removed at any time.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import platform
import shutil
import sys
from collections.abc import Callable, Generator
from pathlib import Path

from slipstream.processes.libraries import remove_unfinished
from slipstream.processes.temporary import cache_root, private_folder, temporary
from slipstream.processes.variables import variables_set
from slipstream.runlog import versions

_LARGE = ("torch", "transformers", "vllm")
"""Packages imported by a run's processes, with thousands of modules."""
_FOLDERS = {"TORCHINDUCTOR_CACHE_DIR": "torch", "TRITON_CACHE_DIR": "triton", "VLLM_CACHE_ROOT": "vllm"}
_GPUS = Path("/proc/driver/nvidia/gpus")
_CPUINFO = Path("/proc/cpuinfo")
_CPU_FIELDS = ("vendor_id", "cpu family", "model", "model name", "flags", "Features", "CPU part")


@contextlib.contextmanager
def persistent_caches(warn: Callable[[str], None]) -> Generator[None]:
    """Inside, this process and its children use the persistent compile caches; `warn` is called where that is not
    possible."""
    unset = [name for name in _FOLDERS if os.environ.get(name) in (None, "", _default_of_torch(name))]
    with contextlib.ExitStack() as stack:
        is_slow = sys.pycache_prefix is None and any(map(_is_compiled_again, _LARGE))
        root = _root(warn, stack) if unset or is_slow else None
        if root is not None:
            stack.enter_context(variables_set({name: str(root / _FOLDERS[name]) for name in unset}))
        if root is not None and is_slow:
            stack.enter_context(_bytecode_kept(root / f"python-{versions().get('transformers')}"))
        if folder := os.environ.get("TORCHINDUCTOR_CACHE_DIR"):
            remove_unfinished(Path(folder))
        yield


def _root(warn: Callable[[str], None], stack: contextlib.ExitStack) -> Path | None:
    try:
        return private_folder(cache_root(os.environ) / key())
    except (OSError, RuntimeError) as error:
        warn(f"compiled code is not kept for the next run ({error}): set XDG_CACHE_HOME to a folder of your own")
    with contextlib.suppress(OSError):
        return stack.enter_context(temporary("compiled"))
    return None


def _is_compiled_again(package: str) -> bool:
    """Whether each process compiles a package's modules, as there is no bytecode and Python writes none."""
    spec = None
    with contextlib.suppress(ImportError, ValueError):
        spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None or spec.cached is None or Path(spec.cached).exists():
        return False
    return sys.dont_write_bytecode or not os.access(Path(spec.origin).parent, os.W_OK)


@contextlib.contextmanager
def _bytecode_kept(folder: Path) -> Generator[None]:
    """Inside, this process keeps bytecode in `folder`, and so do its engines (`inference.preimport`)."""
    before = sys.pycache_prefix, sys.dont_write_bytecode
    sys.pycache_prefix, sys.dont_write_bytecode = str(folder), False
    try:
        yield
    finally:
        sys.pycache_prefix, sys.dont_write_bytecode = before


def _default_of_torch(name: str) -> str | None:
    """The value that torch itself gives a variable that is not set, once its compiler is imported."""
    module = sys.modules.get("torch._inductor.runtime.cache_dir_utils")
    return module.default_cache_dir() if module and name == "TORCHINDUCTOR_CACHE_DIR" else None


def key() -> str:
    """A name that changes with everything that compiled code depends on: software versions, compiler, CPU and GPUs."""
    found = [f"{name} {version}" for name, version in sorted(versions().items()) if name != "transformers"]
    found += [platform.machine(), _compiler(), *_values_of(_CPUINFO, _CPU_FIELDS), *_gpu_names()]
    return hashlib.sha256("\n".join(found).encode()).hexdigest()[:16]


def _compiler() -> str:
    """Identify the C++ compiler that torch calls for CPU code by path, size and modification time."""
    path = shutil.which(os.environ.get("CXX") or "g++") or shutil.which("clang++")
    if path is None:
        return ""
    real = Path(path).resolve()
    with contextlib.suppress(OSError):
        state = real.stat()
        return f"{real} {state.st_size} {state.st_mtime_ns}"
    return str(real)


def _gpu_names() -> list[str]:
    """Names of the driver's GPUs, each once; without importing torch."""
    found: set[str] = set()
    with contextlib.suppress(OSError):
        for gpu in _GPUS.iterdir():
            found.update(_values_of(gpu / "information", ("Model",)))
    return sorted(found)


def _values_of(file: Path, names: tuple[str, ...]) -> list[str]:
    """Read the first value of each of `names` from a file of `name : value` lines."""
    found: dict[str, str] = {}
    with contextlib.suppress(OSError):
        for line in file.read_text(errors="replace").split("\n"):
            name, _, value = line.partition(":")
            if name.strip() in names:
                found.setdefault(name.strip(), value.strip())
    return [f"{name} {found[name]}" for name in names if name in found]
