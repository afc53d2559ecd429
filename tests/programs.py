"""Programs of this repository that are no modules of a package."""

import importlib.util
import sys
from contextlib import contextmanager


@contextmanager
def program(path, name):
    """The program at this path as a module of this name."""
    spec = importlib.util.spec_from_file_location(name, path)
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        yield module
    finally:
        del sys.modules[name]
