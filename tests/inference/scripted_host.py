"""A scripted vLLM for the engine's server, and what is asked of it."""

import asyncio
import json
from types import SimpleNamespace

import msgspec

from slipstream.inference.plugin.server import EngineServer
from slipstream.inference.plugin.token_clock import TokenClock
from slipstream.inference.settings import EngineSettings
from slipstream.records import GenerateRequest, ParameterSpec, SamplingParams, Ticket, Version
from slipstream.weights.bridges.single_copy import CudaHandle, SharedStorage, SharedWeights

SPEC = ParameterSpec("w", (4,), "float32", "00000000000000aa")
ADAPTER = ParameterSpec("w.lora_A.weight", (1, 4), "float32", "00000000000000bb")
FIRST, SECOND = Version(0, 1, "d1"), Version(0, 2, "d2")
GOOD = {"w": ("aa", 4, "p"), "w.lora_A.weight": ("bb", 4, "q")}


class Host(SimpleNamespace):
    """Notes what it is asked, and answers as two workers of tensor parallelism that hold all of everything."""

    def __init__(self):
        described = {"patches": ["flush"], "patches_left_out": {}, "files": ["/shm/a"], "head_dtypes": ["float32"]}
        super().__init__(
            calls=[],
            clock=TokenClock(),
            tokenizer="theirs",
            is_dead=False,
            shares=[GOOD, GOOD],
            stale=[],
            described=[described, {**described, "patches": [], "patches_left_out": {"flush": "old"}, "files": []}],
            counts={},
            resets=True,
            loads=True,
            gate=None,
            error=None,
            generated=[],
            scores=None,
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
            case "slipstream_share":
                handle = CudaHandle(0, b"", 8, 0, b"/counter", 0, b"", False)
                shared = SharedWeights((SharedStorage(8, cuda=handle),), {}, {"w": "why"})
                return [msgspec.json.encode(shared).decode()] * 2
        return ["null"] * 2

    async def generate(self, prompt, params, id_, adapter=None, is_urgent=False):
        self.generated.append((id_, prompt, params, adapter, is_urgent))
        try:
            if self.gate is not None:
                await self.gate.wait()
        except asyncio.CancelledError:
            self.calls.append(("abort", id_))
            raise
        if self.error:
            raise self.error
        out = SimpleNamespace(token_ids=[5], logprobs=[{5: SimpleNamespace(logprob=-1.0)}], finish_reason="stop")
        return SimpleNamespace(outputs=[out], prompt_logprobs=self.scores), [(0, "0.7")]

    async def pause(self):
        self.calls.append(("pause",))

    async def resume(self):
        self.calls.append(("resume",))

    async def reset_prefix_cache(self):
        self.calls.append(("reset_prefix_cache",))
        return self.resets

    async def reset_encoder_cache(self):
        self.calls.append(("reset_encoder_cache",))

    async def set_version(self, name):
        self.calls.append(("set_version", name))

    async def num_tokens(self):
        return self.counts

    async def sleep(self):
        self.calls.append(("sleep",))

    async def wake(self):
        self.calls.append(("wake",))

    async def load_adapter(self, adapter):
        self.calls.append(("load_adapter", adapter.id, adapter.path))
        return self.loads

    async def remove_adapter(self, adapter):
        self.calls.append(("remove_adapter", adapter.id))


def made(host=None, **settings):
    return EngineServer(EngineSettings("", "", "float32", 8, 1, **settings), host or Host())


def serving(host=None, **settings):
    server = made(host, **settings)
    server.service.started()
    return server


def disk(version=SECOND, bridge="disk", **fields):
    return Ticket(version, bridge, "/weights", (SPEC,), **fields)


def lora(version=SECOND):
    return Ticket(version, "lora", f"/adapter-{version.step}", (ADAPTER,), num_bytes=99, base=(SPEC,))


def plain(spec):
    """As it arrives at a worker."""
    return json.loads(msgspec.json.encode(spec))


def ask(id_="a", **fields):
    return GenerateRequest(id_, [1, 2], SamplingParams(4), timeout_s=30.0, **fields)


async def until(condition):
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0)
