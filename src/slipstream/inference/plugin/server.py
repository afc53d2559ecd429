"""The engine's process: vLLM behind a small HTTP server on a private Unix socket.

Guarantees:
- Tokens in, tokens out; every sampled token comes with its processed log-probability and weight version.
- An answer is given only while the engine is in service: from the moment an update begins until its
  fingerprints are verified, and after any failed update, requests are refused with 503.
- An answer that has a token of a version that is not proved yet is held until it is, and given up when it is not.
- A request ends at its deadline or when its client goes away, inside the engine too. Its time is counted from when it
  is vLLM's, and not while an update holds it up: that has a deadline of its own.
- An answer that contradicts itself puts the engine out of service for good.
- The process dies with its supervisor.

Bodies are MessagePack records of `slipstream.records`; `/health` is JSON, for people and probes.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import signal
import sys
import time
from typing import Any

import msgspec

import slipstream
from slipstream.inference.child_process import leave
from slipstream.inference.plugin import ENGINE_VARIABLE, lifeline, start_marks
from slipstream.inference.plugin.arguments import checked_head, engine_arguments, prompt_arguments, sampling_arguments
from slipstream.inference.plugin.completions import Refused, aborted, completion, contradiction, refusals
from slipstream.inference.plugin.hosts import Host, create_host
from slipstream.inference.plugin.patches import patch_table, scoring
from slipstream.inference.plugin.preimport import settings_later
from slipstream.inference.plugin.routes import OutOfService, listen
from slipstream.inference.plugin.token_clock import Stillness
from slipstream.inference.plugin.version_labels import Spans
from slipstream.inference.plugin.weights import tensor_map
from slipstream.inference.plugin.weights.adapters import Adapters
from slipstream.inference.settings import EngineSettings
from slipstream.patience import Patience
from slipstream.records import (
    ApplyReport,
    Completion,
    EngineHealth,
    GenerateRequest,
    ParameterSpec,
    Ticket,
    Version,
)
from slipstream.weights.bridges.delta import check_base
from slipstream.weights.bridges.single_copy import SharedWeights

_FIRST_TOKEN_S = 0.1
"""How long a trainer that has written the weights waits at most for the first token of what was running."""
_SOONER = "raise inference.request_timeout_s, or lower sampling.max_tokens or inference.max_num_seqs"
_HUNG_S = 180.0
"""A single step of vLLM takes no longer: an engine that computes requests, and has no token for so long, hangs."""


class EngineServer:
    """Owns the engine, its weight version and whether it may answer."""

    def __init__(self, settings: EngineSettings, host: Host) -> None:
        self.settings = settings
        self.host = host
        self.version: Version | None = None
        self.reason = "starting"
        self.num_running = 0
        self.patches: tuple[str, ...] = ()
        self.patches_left_out: dict[str, str] = {}
        # Twice what runs at once, so that the engine never waits for us; a request's deadline counts from its turn.
        self._places = asyncio.Semaphore(2 * settings.max_num_seqs)
        # Their own, so that they wait for no others; as many, as an evaluation is urgent too.
        self._urgent_places = asyncio.Semaphore(2 * settings.max_num_seqs)
        self._settled = asyncio.Event()
        self._settled.set()
        self._stillness = Stillness(host.clock)
        self._adapters = Adapters(host)
        self._request_ended = asyncio.Event()
        self._kept: dict[str, asyncio.Task[tuple[Any, Spans]]] = {}
        """Under `keep`, what computes each request."""
        self._stands = False
        """Whether no step is made since a fence, or an update that failed."""
        self._runs = True
        """Whether steps are made; when neither is known, a `resume` was cut short."""
        self._base_verified = False
        self._unproved = ""
        """The version that is computed with while its proof is still to come."""
        self._num_refused = 0
        """Versions that were computed with, and then had none."""

    async def start(self) -> None:
        """Verify what was loaded; only then go into service."""
        described = [msgspec.json.decode(text) for text in await self.host.rpc("slipstream_describe")]
        if not all("flush" in {*each["patches"], *each["patches_left_out"]} for each in described):
            raise RuntimeError(
                "vLLM did not load Slipstream's plugin, without which its tokens and updates cannot be trusted: "
                "install the package, so that its entry point in vllm.general_plugins is found"
            )
        for path in described[0]["files"]:
            lifeline.remove_at_end(path)
        self.patches = tuple(described[0]["patches"])
        self.patches_left_out: dict[str, str] = described[0]["patches_left_out"]
        if self.settings.fp32_head:
            self.patches += (checked_head([each["head_dtypes"] for each in described]),)
        if self.settings.version is not None:
            report = await self._verify(self.settings.version, self.settings.parameters)
            if report.mismatched:
                raise RuntimeError(f"loaded weights differ from version {report.version.name}: {report.mismatched}")
            if report.unverified:
                raise RuntimeError(
                    f"loaded weights of version {report.version.name} cannot be verified: {report.unverified}"
                )
            self.version = self.settings.version
            await self.host.set_version(self.version.name)
        self.reason = ""
        for ticket in (*self.settings.deltas, *filter(None, [self.settings.adapter])):
            report = await self.apply(ticket)
            if report.mismatched or report.unverified:
                raise RuntimeError(
                    f"{'delta' if ticket.delta else 'adapter'} of version {report.version.name} differs or cannot be "
                    f"verified: {report.mismatched or report.unverified}"
                )

    async def verify(self, ticket: Ticket) -> ApplyReport:
        """Compare the live weights with a ticket: all of them, or the adapter and the base below it."""
        if self.reason == "asleep":
            raise OutOfService("the engine is asleep, and its weights wait in the CPU's memory: ask again later")
        if ticket.bridge != "lora":
            return await self._verify(ticket.version, ticket.parameters)
        if self._adapters.current is None:
            raise RuntimeError("the engine holds no adapter to verify")
        report = await self._verify_adapter(ticket.version, ticket.parameters)
        return report.and_of(await self._verify(ticket.version, ticket.base))

    async def _verify(
        self,
        version: Version,
        parameters: tuple[ParameterSpec, ...],
        method: str = "slipstream_fingerprint",
        *args: str,
    ) -> ApplyReport:
        started = time.perf_counter()
        text = msgspec.json.encode(parameters).decode()
        answers = [msgspec.json.decode(answer) for answer in await self.host.rpc(method, text, *args)]
        note = "packed copy" if method == "slipstream_fingerprint" else "beside the adapter"
        differs, unverified = tensor_map.judge(parameters, [answer["shares"] for answer in answers])
        stale = [f"{name} ({note})" for answer in answers for name in answer["stale"]]
        return ApplyReport(
            version=version,
            mismatched=(*differs, *stale),
            unverified=tuple(unverified),
            verify_s=time.perf_counter() - started,
            memory_bytes=sum(answer["memory_bytes"] for answer in answers),
        )

    async def apply(self, ticket: Ticket) -> ApplyReport:
        """Load a version in place, verify it, drop the prefix cache.

        Requests that are running stand still meanwhile and go on with the new version, their context computed anew
        by it or kept, or they are waited for (`EngineSettings.in_flight`). Under an adapter they go on with the one
        that they began with; a third one waits for their end. On any failure the engine stays out of service and
        standing requests never go on: they end at their deadlines or with their client. A delta against anything but
        the version in service is refused before anything is done.
        """
        check_base(ticket, None if self.reason else self.version, self.reason)
        if ticket.bridge == "lora":
            await self._adapters.until_room()
        goes_on = ticket.bridge == "single_copy" and self._unproved == ticket.version.name and not self._stands
        if not goes_on:
            self._refuse()
        self.reason = f"applying version {ticket.version.name}"
        self._settled.clear()
        self._begin_stall()
        try:
            report = await self._apply(ticket, goes_on=goes_on)
            if not self.reason:
                self._unproved = ""
        except Exception as error:
            self.reason = f"applying version {ticket.version.name} failed: {error}"
            raise
        finally:
            runs_unproved = self._unproved != ""
            self._refuse()
            self._settled.set()
            if runs_unproved:
                await self._stand()
        if self.reason:
            return report
        return msgspec.structs.replace(report, stall_s=await self.host.clock.end(lambda: self.num_running > 0))

    def _refuse(self) -> None:
        """What runs with a version that has no proof is never answered, whatever comes after it."""
        self._num_refused += self._unproved != ""
        self._unproved = ""

    def _begin_stall(self) -> None:
        if self.num_running:
            self.host.clock.begin()

    async def _apply(self, ticket: Ticket, *, goes_on: bool) -> ApplyReport:
        seconds, num_bytes = 0.0, 0
        if ticket.bridge == "lora":
            seconds, num_bytes = await self._load_adapter(ticket)
        elif not goes_on:
            await self._stand()
            seconds, num_bytes = await self._load(ticket)
        report = msgspec.structs.replace(await self._verify_applied(ticket), transfer_s=seconds, num_bytes=num_bytes)
        if unproved := report.mismatched + report.unverified:
            self.reason = f"version {ticket.version.name} did not verify: {', '.join(unproved[:3])}"
            return report
        if not goes_on:
            await self._change_to(ticket.version, is_whole=ticket.bridge != "lora")
        self.version = ticket.version
        self.reason = ""
        return report

    async def _change_to(self, version: Version, *, is_whole: bool = True) -> None:
        """Go on with `version`, and with nothing that another one computed. vLLM's prefix cache tells adapters apart by
        their names, of which each is used once."""
        if is_whole and not self._keeps_context and not await self.host.reset_prefix_cache():
            raise RuntimeError("vLLM refused to reset the prefix cache")
        await self.host.set_version(version.name)
        self.version = version
        if self._keeps_context:
            await self._begin_anew()
        if is_whole:
            await self.host.reset_encoder_cache()
        self._stands = False  # before: when this is cancelled in `resume`, nobody knows whether steps are made
        if not self._runs:
            await self.host.resume()
            self._runs = True

    async def go_on(self, version: Version) -> None:
        """The weights that were fenced off are written: compute with them, as `version`, whose proof `apply` makes
        meanwhile. What has a token of it is answered after that."""
        self._refuse()
        self.reason = f"proving version {version.name}"
        self._settled.clear()
        self._begin_stall()
        try:
            await self._stand()
            await self.host.rpc("slipstream_written")
            self._unproved = version.name
            await self._change_to(version)
            # Before the trainer describes the version, for which it needs the card that the engine computes on.
            await self.host.clock.next(lambda: self.num_running > 0, _FIRST_TOKEN_S)
        except BaseException as error:
            self._refuse()
            self.reason = f"going on with version {version.name} failed: {error!r}"
            self._settled.set()
            raise

    async def _stand(self) -> None:
        """Make no step from now on; under `drain` when the last request has ended, and none begins meanwhile."""
        if self._stands:
            return
        while self.settings.in_flight == "drain" and self.num_running:
            await self._until_a_request_ends()
        self._runs = False
        await self.host.pause()
        self._stands = True

    async def _until_a_request_ends(self) -> None:
        """Every request has its deadline, and the call that waits for it ends with its client."""
        self._request_ended.clear()
        await self._request_ended.wait()

    @property
    def _keeps_context(self) -> bool:
        return self.settings.in_flight == "keep"

    async def _begin_anew(self) -> None:
        """Take back requests that have no token yet: what is computed of their prompts is the old version's."""
        counts = await self.host.num_tokens()
        tasks = [task for id_, task in self._kept.items() if not counts.get(id_)]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def _load(self, ticket: Ticket) -> tuple[float, int]:
        """A whole model, in place; seconds and bytes."""
        text, first_rank = msgspec.json.encode(ticket).decode(), str(self.settings.first_rank)
        loads = [msgspec.json.decode(answer) for answer in await self.host.rpc("slipstream_load", text, first_rank)]
        return max(load["seconds"] for load in loads), sum(load["num_bytes"] for load in loads)

    async def _load_adapter(self, ticket: Ticket) -> tuple[float, int]:
        """An adapter beside the base; seconds and bytes."""
        if self.settings.lora_rank is None:
            raise RuntimeError("the engine was started without room for an adapter")
        started = time.perf_counter()
        await self._adapters.load(ticket)
        return time.perf_counter() - started, ticket.num_bytes

    async def _verify_adapter(self, version: Version, parameters: tuple[ParameterSpec, ...]) -> ApplyReport:
        loaded = json.dumps(self._adapters.ids)
        return await self._verify(version, parameters, "slipstream_fingerprint_adapter", loaded)

    async def _verify_applied(self, ticket: Ticket) -> ApplyReport:
        """As `verify`, but the base below an adapter, which nothing changes, only once."""
        if ticket.bridge != "lora" or not self._base_verified:
            report = await self.verify(ticket)
            self._base_verified = not (report.mismatched or report.unverified)
            return report
        return await self._verify_adapter(ticket.version, ticket.parameters)

    async def fence(self) -> None:
        """Compute nothing from now to the next `apply`: the weights are about to be written in place. Requests stand
        still as during an apply."""
        self.reason = "the trainer is writing the weights"
        self._settled.clear()
        self._begin_stall()
        await self._stand()
        await self.host.rpc("slipstream_settle")

    async def share(self, parameters: tuple[ParameterSpec, ...]) -> tuple[SharedWeights, ...]:
        """Where each worker's live weights lie, for a trainer that trains them; out of service until its first
        version."""
        await self.fence()
        answers = await self.host.rpc("slipstream_share", msgspec.json.encode(parameters).decode())
        shared = tuple(msgspec.json.decode(answer, type=SharedWeights) for answer in answers)
        for path in set[str]().union(*(worker.files() for worker in shared)):
            lifeline.remove_at_end(path)
        return shared

    async def sleep(self) -> None:
        """Free the memory of weights and KV cache until `wake`; the weights wait in the CPU's memory."""
        if self.num_running:
            raise OutOfService(f"{self.num_running} requests are running: let them end before the engine sleeps")
        if self.reason == "asleep":
            return
        if self.reason:
            raise OutOfService(self.reason)
        self.reason = "asleep"
        await self.host.sleep()

    async def wake(self) -> None:
        """Take the memory back; the weights are those from before."""
        if self.reason == "asleep":
            await self.host.wake()
            self.reason = ""

    async def until_in_service(self) -> None:
        """Wait for an update that is under way, which has its own deadline; raises `OutOfService` when nothing may be
        answered."""
        # The next update may begin before those who waited for the last one have their turn.
        while not self._settled.is_set():
            await self._settled.wait()
        if self.reason:
            raise OutOfService(self.reason)

    def is_hung(self) -> bool:
        """Whether vLLM has made no step of what it computes for longer than one may take; to be asked all the time."""
        return self._stillness.lasts_s(self.num_running > 0 and self._settled.is_set() and not self.reason) > _HUNG_S

    async def generate(self, request: GenerateRequest) -> Completion:
        """One completion; finish reason `abort`, and why, when its deadline passed or vLLM refused it."""
        async with self._urgent_places if request.is_urgent else self._places:
            try:
                await self.until_in_service()
            except OutOfService as error:
                return aborted(request, f"was not begun: {error}")
            return await self._generate_in_time(request)

    async def _generate_in_time(self, request: GenerateRequest) -> Completion:
        if not self.num_running:
            self.host.clock.tick()
        self.num_running += 1
        try:
            async with Patience(request.timeout_s, lambda: self._runs or self._settled.is_set()):
                return await self._generate(request)
        except OutOfService as error:
            return aborted(request, f"cannot be answered: {error}")
        except TimeoutError:
            return aborted(request, f"passed its deadline of {request.timeout_s:g} s: {_SOONER}")
        except Refused as error:
            return aborted(request, f"was refused by vLLM: {error}")
        except Exception as error:
            if self.host.is_dead:
                raise
            answer = contradiction(request, error)
            self.reason = f"the answer to request {request.id} {answer.error}"
            return answer
        finally:
            self.num_running -= 1
            self._request_ended.set()

    async def _generate(self, request: GenerateRequest) -> Completion:
        before, num_refused = self.version.name if self.version else "", self._num_refused
        output, spans = await self._output(request)
        while self._unproved:
            await self._settled.wait()
        if self._num_refused != num_refused:
            raise OutOfService(f"it ran with a version that had no proof ({self.reason or 'another is in service'})")
        return completion(request, output, spans or [(0, before)])

    async def _output(self, request: GenerateRequest) -> tuple[Any, Spans]:
        """vLLM's output for a request; raises `Refused` for what it will not compute."""
        adapter = self._adapters.current
        try:
            if request.scores_prompt:
                scoring.check(request, self.patches)
            prompt, params = prompt_arguments(request), sampling_arguments(request)
            if adapter is not None:
                with self._adapters.used(adapter):
                    output, _ = await self.host.generate(prompt, params, request.id, adapter, request.is_urgent)
                return output, []
            if self._keeps_context:
                return await self._generate_on_kept_context(request, prompt, params)
            return await self.host.generate(prompt, params, request.id, is_urgent=request.is_urgent)
        except refusals() as error:
            if self.host.is_dead:
                raise
            raise Refused(str(error)) from error

    async def _generate_on_kept_context(
        self, request: GenerateRequest, prompt: dict[str, Any], params: Any
    ) -> tuple[Any, Spans]:
        """Blocks of the prefix cache are told apart by the version that they are begun with; see `_begin_anew`."""
        ours = asyncio.current_task()
        while True:
            salt = f"{self.version.name}-{self.version.digest}" if self.version else "none"
            salted = {**prompt, "cache_salt": salt}
            computing = self.host.generate(salted, params, request.id, is_urgent=request.is_urgent)
            self._kept[request.id] = task = asyncio.create_task(computing)
            try:
                return await task
            except asyncio.CancelledError:
                if ours is None or ours.cancelling():
                    raise
            finally:
                del self._kept[request.id]

    def health(self) -> EngineHealth:
        """What this engine says of itself."""
        import vllm

        status = "ready" if not self.reason else "starting" if self.reason == "starting" else "out_of_service"
        return EngineHealth(
            status=status,
            version=self.version,
            vllm_version=vllm.__version__,
            plugin_version=slipstream.__version__,
            patches=self.patches,
            patches_left_out=self.patches_left_out,
            reason=self.reason,
            num_running=self.num_running,
        )


