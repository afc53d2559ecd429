"""What the two hosts make of vLLM's engine, with a scripted one."""

import asyncio
import itertools
import os
import threading
import time
from types import SimpleNamespace

import pytest

from slipstream.inference.plugin import hosts
from slipstream.inference.plugin.hosts import AsyncHost, InProcessHost, LoadedAdapter, create_host
from slipstream.inference.plugin.patches import delivery

from .fakes import put

ADAPTER = LoadedAdapter("0.1-d-1", 5, "/adapter")


def output(id_, tokens, finished=True):
    return SimpleNamespace(request_id=id_, outputs=[SimpleNamespace(token_ids=tokens)], finished=finished)


class Processor:
    """As vLLM's output processor: requests by names of its own."""

    def __init__(self):
        self.request_states, self.external_req_ids, self.seen = {}, {}, []

    def add(self, id_, num_tokens=0):
        name = f"{id_}-internal"
        self.external_req_ids[id_] = [name]
        count = SimpleNamespace(tokens=num_tokens)
        count.detokenizer = SimpleNamespace(num_output_tokens=lambda: count.tokens)
        self.request_states[name] = count

    def process_outputs(self, outputs):
        self.seen.append(list(outputs))
        return outputs


class Engine(SimpleNamespace):
    """What both of vLLM's engines have."""

    def __init__(self, arguments):
        super().__init__(
            arguments=arguments,
            output_processor=Processor(),
            calls=[],
            model_config=SimpleNamespace(is_multimodal_model=False),
            answers={},
        )

    def get_tokenizer(self):
        return "theirs"

    def note(self, name, *arguments, **options):
        self.calls.append((name, *arguments, *options.items()))
        answer = self.answers.get(name)
        if isinstance(answer, Exception):
            raise answer
        return answer


class Stepping(Engine):
    """As `LLMEngine`: each step gives each request one token, and ends it after `length`."""

    def __init__(self, arguments):
        super().__init__(arguments)
        self.running, self.length, self.threads, self.steps = {}, {}, set(), 0
        self.gate, self.error = threading.Event(), None
        self.gate.set()
        self.is_held = lambda: bool(self.gate._cond._waiters)  # a step waits at the gate, which is closed
        core = SimpleNamespace(scheduler=SimpleNamespace(requests={}))
        self.engine_core = SimpleNamespace(engine_core=core)

    def add_request(self, id_, prompt, params, lora_request=None, priority=0):
        self.note("add_request", id_, prompt, params, lora_request, priority)
        self.running[id_], self.length[id_] = [], params
        self.output_processor.add(id_)
        request = SimpleNamespace(_output_token_ids=self.running[id_])
        self.engine_core.engine_core.scheduler.requests[f"{id_}-internal"] = request

    def has_unfinished_requests(self):
        return bool(self.running)

    def step(self):
        self.threads.add(threading.current_thread().name)
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
        self.engine_core.engine_core.scheduler.requests.pop(f"{id_}-internal")

    def abort_request(self, ids):
        self.note("abort_request", ids)
        for id_ in ids:
            self._end(id_)

    def __getattr__(self, name):
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda *arguments, **options: self.note(name, *arguments, **options)


class Awaited(Engine):
    """As `AsyncLLM`."""

    def __init__(self, arguments):
        super().__init__(arguments)
        self.errored, self.counts, self.streams = False, [{}, {}], {}
        queue = SimpleNamespace(left=0)
        queue.empty = lambda: queue.left == 0 or not self._take()
        self.engine_core = SimpleNamespace(outputs_queue=queue, core_engines=[0, 1], _call_utility_async=self._flush)
        self.engine_core.pause_scheduler_async = self._noted("pause_scheduler_async")
        self.on_flush = lambda: None

    def _take(self):
        self.engine_core.outputs_queue.left -= 1
        return True

    async def _flush(self, name, engine):
        self.calls.append((name, engine))
        self.on_flush()
        return self.counts[engine]

    def _noted(self, name):
        async def call(*arguments, **options):
            return self.note(name, *arguments, **options)

        return call

    async def generate(self, prompt, params, id_, lora_request=None, priority=0):
        self.note("generate", prompt, params, id_, lora_request, priority)
        self.output_processor.add(id_)
        for made in self.streams[id_]:
            if isinstance(made, asyncio.Event):
                await made.wait()
            else:
                yield made

    def shutdown(self):
        self.note("shutdown")

    def __getattr__(self, name):
        if name.startswith("_"):
            raise AttributeError(name)
        return self._noted(name)


