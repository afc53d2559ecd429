"""Modules in the place of vLLM's, for what needs no more of it than a name, and a host in the place of vLLM."""

import asyncio
import contextlib
import json
import sys
from types import ModuleType, SimpleNamespace

from slipstream.inference.engine import SupervisedEngine
from slipstream.inference.plugin.token_clock import TokenClock
from slipstream.inference.settings import EngineSettings

GOOD = {"w": ("aa", 4, "p"), "w.lora_A.weight": ("bb", 4, "q")}


class Host(SimpleNamespace):
    """Notes what it is asked, and answers as two workers of tensor parallelism that hold all of everything. It computes
    `num_places` requests at once, urgent ones always, each in `seconds` or, where there is one, until `ends`."""

    def __init__(self, seconds=0.0, num_places=100):
        described = {"patches": ["flush"], "patches_left_out": {}, "files": ["/shm/a"], "head_dtypes": ["float32"]}
        super().__init__(
            calls=[],
            clock=TokenClock(),
            is_dead=False,
            hangs=False,
            shares=[GOOD, GOOD],
            stale=[],
            described=[described, {**described, "patches": [], "patches_left_out": {"flush": "old"}, "files": []}],
            counts={},
            resets=True,
            loads=True,
            seconds=seconds,
            places=asyncio.Semaphore(num_places),
            ends=None,
            error=None,
            generated=[],
            output={"token_ids": [5], "logprobs": [{5: SimpleNamespace(logprob=-1.0)}]},
        )
        begin = self.clock.begin
        self.clock.begin = lambda: begin() or self.calls.append(("begin",))

    @property
    def names(self):
        return [call[0] for call in self.calls]

    async def rpc(self, method, *args):
        self.calls.append((method.removeprefix("slipstream_"), *map(json.loads, args)))
        match method:
            case "slipstream_describe":
                return [json.dumps(each) for each in self.described]
            case "slipstream_load":
                return [json.dumps({"seconds": s, "num_bytes": n}) for s, n in ((0.5, 10), (2.0, 30))]
            case "slipstream_fingerprint" | "slipstream_fingerprint_adapter":
                await asyncio.sleep(0)
                if self.error:
                    raise self.error
                return [json.dumps({"shares": each, "stale": self.stale, "memory_bytes": 7}) for each in self.shares]
        return ["null"] * 2

    async def generate(self, prompt, params, id_, adapter=None, is_urgent=False):
        async with contextlib.nullcontext() if is_urgent else self.places:
            self.generated.append((id_, prompt, params, adapter, is_urgent))
            try:
                await (self.ends.wait() if self.ends else asyncio.sleep(self.seconds))
            except asyncio.CancelledError:
                self.calls.append(("abort", id_))
                raise
        if self.error:
            raise self.error
        self.clock.tick()
        out = SimpleNamespace(finish_reason="stop", **self.output)
        return SimpleNamespace(outputs=[out], prompt_logprobs=None), [(0, "0.7")]

    def __getattr__(self, name):
        async def call(*arguments):
            self.calls.append((name, *arguments))

        return call

    async def resume(self):
        self.calls.append(("resume",))
        if self.hangs:
            self.hangs = False
            await asyncio.sleep(60)

    async def reset_prefix_cache(self):
        self.calls.append(("reset_prefix_cache",))
        return self.resets

    async def num_tokens(self):
        return self.counts

    async def load_adapter(self, adapter):
        self.calls.append(("load_adapter", adapter.id, adapter.path))
        return self.loads

    async def remove_adapter(self, adapter):
        self.calls.append(("remove_adapter", adapter.id))


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
    settings = EngineSettings("", "float32", 8, 8, tool_parser=tool_parser)
    options = {"start_timeout_s": 120, "max_restarts": 1, **options}
    return SupervisedEngine(settings, folder / "log", on_event=on_event, **options)
