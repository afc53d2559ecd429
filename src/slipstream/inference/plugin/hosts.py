"""The two ways to host vLLM's engine in our server, behind one small face.

`InProcessHost` (CPU, one worker): engine core, worker and server share one process, and a thread of ours makes
the steps. vLLM as shipped starts three processes, each importing everything again; on two cores that is most of
the start-up time, and every token crosses two process boundaries. Calls to the worker run between two steps.

`AsyncHost` (GPU, or several workers): vLLM's own `AsyncLLM`, whose engine core has a process to itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

from slipstream.inference.plugin.patches import delivery
from slipstream.inference.plugin.patches.undelivered import ReceivedTokens, token_counts
from slipstream.inference.plugin.token_clock import TokenClock
from slipstream.inference.plugin.version_labels import Spans, TokenLabels

_TURNS = 64
"""Turns of the event loop in which vLLM surely works off one step's outputs, of 128 requests or more in each, and
whoever waits for a request that has ended has its turn."""
_FLUSH_S = 30.0
_MISSING_TOKENS = "the engine core and the server count other tokens of requests that stand still:"


@dataclass(frozen=True)
class LoadedAdapter:
    """A LoRA adapter under the name and number that vLLM knows it by; neither is ever used again for another."""

    name: str
    id: int
    path: str

    def request(self) -> Any:
        """vLLM's own record of it."""
        from vllm.lora.request import LoRARequest

        return LoRARequest(self.name, self.id, self.path)


class Host(Protocol):
    """What the server needs of an engine."""

    async def generate(
        self,
        prompt: Any,
        params: Any,
        request_id: str,
        adapter: LoadedAdapter | None = None,
        is_urgent: bool = False,
    ) -> tuple[Any, Spans]:
        """The finished request output, and which version made which of its tokens, if that is known; cancelling the
        call aborts the request inside the engine."""
        ...

    async def rpc(self, method: str, *args: str) -> list[str]:
        """Call a worker method in every worker, between two steps."""
        ...

    @property
    def clock(self) -> TokenClock:
        """When tokens come."""
        ...

    async def pause(self) -> None:
        """Make no step until `resume`; running requests wait where they are."""
        ...

    async def resume(self) -> None:
        """Go on."""
        ...

    async def num_tokens(self) -> dict[str, int]:
        """How many tokens each running request has; the engine stands still."""
        ...

    async def reset_prefix_cache(self) -> bool:
        """Forget all cached blocks, also those of running requests, which are computed anew from their tokens when
        they go on; False when vLLM refused."""
        ...

    async def reset_encoder_cache(self) -> None:
        """Forget what a tower made of images, which vLLM keeps by their contents alone. The engine stands still, and no
        running request is in the middle of its prompt."""
        ...

    async def set_version(self, name: str) -> None:
        """Tokens from now on are made by the version called `name`."""
        ...

    async def sleep(self) -> None:
        """Free weights and KV cache; the weights wait in the CPU's memory. No request is running."""
        ...

    async def wake(self) -> None:
        """Take them back, with an empty cache."""
        ...

    async def load_adapter(self, adapter: LoadedAdapter) -> bool:
        """Load a LoRA adapter between two steps; False when vLLM refused."""
        ...

    async def remove_adapter(self, adapter: LoadedAdapter) -> None:
        """Forget it."""
        ...

    @property
    def is_dead(self) -> bool:
        """Whether the engine can never answer again."""
        ...

    def shutdown(self) -> None:
        """Free what the engine holds."""
        ...


