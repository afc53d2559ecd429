"""A step that fails, a pause that lacks tokens, an answer that nobody waits for: the host of an engine in its own
process, with a scripted vLLM. All else real engines show (tests/engine)."""

import asyncio
import threading
import time
from types import SimpleNamespace

import pytest

from slipstream.inference.plugin.hosts import InProcessHost
from slipstream.inference.plugin.patches import delivery

from .fakes import put, until


def output(id_, tokens, finished=True):
    return SimpleNamespace(request_id=id_, outputs=[SimpleNamespace(token_ids=tokens)], finished=finished)


class Engine:
    """As `LLMEngine`: each step gives each request one token, and ends it after so many as its parameters say."""

    def __init__(self, arguments):
        self.running, self.length, self.steps, self.aborted, self.error = {}, {}, 0, [], None
        self.gate = threading.Event()
        self.gate.set()
        self.is_held = lambda: bool(self.gate._cond._waiters)  # a step waits at the gate, which is closed
        self.scheduler = SimpleNamespace(requests={})
        self.engine_core = SimpleNamespace(engine_core=SimpleNamespace(scheduler=self.scheduler))
        self.output_processor = SimpleNamespace(
            request_states={}, external_req_ids={}, process_outputs=lambda outputs: outputs
        )

    def add_request(self, id_, prompt, params, lora_request=None, priority=0):
        name, count = f"{id_}-internal", SimpleNamespace(tokens=0)
        self.running[id_], self.length[id_] = [], params
        self.output_processor.external_req_ids[id_] = [name]
        self.output_processor.request_states[name] = count
        count.detokenizer = SimpleNamespace(num_output_tokens=lambda: count.tokens)
        self.scheduler.requests[name] = SimpleNamespace(_output_token_ids=self.running[id_])

    def has_unfinished_requests(self):
        return bool(self.running)

    def step(self):
        if self.running:  # calls are followed by a step without requests
            assert self.gate.wait(60)
        self.steps += 1
        if self.error:
            raise self.error
        made = []
        for id_, tokens in list(self.running.items()):
            tokens.append(self.steps)
            self.output_processor.request_states[f"{id_}-internal"].tokens += 1
            finished = len(tokens) == self.length[id_]
            made.append(output(id_, tokens, finished))
            if finished:
                self._end(id_)
        time.sleep(0.001)
        return made

    def _end(self, id_):
        del self.running[id_]
        self.output_processor.request_states.pop(f"{id_}-internal")
        self.scheduler.requests.pop(f"{id_}-internal")

    def abort_request(self, ids):
        self.aborted += ids
        for id_ in ids:
            self._end(id_)


@pytest.fixture(autouse=True)
def scripted(monkeypatch):
    put(
        monkeypatch,
        engine__arg_utils={"EngineArgs": dict},
        v1__engine__llm_engine={"LLMEngine": SimpleNamespace(from_engine_args=Engine)},
        distributed={"destroy_model_parallel": lambda: None, "destroy_distributed_environment": lambda: None},
    )
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")


@pytest.fixture
def host():
    made = InProcessHost({"model": "m"})
    yield made
    made._engine.gate.set()
    made.shutdown()
    made._thread.join(60)
    assert not made._thread.is_alive()


async def test_a_pause_with_tokens_that_did_not_arrive_fails(host, monkeypatch):
    monkeypatch.setattr(delivery, "flush", lambda core: [])
    running = asyncio.create_task(host.generate("p", 10**9, "a"))
    await until(lambda: host._engine.steps > 2)
    host._engine.gate.clear()
    await until(host._engine.is_held)
    host._engine.output_processor.request_states["a-internal"].tokens -= 1
    pausing = asyncio.create_task(host.pause())
    await asyncio.sleep(0)
    host._engine.gate.set()
    with pytest.raises(RuntimeError, match="count other tokens of requests that stand still: a-internal has"):
        await pausing
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await host.resume()
    await until(lambda: host._engine.aborted == ["a"])
    assert host._labels.running == ()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
async def test_when_a_step_raises_all_who_wait_are_told():
    host = InProcessHost({})
    host._engine.gate.clear()
    waiting = [asyncio.create_task(host.generate("p", 5, id_)) for id_ in "ab"]
    await until(lambda: host._engine.running)
    host._engine.error = RuntimeError("CUDA")
    host._engine.gate.set()
    found = await asyncio.gather(*waiting[:1], return_exceptions=True)
    assert "the engine died: RuntimeError('CUDA')" in str(found[0])
    await until(lambda: not host._thread.is_alive())
    assert host.is_dead
    waiting[1].cancel()
    for call in (host.rpc("method"), host.generate("p", 5, "c")):
        with pytest.raises(RuntimeError, match=r"the engine died: RuntimeError\('CUDA'\)"):
            await call


async def test_an_answer_that_nobody_waits_for_any_more_ends_nothing_else(host):
    engine = host._engine
    engine.gate.clear()
    running = asyncio.create_task(host.generate("p", 1, "a"))
    await until(engine.is_held)  # within the step that ends it
    before = engine.step
    engine.step = lambda: [output("unknown", [1]), *before()]
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    engine.gate.set()
    made, spans = await host.generate("q", 2, "b")
    assert (len(made.outputs[0].token_ids), spans) == (2, [(0, "")])
    assert not host.is_dead
    assert (host._waiting, host._labels.running) == ({}, ())
