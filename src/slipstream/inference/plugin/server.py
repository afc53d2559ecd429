"""`EngineServer`: vLLM behind the operations that a run needs, with updates of the weights in place and their proof.

Guarantees:
- Tokens in, tokens out; every sampled token comes with its processed log-probability and weight version.
- A request is answered only while the engine is in service (`service.State`): from the beginning of an update until its
  fingerprints are verified, and after any failed update, requests wait or are refused.
- An answer with a token of a version that is not verified yet is held until it is, and withheld when it never is.
- A request ends at its deadline or when its client goes away, inside vLLM too. Its time counts from when vLLM has it,
  and not while an update holds it up: that has a deadline of its own.
- An answer that contradicts itself puts the engine out of service.
- A request with tools is answered with the calls in its completion (`tools.reader`), or refused without a tool parser.

`routes` is its HTTP face, `main` the process.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from typing import Any

import msgspec

import slipstream
from slipstream.inference.lending import Terms
from slipstream.inference.plugin.arguments import checked_head, prompt_arguments, sampling_arguments
from slipstream.inference.plugin.completions import Refused, aborted, completion, contradiction, refusals
from slipstream.inference.plugin.guests import POLL_S, Guests
from slipstream.inference.plugin.hosts import Host, LoadedAdapter
from slipstream.inference.plugin.patches import patch_table, scoring
from slipstream.inference.plugin.recording import Sessions
from slipstream.inference.plugin.service import OutOfService, Service, State, Steps
from slipstream.inference.plugin.token_clock import Stillness
from slipstream.inference.plugin.tools.reader import Reading, ToolReader
from slipstream.inference.plugin.version_labels import Spans
from slipstream.inference.plugin.weights import tensor_map
from slipstream.inference.plugin.weights.adapters import Adapters
from slipstream.inference.settings import EngineSettings
from slipstream.patience import Patience
from slipstream.processes import lifeline
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
"""After an update in place `go_on` waits at most this long for the first token of the running requests."""
_DEADLINE_REMEDY = "raise inference.request_timeout_s, or lower sampling.max_tokens or inference.max_num_seqs"
HUNG_S = 180.0
"""No single step of vLLM takes longer: an engine that has requests and makes no step for so long hangs."""


class EngineServer:
    """Owns vLLM's engine, its weight version and its service state."""

    def __init__(self, settings: EngineSettings, host: Host) -> None:
        self.settings = settings
        self.host = host
        self.service = Service()
        self.steps = Steps(host)
        self.version: Version | None = None
        self.num_running = 0
        self.patches: tuple[str, ...] = ()
        self.patches_left_out: dict[str, str] = {}
        # Twice `max_num_seqs`, so that vLLM always has requests waiting; a request's deadline counts from here on.
        self._queue = asyncio.Semaphore(2 * settings.max_num_seqs)
        # Urgent requests (the probe, an evaluation) never wait for others.
        self._urgent_queue = asyncio.Semaphore(2 * settings.max_num_seqs)
        self._stillness = Stillness(host.clock)
        self.guests = Guests(host, self.service, 2 * settings.max_num_seqs)
        """Requests of foreign clients (`http`)."""
        self.sessions = Sessions()
        """Sessions of agents; their requests come the same way."""
        self.digests: dict[str, str] = {}
        """By the names of versions."""
        self._adapters = Adapters(host, self.guests.uses)
        self._early: dict[Patience, str] = {}
        """Requests that entered vLLM during the update under way, each with the reason of its refusal, once refused."""
        self.service.on_failure.append(self._refuse_early)
        self._request_ended = asyncio.Event()
        self._updating = asyncio.Lock()
        """Updates are one at a time: one whose client gave up may be in a collective when the next is asked for."""
        self._computing: dict[str, asyncio.Task[tuple[Any, Spans]]] = {}
        """Under in_flight = keep, the task in which vLLM computes each request."""
        self._base_verified = False
        self._tool_reader: ToolReader | None = None

    async def start(self) -> None:
        """Verify the loaded weights, then go into service."""
        described = [msgspec.json.decode(text) for text in await self.host.rpc("slipstream_describe")]
        if not all("flush" in {*each["patches"], *each["patches_left_out"]} for each in described):
            raise RuntimeError(
                "vLLM did not load Slipstream's plugin, without which its tokens and updates cannot be trusted: "
                "install the package, so that its entry point in vllm.general_plugins is found"
            )
        for path in described[0]["files"]:
            lifeline.remove_at_end(path)
        self.patches = tuple(described[0]["patches"])
        self.patches_left_out = described[0]["patches_left_out"]
        if self.settings.tool_parser:
            self._tool_reader = ToolReader(self.settings.tool_parser, self.host.tokenizer)
        if self.settings.fp32_head:
            self.patches += (checked_head([each["head_dtypes"] for each in described]),)
        for patch in patch_table.asking(self.settings):
            why = self.patches_left_out.get(patch.name, "")
            if patch.on == "gpu" and patch.name not in self.patches:
                why = why or "it needs a GPU, and vLLM runs on a CPU"
            if why:
                raise RuntimeError(f"model.{patch.setting} = true is not possible ({why}): set it to false")
        if self.settings.version is not None:
            report = await self._verify(self.settings.version, self.settings.parameters)
            if report.mismatched:
                raise RuntimeError(f"loaded weights differ from version {report.version.name}: {report.mismatched}")
            if report.unverified:
                raise RuntimeError(
                    f"loaded weights of version {report.version.name} cannot be verified: {report.unverified}"
                )
            self._take(self.settings.version)
            await self.host.set_version(self.settings.version.name)
        self.service.started()
        for ticket in (*self.settings.deltas, *filter(None, [self.settings.adapter])):
            report = await self.apply(ticket)
            if report.mismatched or report.unverified:
                raise RuntimeError(
                    f"{'delta' if ticket.delta else 'adapter'} of version {report.version.name} differs or cannot be "
                    f"verified: {report.mismatched or report.unverified}"
                )

    async def lend(self, terms: Terms) -> None:
        """Serve another run. It leaves the process group of the one before, and forgets sessions of its agents."""
        async with self._updating:
            await self.host.rpc("slipstream_leave")
            self.sessions.clear()
            self.settings = msgspec.structs.replace(
                self.settings,
                first_rank=terms.first_rank,
                in_flight=terms.in_flight,
                tool_parser=terms.tool_parser,
                reasoning_parser=terms.reasoning_parser,
            )
            self._tool_reader = ToolReader(terms.tool_parser, self.host.tokenizer) if terms.tool_parser else None

    async def verify(self, ticket: Ticket) -> ApplyReport:
        """Compare the live weights with a ticket: the whole model, or a LoRA adapter and its base model."""
        if self.service.state is State.ASLEEP:
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
        """Load a version in place, verify it, and reset the prefix cache.

        Running requests are paused meanwhile. Then they go on with the new version, their KV cache recomputed or kept,
        or the update waits for their end first (`EngineSettings.in_flight`). With LoRA a request keeps the adapter that
        it began with; a third adapter waits for the requests of the first. After a failure the engine is out of service
        and paused requests stay paused, until their deadline or until their client goes away. Raises `WeightsError`,
        with nothing changed, for a delta against any version but the one in service. An update that is under way is
        waited for.
        """
        async with self._updating:
            check_base(ticket, self.version if self.service.is_serving else None, self.service.reason)
            if ticket.bridge == "lora":
                await self._adapters.until_room()
            name = ticket.version.name
            is_running = ticket.bridge == "single_copy" and self.service.unproved == name and not self.steps.is_paused
            self.service.begin_apply(name, proves_running=is_running)
            if not is_running:
                self._begin_stall()
            try:
                report = await self._apply(ticket, is_running=is_running)
                if unproved := report.mismatched + report.unverified:
                    self.service.fail(f"version {name} did not verify: {', '.join(unproved[:3])}")
                    return report
                self._take(ticket.version)
                self.service.proved()
                self._early = {patience: why for patience, why in self._early.items() if why}
            except Exception as error:
                self.service.fail(f"applying version {name} failed: {error}")
                raise
            except asyncio.CancelledError:
                self.service.fail(f"applying version {name} was cancelled by the caller")
                raise
            finally:
                if is_running and not self.service.is_serving:
                    await self._pause()
            return msgspec.structs.replace(report, stall_s=await self.host.clock.end(self._is_computing))

    def _is_computing(self) -> bool:
        return self.num_running > 0 or self.guests.num_running > 0

    def _take(self, version: Version) -> None:
        self.version = version
        self.digests[version.name] = version.digest

    @property
    def base(self) -> Version | None:
        """Under LoRA: the version of the base model."""
        return self.settings.version

    @property
    def adapter(self) -> LoadedAdapter | None:
        """Under LoRA: the adapter of new requests."""
        return self._adapters.current

    @property
    def cache_salt(self) -> str:
        """With in_flight = keep, it separates prefix cache blocks by the version at a request's start."""
        if not self._keeps_context or self.settings.lora_rank is not None:
            return ""
        return f"{self.version.name}-{self.version.digest}" if self.version else "none"

    def _begin_stall(self) -> None:
        if self._is_computing() and not self.steps.is_paused:
            self.host.clock.begin()

    async def _apply(self, ticket: Ticket, *, is_running: bool) -> ApplyReport:
        """Load, verify and resume; `is_running`: vLLM computes with the version already, which is only verified."""
        seconds, num_bytes = 0.0, 0
        if ticket.bridge == "lora":
            seconds, num_bytes = await self._load_adapter(ticket)
        elif not is_running:
            await self._pause()
            seconds, num_bytes = await self._load(ticket)
        report = msgspec.structs.replace(await self._verify_applied(ticket), transfer_s=seconds, num_bytes=num_bytes)
        if not (report.mismatched or report.unverified or is_running):
            await self._change_to(ticket.version, is_whole=ticket.bridge != "lora")
        return report

    async def _change_to(self, version: Version, *, is_whole: bool = True) -> None:
        """Resume with `version`, without anything cached that another version computed. The prefix cache needs no
        reset for an adapter: vLLM hashes the adapter's name, which is used once."""
        if is_whole and not self._keeps_context and not await self.host.reset_prefix_cache():
            raise RuntimeError("vLLM refused to reset the prefix cache")
        await self.host.set_version(version.name)
        self._take(version)
        if self._keeps_context:
            await self._restart_prefills()
        if is_whole:
            await self.host.reset_encoder_cache()
        await self.steps.resume()

    async def go_on(self, version: Version) -> None:
        """Resume with the weights that were written in place since the fence, as `version`. Answers with tokens of it
        are held back until `apply` has verified it."""
        async with self._updating:
            self.service.begin_proof(version.name)
            self._begin_stall()
            try:
                await self._pause()
                await self.host.rpc("slipstream_written")
                self.service.compute_unproved(version.name)
                await self._change_to(version)
                self._admit()
                # The trainer computes fingerprints next, perhaps on the same GPU: running requests make a step before.
                if self.host.clock.is_watching:
                    await self.host.clock.next(self._is_computing, _FIRST_TOKEN_S)
            except BaseException as error:
                self.service.fail(f"resuming with version {version.name} failed: {error!r}")
                raise

    def _admit(self) -> None:
        """Let requests enter vLLM. With in_flight = keep they wait: each one's context is of its first version."""
        if not self._keeps_context:
            self.service.admit()

    async def _pause(self) -> None:
        """Pause vLLM; with in_flight = drain only after the last running request. No request begins meanwhile."""
        while not self.steps.is_paused and self.settings.in_flight == "drain" and self._is_computing():
            # Bounded by the requests' deadlines, and by the client of the call that waits.
            self._request_ended.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(POLL_S if self.guests.num_running else None):
                    await self._request_ended.wait()
        await self.steps.pause()

    @property
    def _keeps_context(self) -> bool:
        return self.settings.in_flight == "keep"

    async def _restart_prefills(self) -> None:
        """Restart requests without an output token: the KV cache of their prompt comes from the old version."""
        counts = await self.host.num_tokens()
        tasks = [task for id_, task in self._computing.items() if not counts.get(id_)]
        for task in tasks:
            task.cancel()
        await self.guests.restart(counts)
        if tasks:
            await asyncio.wait(tasks)

    async def _load(self, ticket: Ticket) -> tuple[float, int]:
        """Load a whole model in place; returns seconds and bytes."""
        text, first_rank = msgspec.json.encode(ticket).decode(), str(self.settings.first_rank)
        loads = [msgspec.json.decode(answer) for answer in await self.host.rpc("slipstream_load", text, first_rank)]
        return max(load["seconds"] for load in loads), sum(load["num_bytes"] for load in loads)

    async def _load_adapter(self, ticket: Ticket) -> tuple[float, int]:
        """Load a LoRA adapter; returns seconds and bytes."""
        if self.settings.lora_rank is None:
            raise RuntimeError("the engine was started without room for an adapter")
        started = time.perf_counter()
        await self._adapters.load(ticket)
        return time.perf_counter() - started, ticket.num_bytes

    async def _verify_adapter(self, version: Version, parameters: tuple[ParameterSpec, ...]) -> ApplyReport:
        loaded = json.dumps(self._adapters.ids)
        return await self._verify(version, parameters, "slipstream_fingerprint_adapter", loaded)

    async def _verify_applied(self, ticket: Ticket) -> ApplyReport:
        """As `verify`, but an adapter's base model, which never changes, is verified only once."""
        if ticket.bridge != "lora" or not self._base_verified:
            report = await self.verify(ticket)
            self._base_verified = not (report.mismatched or report.unverified)
            return report
        return await self._verify_adapter(ticket.version, ticket.parameters)

    async def fence(self) -> None:
        """Pause until the next `go_on` or `apply`: the trainer is about to write the weights in place."""
        async with self._updating:
            self.service.fence()
            self._begin_stall()
            await self._pause()
            await self.host.rpc("slipstream_settle")
            self._admit()

    async def share(self, parameters: tuple[ParameterSpec, ...]) -> tuple[SharedWeights, ...]:
        """Handles of each worker's live weights, for a trainer that writes them in place. The engine is fenced until
        the first version."""
        await self.fence()
        answers = await self.host.rpc("slipstream_share", msgspec.json.encode(parameters).decode())
        shared = tuple(msgspec.json.decode(answer, type=SharedWeights) for answer in answers)
        for path in set[str]().union(*(worker.files() for worker in shared)):
            lifeline.remove_at_end(path)
        return shared

    async def leave(self) -> None:
        """Have all workers leave the process group that brings weights."""
        async with self._updating:
            await self.host.rpc("slipstream_leave")

    async def sleep(self) -> None:
        """Free the GPU memory of weights and KV cache until `wake`; the weights move to the CPU's memory. Raises
        `OutOfService` while requests run."""
        if number := self.num_running + self.guests.num_running:
            raise OutOfService(f"{number} requests are running: let them end before the engine sleeps")
        if self.service.state is State.ASLEEP:
            return
        if not self.service.is_serving:
            raise OutOfService(self.service.reason)
        self.service.sleep()
        await self.host.sleep()

    async def wake(self) -> None:
        """Take the memory back, with the same weights and an empty KV cache."""
        if self.service.state is State.ASLEEP:
            await self.host.wake()
            self.service.wake()

    def is_hung(self) -> bool:
        """Whether vLLM has made no step for `HUNG_S` while it had requests; call it several times a second."""
        return self._stillness.lasts_s(self._is_computing() and self.service.is_serving) > HUNG_S

    @property
    def doing(self) -> str:
        """The engine's activity, for the heartbeat of its process."""
        if not self.service.is_serving:
            return f"in the state {self.service.state.value}"
        return "computing requests" if self._is_computing() else "waiting for requests"

    async def generate(self, request: GenerateRequest) -> Completion:
        """One completion. When its deadline passed, or vLLM rejected it, the finish reason is `abort` and `error` says
        why."""
        async with self._urgent_queue if request.is_urgent else self._queue:
            try:
                await self.service.until_admitted()
            except OutOfService as error:
                return aborted(request, "refused", f"was not begun: {error}")
            return await self._generate_in_time(request)

    async def _generate_in_time(self, request: GenerateRequest) -> Completion:
        if not self.num_running:
            self.host.clock.tick()
        self.num_running += 1
        patience = Patience(request.timeout_s, lambda: self.steps.is_running or not self.service.is_updating)
        if self.service.is_updating:
            self._early[patience] = ""
        try:
            async with patience:
                return await self._generate(request)
        except OutOfService as error:
            return aborted(request, "refused", f"cannot be answered: {error}")
        except TimeoutError:
            if why := self._early.get(patience):
                return aborted(request, "refused", f"cannot be answered: {why}")
            return aborted(request, "late", f"passed its deadline of {request.timeout_s:g} s: {_DEADLINE_REMEDY}")
        except Refused as error:
            return aborted(request, "invalid", f"was refused by vLLM: {error}")
        except Exception as error:
            if self.host.is_dead:
                raise
            answer = contradiction(request, error)
            self.service.contradict(f"the answer to request {request.id} {answer.error}")
            return answer
        finally:
            self._early.pop(patience, None)
            self.num_running -= 1
            self._request_ended.set()

    def _refuse_early(self, reason: str) -> None:
        """The update has failed: requests that entered vLLM meanwhile are refused, as it stays paused."""
        self._early = {patience: why or reason for patience, why in self._early.items()}
        for patience in self._early:
            patience.end()

    async def _generate(self, request: GenerateRequest) -> Completion:
        before, num_discarded = self.version.name if self.version else "", self.service.num_discarded
        output, spans = await self._output(request)
        reading: Reading | None = None
        if self._tool_reader is not None and request.tools and not request.scores_prompt:
            reading = await self._tool_reader.read(request, output)
        await self.service.until_proved(num_discarded)
        return completion(request, output, spans or [(0, before)], reading)

    def _check_tools(self, request: GenerateRequest) -> None:
        if not request.tools:
            return
        if self._tool_reader is None:
            raise Refused("it has tools, and the engine was started without a tool parser: set inference.tool_parser")
        try:
            self._tool_reader.check(request.tools)
        except Exception as error:
            raise Refused(f"its tools are not what vLLM takes ({error}): correct their schemas") from error

    async def _output(self, request: GenerateRequest) -> tuple[Any, Spans]:
        """vLLM's output for a request, and its version spans. Raises `Refused` for a request that vLLM rejects."""
        adapter = self._adapters.current
        self._check_tools(request)
        try:
            if request.scores_prompt:
                scoring.check(request, self.patches)
            prompt, params = prompt_arguments(request), sampling_arguments(request)
            if adapter is not None:
                with self._adapters.used(adapter):
                    output, _ = await self.host.generate(prompt, params, request.id, adapter, request.is_urgent)
                return output, []
            if self._keeps_context:
                return await self._generate_keeping_context(request, prompt, params)
            return await self.host.generate(prompt, params, request.id, is_urgent=request.is_urgent)
        except refusals() as error:
            if self.host.is_dead:
                raise
            raise Refused(str(error)) from error

    async def _generate_keeping_context(
        self, request: GenerateRequest, prompt: dict[str, Any], params: Any
    ) -> tuple[Any, Spans]:
        """Generate with in_flight = keep. Cancelling the task in `_computing` restarts the request."""
        ours = asyncio.current_task()
        while True:
            salted = {**prompt, "cache_salt": self.cache_salt}
            computing = self.host.generate(salted, params, request.id, is_urgent=request.is_urgent)
            self._computing[request.id] = task = asyncio.create_task(computing)
            try:
                return await task
            except asyncio.CancelledError:
                if ours is None or ours.cancelling():
                    raise
            finally:
                del self._computing[request.id]

    def health(self) -> EngineHealth:
        """The answer to `/health`."""
        import vllm

        reader = self._tool_reader
        return EngineHealth(
            status=self.service.status,
            version=self.version,
            vllm_version=vllm.__version__,
            plugin_version=slipstream.__version__,
            patches=self.patches,
            patches_left_out=self.patches_left_out,
            reason=self.service.reason,
            num_running=self.num_running + self.guests.num_running,
            info={"tool_parser": reader.name, "tool_parser_failures": reader.num_failures} if reader else {},
        )