class InProcessHost:
    """Steps an `LLMEngine` in a thread; all calls into the engine happen in that thread."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        self._engine = LLMEngine.from_engine_args(EngineArgs(**arguments, distributed_executor_backend="uni"))
        self._labels = TokenLabels()
        self.clock = TokenClock()
        self.clock.follow(self._engine.output_processor)
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._waiting: dict[str, Future[Any]] = {}
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
                    # Block only while there is nothing to step; otherwise take what has come in meanwhile.
                    while True:
                        command = self._commands.get(block=not busy)
                        if command is None:
                            return
                        command()
                        busy = not self._paused
                outputs = self._engine.step()
                self.clock.num_steps += 1
                for output in outputs:
                    if output.finished:
                        self._finish(output)
        except BaseException as error:
            self._death = error
            for future in list(self._waiting.values()):
                if future.set_running_or_notify_cancel():
                    future.set_exception(RuntimeError(f"the engine died: {error!r}"))
            raise

    def _finish(self, output: Any) -> None:
        future = self._waiting.pop(output.request_id, None)
        if future is not None and future.set_running_or_notify_cancel():
            future.set_result(output)

    def _submit(self, call: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()

        def command() -> None:
            # From here on nobody can cancel it, and a result for what was cancelled would be an error of its own.
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(call())
            except Exception as error:  # noqa: BLE001 (the caller gets it)
                future.set_exception(error)

        if self._death is not None:
            raise RuntimeError(f"the engine died: {self._death!r}")
        self._commands.put(command)
        return future

    async def generate(
        self,
        prompt: Any,
        params: Any,
        request_id: str,
        adapter: LoadedAdapter | None = None,
        is_urgent: bool = False,
    ) -> tuple[Any, Spans]:
        """See `Host`."""
        lora = adapter.request() if adapter else None
        done: Future[Any] = Future()

        def add() -> None:
            try:
                self._engine.add_request(request_id, prompt, params, lora_request=lora, priority=-int(is_urgent))
            except Exception as error:  # noqa: BLE001 (a refused request concerns its caller only)
                if done.set_running_or_notify_cancel():
                    done.set_exception(error)
            else:
                self._waiting[request_id] = done

        def abort() -> None:
            if self._waiting.pop(request_id, None) is not None:
                self._engine.abort_request([request_id])

        if self._death is not None:
            raise RuntimeError(f"the engine died: {self._death!r}")
        self._labels.begin(request_id)
        num_tokens = 0
        self._commands.put(add)
        try:
            output = await asyncio.wrap_future(done)
            num_tokens = len(output.outputs[0].token_ids)
        except asyncio.CancelledError:
            self._commands.put(abort)
            raise
        finally:
            spans = self._labels.end(request_id, num_tokens)
        return output, spans

    async def rpc(self, method: str, *args: str) -> list[str]:
        """See `Host`."""
        return await asyncio.wrap_future(self._submit(lambda: self._engine.collective_rpc(method, args=args)))

    async def pause(self) -> None:
        """See `Host`."""
        await asyncio.wrap_future(self._submit(self._stop_stepping))

    def _stop_stepping(self) -> None:
        self._paused = True
        core: Any = self._engine.engine_core.engine_core  # type: ignore[attr-defined]
        self.clock.ignores_tokens = True
        self._engine.output_processor.process_outputs(delivery.flush(core))
        self.clock.ignores_tokens = False
        received = ReceivedTokens(self._engine.output_processor)
        if missing := received.missing(token_counts(core)):
            raise RuntimeError(f"{_MISSING_TOKENS} {missing}")

    async def resume(self) -> None:
        """See `Host`."""
        await asyncio.wrap_future(self._submit(lambda: setattr(self, "_paused", False)))

    async def num_tokens(self) -> dict[str, int]:
        """See `Host`."""
        return await asyncio.wrap_future(
            self._submit(lambda: _num_tokens(self._engine.output_processor, list(self._waiting)))
        )

    async def reset_prefix_cache(self) -> bool:
        """See `Host`."""
        return bool(await asyncio.wrap_future(self._submit(lambda: self._engine.reset_prefix_cache(True))))

    async def reset_encoder_cache(self) -> None:
        """See `Host`."""
        if self._engine.model_config.is_multimodal_model:
            await asyncio.wrap_future(self._submit(self._engine.reset_encoder_cache))

    async def set_version(self, name: str) -> None:
        """See `Host`."""
        self._labels.change(name, await self.num_tokens())

    async def sleep(self) -> None:
        """See `Host`."""
        await asyncio.wrap_future(self._submit(lambda: self._engine.sleep(level=1)))

    async def wake(self) -> None:
        """See `Host`."""
        await asyncio.wrap_future(self._submit(self._engine.wake_up))

    async def load_adapter(self, adapter: LoadedAdapter) -> bool:
        """See `Host`."""
        return bool(await asyncio.wrap_future(self._submit(lambda: self._engine.add_lora(adapter.request()))))

    async def remove_adapter(self, adapter: LoadedAdapter) -> None:
        """See `Host`."""
        await asyncio.wrap_future(self._submit(lambda: self._engine.remove_lora(adapter.id)))

    def shutdown(self) -> None:
        """Stop stepping, and remove the file at which vLLM's workers meet; the process ends right after."""
        from vllm.distributed import destroy_distributed_environment, destroy_model_parallel

        self._commands.put(None)
        self._thread.join(5)
        destroy_model_parallel()
        destroy_distributed_environment()


