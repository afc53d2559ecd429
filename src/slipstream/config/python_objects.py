"""Objects that a Python caller passes in place of a file's name: environments, rewards, rows.

A config names one as `python:LABEL@DIGEST`, where the digest is of its source or content. The object itself travels
pickled, by value for functions, closures and notebook cells: from the caller to the run's process over a descriptor
that only this child inherits, and from there over the pipe of each reward worker. A run folder holds the name alone,
so such a run is resumed from Python.
"""

from __future__ import annotations

import hashlib
import inspect
import pickle
import re
import sys
import sysconfig
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import cloudpickle
import msgspec

from slipstream.errors import ConfigError

PREFIX = "python:"
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
"""In the `repr` of an object: another one in each process."""


class PythonObject(msgspec.Struct, frozen=True):
    """A pickled object and the folders from which its modules are imported."""

    name: str
    data: bytes
    import_path: tuple[str, ...]


_given: dict[str, PythonObject] = {}


def is_python_object(name: str) -> bool:
    """Whether `name` stands for an object of a Python caller."""
    return name.startswith(PREFIX)


def pack(label: str, value: Any, *sources: Any) -> PythonObject:
    """`value`, pickled. Its name has the digest of `sources`: functions and classes by their source, plain values by
    their content. Raises ConfigError for what cannot be pickled."""
    text = _ADDRESS.sub("", "\0".join(map(_source, sources)))
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:12]
    try:
        with _by_value(sources):
            data = cloudpickle.dumps(value)
    except (pickle.PicklingError, TypeError, AttributeError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(
            f"{label}, or a function given with them, cannot be sent to the run's process ({reason}): open files, "
            "connections and locks inside the function, or give an environment's file by its path"
        ) from error
    return PythonObject(f"{PREFIX}{label}@{digest}", data, tuple(path for path in sys.path if path))


def give(item: PythonObject) -> None:
    """Make `item` known to this process under its name."""
    _given[item.name] = item


def given(name: str) -> PythonObject:
    """What was given under `name`. Raises ConfigError where nothing was."""
    if name not in _given:
        raise ConfigError(
            f"{name} was passed to Slipstream by a Python program, and only a Python program can pass it again, with "
            "the same arguments: slipstream.train(..., folder=..., resume=True), or slipstream.sft, to go on, and "
            "slipstream.evaluate(...) to evaluate"
        )
    return _given[name]


def load(name: str) -> Any:
    """A new copy of the object that `name` stands for. Raises ConfigError, also for what unpickling it raises."""
    item = given(name)
    sys.path.extend(path for path in item.import_path if path not in sys.path)
    try:
        return cloudpickle.loads(item.data)
    except Exception as error:  # the user's modules run here
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ConfigError(f"{name} cannot be loaded in another process ({reason})") from error


def _source(value: Any) -> str:
    if inspect.isfunction(value) or inspect.isclass(value) or inspect.ismethod(value):
        try:
            return inspect.getsource(value)
        except (OSError, TypeError):
            code = getattr(value, "__code__", None)
            return repr((code.co_code, code.co_consts)) if code is not None else value.__qualname__
    if isinstance(value, str | int | float | bool | list | tuple | dict | None):
        return msgspec.json.encode(value, enc_hook=repr).decode("utf-8", "surrogatepass")
    return _source(type(value))


@contextmanager
def _by_value(sources: tuple[Any, ...]) -> Generator[None]:
    """Inside, modules of the user's that `sources` come from are pickled by value, as `__main__` always is: the run's
    process need not find them. Modules of installed packages are imported there."""
    modules: dict[str, ModuleType] = {}
    for source in sources:
        owner = source if inspect.isroutine(source) or inspect.isclass(source) else type(source)
        module = sys.modules.get(getattr(owner, "__module__", "") or "")
        if module is not None and module.__name__ != "__main__" and _is_users(module):
            modules[module.__name__] = module
    for module in modules.values():
        cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        for module in modules.values():
            cloudpickle.unregister_pickle_by_value(module)


def _is_users(module: ModuleType) -> bool:
    file = getattr(module, "__file__", None)
    if file is None:
        return False
    paths = sysconfig.get_paths()
    installed = {Path(paths[name]).resolve() for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    installed.add(Path(__file__).resolve().parents[1])
    return not any(Path(file).resolve().is_relative_to(folder) for folder in installed)
