"""Hosts of vLLM's engine inside the engine's process: `InProcessHost` (`LLMEngine`) and `AsyncHost` (`AsyncLLM`).

`InProcessHost` (CPU, one worker): engine core, worker and server share one process, and a thread of ours calls
`LLMEngine.step`. vLLM as shipped starts three processes, each of which imports everything again; on two cores that is
most of the start-up time, and every token crosses two process boundaries. RPCs to the worker run between two steps.

`AsyncHost` (GPU, or several workers): vLLM's own `AsyncLLM`, whose engine core has a process to itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Hashable, Iterable
from concurrent.futures import Future
from copy import copy
from dataclasses import dataclass
from typing import Any

from slipstream.inference.plugin.patches import delivery
from slipstream.inference.plugin.patches.undelivered import ReceivedTokens, token_counts
from slipstream.inference.plugin.token_clock import TokenClock
from slipstream.inference.plugin.version_labels import Spans, TokenLabels

_LOOP_TURNS = 64
"""Turns of the event loop within which vLLM processes one step's outputs (128 requests or more in each turn) and the
callers of finished requests run."""
_FLUSH_S = 30.0
_MISSING_TOKENS = "the engine core and the server count other tokens of requests that stand still:"


@dataclass(frozen=True)
class LoadedAdapter:
    """A LoRA adapter with vLLM's name and integer id for it; neither is ever reused."""

    name: str
    id: int
    path: str

    def request(self) -> Any:
        """vLLM's `LoRARequest` of it."""
        from vllm.lora.request import LoRARequest

        return LoRARequest(self.name, self.id, self.path)


class Host(ABC):
    """vLLM's engine, as `EngineServer` needs it."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._labels = TokenLabels()
        self.clock = TokenClock()
        """Ticks with every step that brings tokens."""
        self.clock.follow(engine.output_processor)

    @abstractmethod
    async def _call(self, method: str, *args: Any, **options: Any) -> Any:
        """The result of the engine's method, called between two steps."""

    @abstractmethod
    async def _finished(self, request_id: str, prompt: Any, params: Any, **options: Any) -> Any:
        """See `generate`."""

    @property
    @abstractmethod
    def is_dead(self) -> bool:
        """Whether vLLM has failed for good."""

    @abstractmethod
    async def pause(self) -> None:
        """Make no step until `resume`; running requests keep their state, and all sampled tokens are received."""

    @abstractmethod
    async def resume(self) -> None:
        """Make steps again."""

    @abstractmethod
    async def num_tokens(self) -> dict[Any, int]:
        """The number of tokens of each running request; the engine is paused. Streamed requests have a key
        for each answer, (request id, index); complete answers are left out."""

    @abstractmethod
    def _outputs(self, request_id: str, prompt: Any, params: Any, **options: Any) -> AsyncGenerator[Any]:
        """See `stream`."""

    @abstractmethod
    def is_computing(self, request_id: str) -> bool:
        """Whether vLLM has more tokens to make for a streamed request, however slowly its client reads."""

    @abstractmethod
    async def abort(self, request_ids: list[str]) -> None:
        """End streamed requests inside vLLM: each stream's last output has the finish reason `abort`."""

    @abstractmethod
    def shutdown(self) -> None:
        """Stop vLLM and free what it holds."""

    async def generate(
        self,
        prompt: Any,
        params: Any,
        request_id: str,
        adapter: LoadedAdapter | None = None,
        is_urgent: bool = False,
    ) -> tuple[Any, Spans]:
        """The finished `RequestOutput`, and its version spans if they are known. Cancelling the call aborts the request
        inside vLLM."""
        options = {"lora_request": adapter.request() if adapter else None, "priority": -int(is_urgent)}
        num_tokens = 0
        self._labels.begin(request_id)
        try:
            output = await self._finished(request_id, prompt, params, **options)
            num_tokens = len(output.outputs[0].token_ids)
        finally:
            spans = self._labels.end(request_id, num_tokens)
        return output, spans

    def stream(self, request_id: str, prompt: Any, params: Any, **options: Any) -> AsyncGenerator[Any]:
        """A request's `RequestOutput`s as they come, read by vLLM's own handlers; `end_stream` follows in any case.
        Closing the generator aborts the request inside vLLM."""
        for index in range(params.n):
            self._labels.begin((request_id, index))
        return self._outputs(request_id, prompt, params, **options)

    def end_stream(self, request_id: str, num_answers: int) -> list[Spans]:
        """The version spans of each answer."""
        return [self._labels.end((request_id, index), sys.maxsize) for index in range(num_answers)]

    @property
    def vllm(self) -> Any:
        """vLLM's engine, for its configuration, renderer and input processor."""
        return self._engine

    @property
    def tokenizer(self) -> Any:
        """vLLM's tokenizer of the model."""
        return self._engine.get_tokenizer()

    async def rpc(self, method: str, *args: str) -> list[str]:
        """Call a method of every worker between two steps; one JSON text from each."""
        return await self._call("collective_rpc", method, args=args)

    async def reset_prefix_cache(self) -> bool:
        """Free all KV cache blocks, also those of running requests, which vLLM recomputes from their tokens after
        `resume`; False when vLLM refused."""
        return (await self._call("reset_prefix_cache", True)) is not False  # versions before 0.27 may answer nothing

    async def reset_encoder_cache(self) -> None:
        """Drop the vision encoder's outputs, which vLLM caches by image content alone. Steps are paused, and no running
        request is in its prefill."""
        if self._engine.model_config.is_multimodal_model:
            await self._call("reset_encoder_cache")

    async def set_version(self, name: str) -> None:
        """Label the tokens sampled from here on with the version `name`. Steps are paused."""
        streamed = [key for key in self._labels.running if isinstance(key, tuple)]
        counts = await self.num_tokens()
        self._labels.change(name, counts, complete={key for key in streamed if key not in counts})

    async def sleep(self) -> None:
        """Free the GPU memory of weights and KV cache; the weights move to the CPU's memory. No request is running."""
        await self._call("sleep", level=1)

    async def wake(self) -> None:
        """Take the memory back, with an empty KV cache."""
        await self._call("wake_up")

    async def load_adapter(self, adapter: LoadedAdapter) -> bool:
        """Load a LoRA adapter between two steps; False when vLLM refused."""
        return bool(await self._call("add_lora", adapter.request()))

    async def remove_adapter(self, adapter: LoadedAdapter) -> None:
        """Unload a LoRA adapter."""
        await self._call("remove_lora", adapter.id)


