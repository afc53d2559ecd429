"""Modules in the place of vLLM's, for what needs no more of it than a name."""

import sys
from types import ModuleType


def put(monkeypatch, **modules):
    """Have `import vllm.<name>` find these attributes and nothing of vLLM's own, for the test's duration; `__` stands
    for a dot."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "vllm" and getattr(module, "__spec__", None) is not None:
            monkeypatch.delitem(sys.modules, name)
    packages = {"vllm": {}}
    for name, attributes in modules.items():
        parts = ["vllm", *name.split("__")]
        for end in range(1, len(parts)):
            packages.setdefault(".".join(parts[:end]), {})
        packages[".".join(parts)] = attributes
    made = {}
    for name in sorted(packages):
        made[name] = ModuleType(name)
        made[name].__path__ = []
        vars(made[name]).update(packages[name])
        parent, _, leaf = name.rpartition(".")
        if parent:
            setattr(made[parent], leaf, made[name])
        monkeypatch.setitem(sys.modules, name, made[name])
    return made["vllm"]
