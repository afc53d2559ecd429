"""Modules in the place of vLLM's, for what needs no more of it than a name."""

import asyncio
import sys
from types import ModuleType

from slipstream.inference.engine import SupervisedEngine
from slipstream.inference.settings import EngineSettings


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


async def until(condition, pause_s=0.001):
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(pause_s)


def supervised(folder, tool_parser="", on_event=lambda kind, **fields: None, **options):
    """An engine whose process nobody has started."""
    settings = EngineSettings("", str(folder / "socket"), "float32", 8, 8, tool_parser=tool_parser)
    options = {"start_timeout_s": 120, "max_restarts": 1, **options}
    return SupervisedEngine(settings, folder / "log", on_event=on_event, **options)