class InProcessHost(Host):
    """Steps vLLM's `LLMEngine` in a thread of its own, in which all calls of it happen."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        super().__init__(LLMEngine.from_engine_args(EngineArgs(**arguments, distributed_executor_backend="uni")))
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._waiting: dict[str, Future[Any]] = {}
        self._streams: dict[str, _Stream] = {}
        self._produced: list[tuple[Any, Any]] = []
        """Outputs of streamed requests for the event loop; all of a step are handed over together."""
        self._loop: asyncio.AbstractEventLoop | None = None
        """That of streamed requests."""
        self._death: BaseException | None = None
        self._paused = False
        self._thread = threading.Thread(target=self._run, name="engine-steps", daemon=True)
        self._thread.start()

    @property
    def is_dead(self) -> bool:
        """True once a step has raised."""
        return self._death is not None

    def _run(self) -> None:
        try:
            while True:
                busy = self._engine.has_unfinished_requests() and not self._paused
                with contextlib.suppress(queue.Empty):
                    # Block only while there is nothing to step.
                    while True:
                        command = self._commands.get(block=not busy)
                        if command is None:
                            return
                        command()
                        self._hand_over()
                        busy = not self._paused
                outputs = self._engine.step()
                self.clock.num_steps += 1
                self._hand_over()
                for output in outputs:
                    if output.finished:
                        self._finish(output)
        except BaseException as error:
            self._death = error
            for future in list(self._waiting.values()):
                if future.set_running_or_notify_cancel():
                    future.set_exception(RuntimeError(f"the engine died: {error!r}"))
            for stream in list(self._streams.values()):
                stream.put(RuntimeError(f"the engine died: {error!r}"))
            self._hand_over()
            raise

    def _hand_over(self) -> None:
        """Give the event loop what streamed requests have got."""
        if self._produced and self._loop is not None:
            batch, self._produced = self._produced, []
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(_collect, batch)

    def _finish(self, output: Any) -> None:
        future = self._waiting.pop(output.request_id, None)
        if future is not None and future.set_running_or_notify_cancel():
            future.set_result(output)

    async def _call(self, method: str, *args: Any, **options: Any) -> Any:
        return await self._between_steps(lambda: getattr(self._engine, method)(*args, **options))

    async def _between_steps(self, call: Callable[[], Any]) -> Any:
        """The result of a call, made by the thread between two steps."""
        future: Future[Any] = Future()

        def command() -> None:
            # A future that was cancelled takes no result; from here on it cannot be.
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(call())
            except Exception as error:  # noqa: BLE001 (the caller gets it)
                future.set_exception(error)

        self._check_alive()
        self._commands.put(command)
        return await asyncio.wrap_future(future)

    def _check_alive(self) -> None:
        if self._death is not None:
            raise RuntimeError(f"the engine died: {self._death!r}")

    async def _finished(self, request_id: str, prompt: Any, params: Any, **options: Any) -> Any:
        done: Future[Any] = Future()

        def add() -> None:
            try:
                self._engine.add_request(request_id, prompt, params, **options)
            except Exception as error:  # noqa: BLE001 (a refused request concerns its caller only)
                if done.set_running_or_notify_cancel():
                    done.set_exception(error)
            else:
                self._waiting[request_id] = done

        def abort() -> None:
            if self._waiting.pop(request_id, None) is not None:
                self._engine.abort_request([request_id])

        self._check_alive()
        self._commands.put(add)
        try:
            return await asyncio.wrap_future(done)
        except asyncio.CancelledError:
            self._commands.put(abort)
            raise

    async def _outputs(self, request_id: str, prompt: Any, params: Any, **options: Any) -> AsyncGenerator[Any]:
        from vllm.v1.engine.output_processor import RequestOutputCollector

        self._loop = asyncio.get_running_loop()
        collector = RequestOutputCollector(params.output_kind, request_id)
        stream = _Stream(self, request_id, collector)

        def add() -> None:
            try:
                add_streamed(self._engine, request_id, prompt, params, stream, **options)
            except Exception as error:  # noqa: BLE001 (a refused request concerns its caller only)
                stream.put(error)

        self._check_alive()
        self._streams[request_id] = stream
        self._commands.put(add)
        finished = False
        try:
            while not finished:
                output = collector.get_nowait() or await collector.get()
                finished = output.finished
                yield output
        finally:
            if not finished:
                self._commands.put(lambda: self._abort([request_id]))

    def is_computing(self, request_id: str) -> bool:
        """See `Host`."""
        return request_id in self._streams

    async def abort(self, request_ids: list[str]) -> None:
        """See `Host`."""
        await self._between_steps(lambda: self._abort(request_ids))

    def _abort(self, request_ids: list[str]) -> None:
        running = [id_ for id_ in request_ids if id_ in self._streams]
        self._engine.abort_request(running)
        for id_ in running:
            self._streams.pop(id_, None)

    async def pause(self) -> None:
        """See `Host`."""
        await self._between_steps(self._stop_stepping)

    def _stop_stepping(self) -> None:
        self._paused = True
        core = self._engine.engine_core.engine_core
        self.clock.ignores_tokens = True
        self._engine.output_processor.process_outputs(delivery.flush(core))
        self.clock.ignores_tokens = False
        received = ReceivedTokens(self._engine.output_processor)
        if missing := received.missing(token_counts(core)):
            raise RuntimeError(f"{_MISSING_TOKENS} {missing}")

    async def resume(self) -> None:
        """See `Host`."""
        await self._between_steps(lambda: setattr(self, "_paused", False))

    async def num_tokens(self) -> dict[Any, int]:
        """See `Host`."""
        streamed = [key for key in self._labels.running if isinstance(key, tuple)]
        return await self._between_steps(
            lambda: _num_tokens(self._engine.output_processor, [*self._waiting, *streamed])
        )

    def shutdown(self) -> None:
        """Stop stepping, and remove the rendezvous file of vLLM's workers; the process ends right after."""
        from vllm.distributed import destroy_distributed_environment, destroy_model_parallel

        self._commands.put(None)
        self._thread.join(5)
        destroy_model_parallel()
        destroy_distributed_environment()