async def serve(settings: EngineSettings) -> bool:
    """Answer on the socket until SIGTERM or until the engine dies; False when it died."""
    server = EngineServer(settings, create_host(engine_arguments(settings), own_process=settings.own_process))
    start_marks.mark("verify")
    await server.start()
    gc.collect()
    gc.freeze()  # what was imported stays: to look through it takes longer than an update may
    gc.enable()
    runner = await listen(server, settings.socket)
    start_marks.mark(start_marks.READY)
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    while not (stop.is_set() or server.host.is_dead or server.is_hung()):
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), 0.2)
    if server.is_hung():
        print(f"vLLM has made no token for {_HUNG_S:.0f} s while it computes requests: it hangs", file=sys.stderr)
        lifeline.remove_files()
        os._exit(1)  # what hangs would not let itself be shut down
    died = server.host.is_dead
    await runner.cleanup()
    server.host.shutdown()
    lifeline.remove_files()
    return not died


def main() -> None:
    """Entry point of the child: settings are a JSON file, named on the command line or by standard input's one line."""
    gc.disable()  # until all is imported and loaded (`serve`): nothing of it becomes garbage, and looking takes a fifth
    os.environ[ENGINE_VARIABLE] = "1"
    order = lifeline.follow_stdin()
    with open(sys.argv[1] if len(sys.argv) > 1 else settings_later(order), "rb") as file:
        settings = msgspec.json.decode(file.read(), type=EngineSettings)
    os.environ[patch_table.VARIABLE] = settings.patches
    import uvloop

    if uvloop.run(serve(settings)):
        leave(0)
    print("the engine core died", file=sys.stderr)
    leave(1)


if __name__ == "__main__":
    main()