@pytest.fixture(autouse=True)
def scripted(monkeypatch):
    state = SimpleNamespace(ended=[], is_cpu=True)

    def arguments(**given):
        return given

    put(
        monkeypatch,
        engine__arg_utils={"EngineArgs": arguments, "AsyncEngineArgs": arguments},
        v1__engine__llm_engine={"LLMEngine": SimpleNamespace(from_engine_args=Stepping)},
        v1__engine__async_llm={"AsyncLLM": SimpleNamespace(from_engine_args=Awaited)},
        lora__request={"LoRARequest": lambda *fields: ("lora", *fields)},
        platforms={"current_platform": SimpleNamespace(is_cpu=lambda: state.is_cpu)},
        distributed={
            "destroy_model_parallel": lambda: state.ended.append("model"),
            "destroy_distributed_environment": lambda: state.ended.append("environment"),
        },
    )
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    return state


@pytest.fixture
def host():
    made = InProcessHost({"model": "m"})
    yield made
    made._engine.gate.set()
    made.shutdown()
    made._thread.join(60)
    assert not made._thread.is_alive()


async def until(condition):
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.001)


def test_the_host_is_chosen_by_machine_and_workers(scripted):
    def kind(**arguments):
        own_process = arguments.pop("own_process", False)
        made = create_host(arguments, own_process=own_process)
        if isinstance(made, InProcessHost):
            made.shutdown()
        return type(made)

    assert kind() is kind(tensor_parallel_size=1, data_parallel_size=1) is InProcessHost
    assert kind(own_process=True) is kind(tensor_parallel_size=2) is kind(data_parallel_size=2) is AsyncHost
    assert kind(tensor_parallel_size=2, data_parallel_size=2) is AsyncHost
    scripted.is_cpu = False
    assert kind() is AsyncHost


async def test_requests_are_stepped_in_one_thread_and_answered_with_their_versions(host):
    assert os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert host._engine.arguments == {"model": "m", "distributed_executor_backend": "uni"}
    assert (host.tokenizer, host.is_dead) == ("theirs", False)
    await host.set_version("0.1")
    both = await asyncio.gather(host.generate("p", 3, "a"), host.generate("q", 1, "b", adapter=ADAPTER, is_urgent=True))
    assert [(len(made.outputs[0].token_ids), spans) for made, spans in both] == [(3, [(0, "0.1")]), (1, [(0, "0.1")])]
    assert host._engine.calls == [
        ("add_request", "a", "p", 3, None, 0),
        ("add_request", "b", "q", 1, ("lora", "0.1-d-1", 5, "/adapter"), -1),
    ]
    assert host._engine.threads == {"engine-steps"}
    assert host.clock.num_steps == host._engine.steps >= 3
    assert (host._labels.running, host._waiting) == ((), {})


async def test_a_paused_host_makes_no_step_and_counts_the_tokens_of_each_version(host, monkeypatch):
    ticks = []
    flushed = [SimpleNamespace(new_token_ids=[1])]
    monkeypatch.setattr(delivery, "flush", lambda core: ticks.append(host.clock.ignores_tokens) or flushed)
    await host.set_version("0.1")
    running = asyncio.create_task(host.generate("p", 10**9, "a"))
    await until(lambda: host._engine.steps > 2)
    await host.pause()
    steps, made = host._engine.steps, len(host._engine.running["a"])
    host._engine.length["a"] = made + 20
    before = host.clock.num_steps
    later = asyncio.create_task(host.generate("q", 2, "b"))
    await asyncio.sleep(0.01)
    assert (host._engine.steps, ticks, host.clock.ignores_tokens) == (steps, [True], False)
    assert (host._engine.output_processor.seen[-1], host.clock.num_steps) == (flushed, before)
    assert await host.num_tokens() == {"a": made, "b": 0}
    await host.set_version("0.2")
    await host.resume()
    _, spans = await running
    assert spans == [(0, "0.1"), (made, "0.2")]
    assert (await later)[1] == [(0, "0.2")]


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
    await until(lambda: ("abort_request", ["a"]) in host._engine.calls)
    assert host._labels.running == ()