class AsyncHost(Host):
    """vLLM's `AsyncLLM`."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        from vllm import envs
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        if arguments.get("data_parallel_size", 1) > 1:
            from slipstream.inference.plugin import coordinator

            coordinator.follow_parent()
        super().__init__(AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments)))
        # Here, as in the engine core: each request looks at a dozen variables.
        getattr(envs, "enable_envs_cache", lambda: None)()

    @property
    def is_dead(self) -> bool:
        """True once the engine core has failed."""
        return bool(self._engine.errored)

    async def _call(self, method: str, *args: Any, **options: Any) -> Any:
        return await getattr(self._engine, method)(*args, **options)

    async def rpc(self, method: str, *args: str) -> list[str]:
        """See `Host`; of several engine cores (data parallel) vLLM itself answers for the first alone."""
        client = self._engine.engine_core
        calls = [
            client._call_utility_async("collective_rpc", method, None, args, None, engine=core)
            for core in client.core_engines
        ]
        return [answer for answers in await asyncio.gather(*calls) for answer in answers]

    async def _finished(self, request_id: str, prompt: Any, params: Any, **options: Any) -> Any:
        final: Any = None
        async for output in self._engine.generate(prompt, params, request_id, **options):
            final = output
        return final

    def _outputs(self, request_id: str, prompt: Any, params: Any, **options: Any) -> AsyncGenerator[Any]:
        return self._engine.generate(prompt, params, request_id, **options)

    def is_computing(self, request_id: str) -> bool:
        """See `Host`."""
        return request_id in self._engine.output_processor.external_req_ids

    async def abort(self, request_ids: list[str]) -> None:
        """See `Host`."""
        await self._engine.abort(request_ids)

    async def pause(self) -> None:
        """See `Host`."""
        # AsyncLLM's own `pause_generation` is this and 20 ms of sleep.
        await self._engine.engine_core.pause_scheduler_async(mode="keep", clear_cache=False)
        await self._process_outputs()
        self.clock.ignores_tokens = True
        try:
            await self._flush()
        finally:
            self.clock.ignores_tokens = False

    async def _flush(self) -> None:
        """Have the engine core send everything undelivered, and wait until this process has all sampled tokens."""
        client = self._engine.engine_core
        received = ReceivedTokens(self._engine.output_processor)
        calls = [client._call_utility_async(delivery.FLUSH, engine=engine) for engine in client.core_engines]
        counts = {id_: count for each in await asyncio.gather(*calls) for id_, count in each.items()}
        deadline = time.monotonic() + _FLUSH_S
        while missing := received.missing(counts):
            if time.monotonic() > deadline:
                raise RuntimeError(f"{_MISSING_TOKENS} {missing}")
            await asyncio.sleep(0)
        await self._process_outputs()

    async def resume(self) -> None:
        """See `Host`."""
        await self._engine.resume_generation()

    async def num_tokens(self) -> dict[Any, int]:
        """See `Host`; waits for tokens that the engine core has sent."""
        await self._process_outputs()
        return _num_tokens(self._engine.output_processor, self._labels.running)

    async def _process_outputs(self) -> None:
        """Wait until vLLM has processed what the engine core has sent."""
        queue = self._engine.engine_core.outputs_queue
        for _ in range(_LOOP_TURNS):
            while not queue.empty():
                await asyncio.sleep(0)
            # vLLM processes what it took from the queue in chunks, one in each turn of the event loop.
            await asyncio.sleep(0)

    def shutdown(self) -> None:
        """Stop the engine core's process."""
        self._engine.shutdown()


