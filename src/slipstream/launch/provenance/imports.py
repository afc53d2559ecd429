"""Finds the modules that a Python file imports from its own folder, by reading the files and executing nothing.

What a program imports by a computed name, and files that it opens, are not seen.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path


def files_of(file: Path, root: Path | None = None, package: str = "", leaves_out: Path | None = None) -> list[Path]:
    """`file`, and the modules below `root`, by default its folder, that it imports directly or through one another.
    With `package` only modules of that package are followed, and modules in the folder `leaves_out` never."""
    root = (root or file.parent).resolve()
    found, waiting = dict[Path, None](), [file.resolve()]
    while waiting:
        path = waiting.pop()
        if path in found or (found and leaves_out is not None and path.is_relative_to(leaves_out)):
            continue
        found[path] = None
        for module in _imports(path, root):
            if not package or module[:1] == (package,):
                waiting += _files(module, root)
    first, *others = found
    return [first, *sorted(others)]


def _imports(path: Path, root: Path) -> Iterator[tuple[str, ...]]:
    """Names of modules that a file may import, those inside functions included; none where it is no Python."""
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return
    package = path.parent.relative_to(root).parts if path.is_relative_to(root) else ()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield tuple(alias.name.split("."))
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = (*base, *(node.module.split(".") if node.module else ()))
            for alias in node.names:
                yield (*module, alias.name)


def _files(module: tuple[str, ...], root: Path) -> Iterator[Path]:
    """The files that importing a module, or a name out of one, executes below `root`."""
    if not module or module[0] in sys.stdlib_module_names:  # the folder comes last in the search path
        return
    folder = root
    for part in module:
        for candidate in (folder / part / "__init__.py", folder / f"{part}.py"):
            if candidate.is_file():
                yield candidate.resolve()
                break
        folder = folder / part