async def test_what_vllm_refuses_or_a_cancelled_call_concerns_nobody_else(host):
    host._engine.answers["add_request"] = ValueError("too long")
    with pytest.raises(ValueError, match="too long"):
        await host.generate("p", 1, "a")
    host._engine.answers = {"collective_rpc": KeyError("method")}
    with pytest.raises(KeyError):
        await host.rpc("method")
    host._engine.gate.clear()
    running = asyncio.create_task(host.generate("p", 5, "b"))
    await until(host._engine.is_held)
    for _ in range(2):
        calling = asyncio.create_task(host.rpc("other"))
        await asyncio.sleep(0.005)
        calling.cancel()
    host._engine.gate.set()
    assert len((await running)[0].outputs[0].token_ids) == 5
    assert not [call for call in host._engine.calls if "other" in call], "nobody waits for it any more"


async def test_calls_of_the_workers_and_of_the_caches_are_handed_on(host, scripted):
    engine = host._engine
    engine.answers = {"collective_rpc": ["{}"], "reset_prefix_cache": 1, "add_lora": 1}
    assert await host.rpc("slipstream_load", "a", "b") == ["{}"]
    assert await host.reset_prefix_cache() is True
    assert await host.load_adapter(ADAPTER) is True
    await host.remove_adapter(ADAPTER)
    await host.sleep()
    await host.wake()
    await host.reset_encoder_cache()
    assert engine.calls == [
        ("collective_rpc", "slipstream_load", ("args", ("a", "b"))),
        ("reset_prefix_cache", True),
        ("add_lora", ("lora", "0.1-d-1", 5, "/adapter")),
        ("remove_lora", 5),
        ("sleep", ("level", 1)),
        ("wake_up",),
    ]
    engine.model_config.is_multimodal_model = True
    await host.reset_encoder_cache()
    assert engine.calls[-1] == ("reset_encoder_cache",)
    engine.answers = {}
    before = host.clock.num_steps
    engine.output_processor.process_outputs([SimpleNamespace(new_token_ids=[1])])
    assert host.clock.num_steps > before, "as steps with tokens do"
    assert await host.reset_prefix_cache() is False
    assert await host.load_adapter(ADAPTER) is False
    host.shutdown()
    assert scripted.ended == ["model", "environment"]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
async def test_when_a_step_raises_all_who_wait_are_told():
    host = InProcessHost({})
    host._engine.gate.clear()
    waiting = [asyncio.create_task(host.generate("p", 5, id_)) for id_ in "ab"]
    await until(lambda: len(host._engine.calls) >= 1)
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


async def test_an_engine_of_several_processes_answers_with_its_last_output():
    host = create_host({"model": "m"}, own_process=True)
    assert (host._engine.arguments, host.tokenizer, host.is_dead) == ({"model": "m"}, "theirs", False)
    await host.set_version("0.1")
    gate = asyncio.Event()
    host._engine.streams = {"a": [output("a", [1], False), gate, output("a", [1, 2])], "b": [output("b", [3])]}
    running = asyncio.create_task(host.generate("p", "params", "a", adapter=ADAPTER, is_urgent=True))
    await until(lambda: "a" in host._engine.output_processor.external_req_ids)
    host._engine.output_processor.request_states["a-internal"].tokens = 1
    assert await host.num_tokens() == {"a": 1}
    await host.set_version("0.2")
    gate.set()
    made, spans = await running
    assert (made.outputs[0].token_ids, spans) == ([1, 2], [(0, "0.1"), (1, "0.2")])
    assert (await host.generate("q", "params", "b"))[1] == [(0, "0.2")]
    assert host._engine.calls == [
        ("generate", "p", "params", "a", ("lora", "0.1-d-1", 5, "/adapter"), -1),
        ("generate", "q", "params", "b", None, 0),
    ]
    host._engine.output_processor.process_outputs([SimpleNamespace(new_token_ids=[1])])
    assert host.clock.num_steps == 1, "as steps with tokens do"
    host._engine.errored = 1
    assert host.is_dead is True