def _num_tokens(processor: Any, request_ids: Iterable[Hashable]) -> dict[Any, int]:
    """Output tokens of each request, by vLLM's output processor and its internal names for our ids; 0 for requests
    unknown to it. See `Host.num_tokens` for streamed ones."""
    counts: dict[Any, int] = {}
    for key in request_ids:
        request_id, index = key if isinstance(key, tuple) else (key, None)
        names = processor.external_req_ids.get(request_id, [request_id])
        states = [processor.request_states[name] for name in names if name in processor.request_states]
        if index is not None:
            states = [state for state in states if state.request_index == index]
        if states or index is None:
            counts[key] = sum(state.detokenizer.num_output_tokens() for state in states)
    return counts


class _Stream:
    """The queue of a streamed request: vLLM's output processor puts its outputs in."""

    def __init__(self, host: InProcessHost, request_id: str, collector: Any) -> None:
        self._host = host
        self._request_id = request_id
        self._collector = collector

    def put(self, output: Any) -> None:
        """Take an output or the final error; called in the stepping thread."""
        if isinstance(output, Exception) or output.finished:
            self._host._streams.pop(self._request_id, None)
        self._host._produced.append((self._collector, output))


def _collect(batch: list[tuple[Any, Any]]) -> None:
    for collector, output in batch:
        collector.put(output)


def add_streamed(
    engine: Any,
    request_id: str,
    prompt: Any,
    params: Any,
    queue: Any,
    *,
    prompt_text: str | None = None,
    reasoning_ended: bool | None = None,
    reasoning_parser_kwargs: dict[str, Any] | None = None,
    **options: Any,
) -> None:
    """`AsyncLLM.add_request` for an `LLMEngine`, whose own `add_request` knows no queues."""
    from vllm.v1.engine.parallel_sampling import ParentRequest

    request = engine.input_processor.process_inputs(
        request_id, prompt, params, supported_tasks=engine.get_supported_tasks(), **options
    )
    request.reasoning_ended = reasoning_ended
    request.reasoning_parser_kwargs = reasoning_parser_kwargs
    engine.input_processor.assign_request_id(request)
    number = request.sampling_params.n
    parent = ParentRequest(request) if number > 1 else None
    for index in range(number):
        each = request
        if parent is not None:
            each = copy(request)
            each.request_id, each.sampling_params = parent.get_child_info(index)
        engine.output_processor.add_request(each, prompt_text, parent, index, queue)
        engine.engine_core.add_request(each)


def create_host(arguments: dict[str, Any], *, own_process: bool = False) -> Host:
    """The host for this machine and vLLM's engine `arguments`; `AsyncHost` in any case with `own_process`."""
    from vllm.platforms import current_platform

    num_workers = int(arguments.get("tensor_parallel_size", 1)) * int(arguments.get("data_parallel_size", 1))
    if current_platform.is_cpu() and num_workers == 1 and not own_process:
        return InProcessHost(arguments)
    return AsyncHost(arguments)