class AsyncHost:
    """vLLM's `AsyncLLM`."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        self._engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
        self._labels = TokenLabels()
        self.clock = TokenClock()
        self.clock.follow(self._engine.output_processor)

    @property
    def is_dead(self) -> bool:
        """True once the engine core has failed."""
        return bool(self._engine.errored)

    async def generate(
        self,
        prompt: Any,
        params: Any,
        request_id: str,
        adapter: LoadedAdapter | None = None,
        is_urgent: bool = False,
    ) -> tuple[Any, Spans]:
        """See `Host`."""
        lora = adapter.request() if adapter else None
        final: Any = None
        num_tokens = 0
        self._labels.begin(request_id)
        try:
            priority = -int(is_urgent)
            async for output in self._engine.generate(prompt, params, request_id, lora_request=lora, priority=priority):
                final = output
                num_tokens = len(output.outputs[0].token_ids)
        finally:
            spans = self._labels.end(request_id, num_tokens)
        return final, spans

    async def rpc(self, method: str, *args: str) -> list[str]:
        """See `Host`."""
        return await self._engine.collective_rpc(method, args=args)

    async def pause(self) -> None:
        """See `Host`."""
        # AsyncLLM's own `pause_generation` is this and 20 ms of sleep.
        await self._engine.engine_core.pause_scheduler_async(mode="keep", clear_cache=False)
        await self._work_off()
        self.clock.ignores_tokens = True
        try:
            await self._flush()
        finally:
            self.clock.ignores_tokens = False

    async def _flush(self) -> None:
        """Have the engine core tell what it keeps, and wait until this process knows all tokens that there are."""
        client: Any = self._engine.engine_core
        received = ReceivedTokens(self._engine.output_processor)
        calls = [client._call_utility_async(delivery.FLUSH, engine=engine) for engine in client.core_engines]
        counts = {id_: count for each in await asyncio.gather(*calls) for id_, count in each.items()}
        deadline = time.monotonic() + _FLUSH_S
        while missing := received.missing(counts):
            if time.monotonic() > deadline:
                raise RuntimeError(f"{_MISSING_TOKENS} {missing}")
            await asyncio.sleep(0)
        await self._work_off()

    async def resume(self) -> None:
        """See `Host`."""
        await self._engine.resume_generation()

    async def reset_prefix_cache(self) -> bool:
        """See `Host`; versions before 0.27 answer nothing."""
        return (await self._engine.reset_prefix_cache(True)) is not False

    async def reset_encoder_cache(self) -> None:
        """See `Host`."""
        if self._engine.model_config.is_multimodal_model:
            await self._engine.reset_encoder_cache()

    async def num_tokens(self) -> dict[str, int]:
        """See `Host`; tokens may be on their way from the engine's process to this one, and are waited for."""
        await self._work_off()
        return _num_tokens(self._engine.output_processor, self._labels.running)

    async def _work_off(self) -> None:
        """Wait for what has come from the engine's process."""
        queue: Any = self._engine.engine_core.outputs_queue  # type: ignore[attr-defined]
        for _ in range(_TURNS):
            while not queue.empty():
                await asyncio.sleep(0)
            # What was taken out of the queue is worked off in parts, one in each turn of the event loop.
            await asyncio.sleep(0)

    async def set_version(self, name: str) -> None:
        """See `Host`."""
        self._labels.change(name, await self.num_tokens())

    async def sleep(self) -> None:
        """See `Host`."""
        await self._engine.sleep(level=1)

    async def wake(self) -> None:
        """See `Host`."""
        await self._engine.wake_up()

    async def load_adapter(self, adapter: LoadedAdapter) -> bool:
        """See `Host`."""
        return bool(await self._engine.add_lora(adapter.request()))

    async def remove_adapter(self, adapter: LoadedAdapter) -> None:
        """See `Host`."""
        await self._engine.remove_lora(adapter.id)

    def shutdown(self) -> None:
        """Stop the engine core's process."""
        self._engine.shutdown()


def _num_tokens(processor: Any, request_ids: Sequence[str]) -> dict[str, int]:
    """From vLLM's output processor, which has names of its own for our requests; 0 for those that it does not know
    yet."""
    counts: dict[str, int] = {}
    for request_id in request_ids:
        names = processor.external_req_ids.get(request_id, [request_id])
        states = [processor.request_states[name] for name in names if name in processor.request_states]
        counts[request_id] = sum(state.detokenizer.num_output_tokens() for state in states)
    return counts


def create_host(arguments: dict[str, Any], *, own_process: bool = False) -> Host:
    """The host that fits this machine and these arguments; with `own_process`, the one of GPUs in any case."""
    from vllm.platforms import current_platform

    num_workers = int(arguments.get("tensor_parallel_size", 1)) * int(arguments.get("data_parallel_size", 1))
    if current_platform.is_cpu() and num_workers == 1 and not own_process:
        return InProcessHost(arguments)
    return AsyncHost(arguments)
