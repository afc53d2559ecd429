"""What a package exports, imported when it is first asked for: children of a run import a package for one of its
modules, and soon."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def exported(package: str, names: Mapping[str, str], base: str = "") -> Callable[[str], Any]:
    """The `__getattr__` of a package (PEP 562). `names`: public names by module, separated by spaces; the module is
    relative to the package, or to `base`. The package repeats them below `if TYPE_CHECKING`."""
    modules = {name: module for module, of_module in names.items() for name in of_module.split()}

    def find(name: str) -> Any:
        if name in modules:
            return getattr(import_module(f"{base or package}.{modules[name]}"), name)
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return find