async def test_a_pause_of_several_processes_waits_until_all_tokens_have_come(monkeypatch):
    host = create_host({}, own_process=True)
    engine, processor = host._engine, host._engine.output_processor
    for id_ in "ab":
        processor.add(id_, 2)
    engine.counts = [{"a-internal": 3}, {"b-internal": 2}]
    engine.engine_core.outputs_queue.left = 5
    ignored = []

    def flushed():
        ignored.append((host.clock.ignores_tokens, engine.engine_core.outputs_queue.left))
        loop = asyncio.get_running_loop()
        loop.call_later(0.01, lambda: setattr(processor.request_states["a-internal"], "tokens", 3))

    engine.on_flush = flushed
    await host.pause()
    assert processor.request_states["a-internal"].tokens == 3
    assert ignored == [(True, 0)] * 2, "what was on its way came before, and counted"
    assert engine.calls == [
        ("pause_scheduler_async", ("mode", "keep"), ("clear_cache", False)),
        ("slipstream_flush", 0),
        ("slipstream_flush", 1),
    ]
    assert host.clock.ignores_tokens is False
    seconds = itertools.count()
    monkeypatch.setattr(hosts, "time", SimpleNamespace(monotonic=seconds.__next__))
    engine.counts[1] = {"b-internal": 9}
    with pytest.raises(RuntimeError, match="stand still: b-internal has 9, and 2 are known"):
        await host.pause()
    assert (host.clock.ignores_tokens, next(seconds)) == (False, 32), "after more than 30 seconds"
    await host.resume()
    assert engine.calls[-1] == ("resume_generation",)


async def test_calls_of_several_processes_are_handed_on():
    host = create_host({}, own_process=True)
    engine = host._engine
    engine.answers = {"collective_rpc": ["{}", "{}"], "add_lora": 1}
    assert await host.rpc("slipstream_load", "a") == ["{}", "{}"]
    assert [await host.load_adapter(ADAPTER), await host.reset_prefix_cache()] == [True, True]
    await host.remove_adapter(ADAPTER)
    await host.sleep()
    await host.wake()
    await host.reset_encoder_cache()
    assert engine.calls == [
        ("collective_rpc", "slipstream_load", ("args", ("a",))),
        ("add_lora", ("lora", "0.1-d-1", 5, "/adapter")),
        ("reset_prefix_cache", True),
        ("remove_lora", 5),
        ("sleep", ("level", 1)),
        ("wake_up",),
    ]
    engine.model_config.is_multimodal_model = True
    await host.reset_encoder_cache()
    host.shutdown()
    assert engine.calls[-2:] == [("reset_encoder_cache",), ("shutdown",)]
    engine.answers = {"reset_prefix_cache": False}
    assert [await host.load_adapter(ADAPTER), await host.reset_prefix_cache()] == [False, False]


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


def test_a_step_that_hangs_does_not_keep_the_process(host):
    assert host._thread.daemon is True


class Queue:
    """Of outputs that vLLM takes one by one and processes some turns later, as its task does."""

    def __init__(self, processor, number):
        self.processor, self.left = processor, number
        self.task = asyncio.create_task(self._take())

    def empty(self):
        return self.left == 0

    async def _take(self):
        while self.left:
            await asyncio.sleep(0)
            self.left -= 1
        for _ in range(10):
            await asyncio.sleep(0)
            self.processor.request_states["a-internal"].tokens += 1


@pytest.fixture
def turning(monkeypatch):
    """A host of several processes with one request; no time passes while it waits."""
    sleep, slept = asyncio.sleep, []
    monkeypatch.setattr(
        hosts, "asyncio", SimpleNamespace(sleep=lambda s: sleep(0, slept.append(s)), gather=asyncio.gather)
    )
    made = hosts.create_host({}, own_process=True)
    made._engine.output_processor.add("a", 0)
    made._labels.begin("a")
    yield made
    assert set(slept) <= {0}, "turns of the event loop are enough"


@pytest.mark.parametrize("number", [0, 5])
async def test_tokens_are_counted_once_all_that_were_sent_are_processed(number, turning):
    turning._engine.engine_core.outputs_queue = Queue(turning._engine.output_processor, number)
    assert await turning.num_tokens() == {"a": 10}


async def test_a_pause_ends_once_what_was_flushed_is_processed(turning):
    engine = turning._engine
    engine.counts, engine.engine_core.core_engines = [{"a-internal": 2}], [0]
    engine.engine_core.outputs_queue.left = 3
    engine.on_flush = lambda: setattr(engine.engine_core, "outputs_queue", Queue(engine.output_processor, 2))
    await turning.pause()
    assert engine.output_processor.request_states["a-internal"].tokens == 10
    assert turning.clock.ignores_tokens is False
