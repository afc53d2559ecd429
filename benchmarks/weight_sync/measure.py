"""Starts a trainer and an engine, updates the engine's weights again and again, and times each update.

As in a run, this process is the trainer (`trainer`) and the engine is its child, which generates during all updates.
Versions are published, applied and verified by the same code as in a run. Nothing is trained: between two updates some
elements change their sign. Guarantees: every counted update was verified; the engine and all ranks end with the
measurement, however it ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import statistics
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from benchmarks.bridges import Bridge, create_adapter_bridge, create_bridge
from benchmarks.event_loop import call
from slipstream.config import (
    LoraConfig,
    ModelConfig,
    PlannedConfig,
    RLConfig,
    RunConfig,
    TrainingConfig,
    with_values,
)
from slipstream.config.traits import engine_workers, publishes_adapter
from slipstream.errors import ConfigError, Interrupted, WeightsError
from slipstream.launch.build import share_weights
from slipstream.launch.engines import RunEngine, create_engine, engine_gpus, engine_plan
from slipstream.launch.ranks.processes import rank_threads
from slipstream.orchestrator.control.executor import share
from slipstream.orchestrator.thread import EventLoopThread, wait_for
from slipstream.plan.deadlines import LEAST_S
from slipstream.plan.decided import planned_config
from slipstream.plan.deployable import ServeOptions, deployed_engine, find_deployable
from slipstream.plan.machine import measure_gpus, usable_cpus
from slipstream.plan.measure import measure_adapter, read_model
from slipstream.plan.memory.gpu_shares import num_gpus_needed, place
from slipstream.plan.memory.sizes import GIB
from slipstream.plan.summary import check_divided
from slipstream.processes.signals import StopRequest
from slipstream.processes.temporary import temporary
from slipstream.records import ApplyReport, GenerateRequest, SamplingParams, Ticket
from slipstream.weights import check_report
from slipstream.weights.base import Fence, NamedWeights
from slipstream.weights.bridges.single_copy import SharedWeights

from .collective import raw_broadcast_s
from .figures import PROMPT_TOKENS, TOGETHER, WORD_IDS, BridgeName, Memory, SyncFigures, SyncOptions, spread
from .process_memory import gpu_memory, gpus_in_use, host_memory, pids_of, session_of
from .trainer import SyncTrainer, sync_trainer

DELTA_CHANGED = 0.02
"""Largest fraction of changed elements under `weights.delta`: about that of one optimizer step in bfloat16."""
WARM_UP = 2
"""Updates that are not counted: the first one builds tensor maps and process groups."""
GATHER_REPEATS = 5
"""Repeats of the two measurements for several ranks: gathering alone, and a transfer of gathered weights."""
MAX_RESTARTS = 3
"""Most updates by `restart`, each of which takes as long as an engine's start; it needs no warm-up."""
_GRACE_S = 60.0


def measure_sync(
    names: Sequence[BridgeName], options: SyncOptions, on_result: Callable[[SyncFigures], None] = lambda _: None
) -> list[SyncFigures]:
    """Start one engine, measure each of these bridges on it while it generates, and stop it.

    Calls `on_result` with each bridge's figures as soon as they are known. Raises `ConfigError` if one of several
    bridges is not in TOGETHER, or if the options do not fit the model or this machine.
    """
    if len(names) > 1 and (others := [name for name in names if name not in TOGETHER]):
        raise ConfigError(f"{others[0]} needs an engine of its own: leave out --together, or use {', '.join(TOGETHER)}")
    configs = [_config(name, options) for name in names]
    found: list[SyncFigures] = []
    with (
        StopRequest() as stop,
        temporary("sync", options.scratch) as folder,
        _running(names[0], configs[0], options, Path(folder), stop) as sides,
    ):
        for number, (name, config) in enumerate(zip(names, configs, strict=True)):
            bridge = _bridge(name, config, Path(folder) / f"weights-{number}", sides)
            try:
                found.append(_Measurement(name, config, options, sides, bridge, number).measure())
            finally:
                bridge.publisher.close()
            on_result(found[-1])
    return found


def _config(name: BridgeName, options: SyncOptions) -> PlannedConfig:
    """Return the settings of a run that uses this bridge on this machine."""
    bridge, _, variant = name.partition("+")
    placement, ranks = _placement(bridge, variant, options)
    deployable = find_deployable(options.model)
    if deployable.adapter is not None:
        raise ConfigError(f"{options.model} is an adapter: name a whole model, and --bridges lora makes an adapter")
    facts = read_model(deployable.model, trust_remote_code=False)
    check_divided(facts, options.tensor_parallel_size, has_ranks=ranks > 1 and bridge == "single_copy")
    length = min(options.context, facts.context_length)
    if length < 2 * PROMPT_TOKENS:
        raise ConfigError(
            f"{length} tokens of context leave no room: use --context, and a model, of {2 * PROMPT_TOKENS} or more"
        )
    settings = deployed_engine(
        deployable,
        ServeOptions(
            max_model_len=length,
            max_num_seqs=options.streams,
            # vLLM requires this fraction of the GPU memory to be free at its start.
            gpu_memory_utilization=0.8 if placement == "separate" else 0.5,
        ),
    )
    config = RunConfig(
        model=ModelConfig(path=deployable.model),
        algorithm=RLConfig(),
        training=TrainingConfig(steps=1),
    )
    values = {
        "model.dtype": settings.dtype,
        "inference.max_model_len": settings.max_model_len,
        "inference.max_num_seqs": settings.max_num_seqs,
        "inference.kv_cache_gib": (settings.kv_cache_bytes or 0) / GIB,
        "inference.gpu_memory_utilization": settings.gpu_memory_utilization,
        "inference.enforce_eager": settings.enforce_eager,
        "inference.start_timeout_s": options.timeout_s,
        "inference.request_timeout_s": LEAST_S,
        "run.threads": usable_cpus(),
        "weights.bridge": bridge,
        "weights.delta": variant == "delta",
        "weights.in_flight": options.in_flight,
        "weights.apply_timeout_s": options.timeout_s,
        "run.placement": placement,
        "inference.replicas": options.replicas,
        "inference.tensor_parallel_size": options.tensor_parallel_size,
        "training.ranks": ranks,
        "training.rank_timeout_s": options.timeout_s,
    }
    config = planned_config(with_values(config, values))
    if "lora" not in (bridge, variant):
        return config
    fresh = LoraConfig(rank=options.rank)
    adapter = measure_adapter(config.model_copy(update={"lora": fresh}))
    assert adapter is not None
    return config.model_copy(update={"lora": fresh.model_copy(update={"target_modules": adapter.target_modules})})


def _placement(bridge: str, variant: str, options: SyncOptions) -> tuple[Literal["shared", "separate"], int]:
    """Return whether trainer and engine share GPUs, and the number of trainer processes (`single_copy`: one a worker).

    Raises `ConfigError` for options that contradict one another or need more GPUs than there are.
    """
    num_gpus, _ = measure_gpus()
    placement, size, shares = options.placement, options.tensor_parallel_size, bridge == "single_copy"
    ranks = options.ranks or (size if shares else 1)
    if shares and ranks != size:
        raise ConfigError(
            f"single_copy has one trainer process for each worker, and --ranks {ranks} is not --tensor-parallel-size "
            f"{size}: leave out --ranks"
        )
    if shares and options.replicas > 1:
        raise ConfigError("single_copy shares one engine's memory with the trainer: use --replicas 1")
    if shares and placement == "separate":
        raise ConfigError("single_copy has trainer and engine on the same cards: use --placement shared")
    if ranks > 1 and variant == "lora":
        raise ConfigError("single_copy+lora shares the base with one process: use --tensor-parallel-size 1")
    if ranks > 1 and bridge == "lora":
        raise ConfigError("lora is measured with one trainer process: leave out --ranks, or use another of --bridges")
    alone = ranks > 1 and not shares and num_gpus > 0
    if alone and placement == "shared":
        raise ConfigError(f"--ranks {ranks} have GPUs of their own: leave out --placement shared")
    if placement == "auto":
        placement = "separate" if alone or (num_gpus > size and not shares) else "shared"
    if placement == "separate" and num_gpus < 2 and not alone:
        raise ConfigError(f"--placement separate needs two GPUs, and there are {num_gpus}: use --placement shared")
    cards = place(ranks=ranks, replicas=options.replicas, tensor_parallel_size=size, separate=placement == "separate")
    if 0 < num_gpus < (needed := num_gpus_needed(cards)):
        asked = f"--replicas {options.replicas}" + (f" of --tensor-parallel-size {size}" if size > 1 else "")
        asked += f" beside --ranks {ranks}" if alone else ""
        raise ConfigError(f"{asked} needs {needed} GPUs, and there are {num_gpus}: use fewer")
    return placement, ranks


@dataclass(frozen=True)
class _Sides:
    """A trainer and an engine that are both ready."""

    trainer: SyncTrainer
    engine: RunEngine
    thread: EventLoopThread
    """Runs the engine's coroutines."""
    should_stop: Callable[[], bool]


@contextlib.contextmanager
def _running(
    name: BridgeName, config: PlannedConfig, options: SyncOptions, folder: Path, stop: StopRequest
) -> Generator[_Sides]:
    """Start the engine and the trainer in the order of `slipstream.launch.run`, yield them, and stop them."""
    import torch

    torch.set_num_threads(rank_threads(config))
    plan = engine_plan(config, config.model.path, on_cpu=not torch.cuda.is_available())
    engine = create_engine(plan, folder, lambda kind, **fields: None)
    stop.at_once = engine.kill
    thread = EventLoopThread(stop)
    shares = config.weights.bridge == "single_copy"
    try:
        if name != "restart":
            engine.launch()
        wait_s = options.timeout_s + _GRACE_S
        workers: tuple[SharedWeights, ...] = ()
        if shares:
            call(thread, engine.wait_ready(), wait_s, "the engine")
            what = "the engine to share its weights"
            workers = share_weights(config, lambda command: call(thread, share(engine, command), wait_s, what))
        with sync_trainer(config, workers, folder / "ranks", stop) as trainer:
            if name != "restart" and not shares:
                call(thread, engine.wait_ready(), wait_s, "the engine")
            yield _Sides(trainer, engine, thread, stop)
    finally:
        if not thread.stop(engine.stop()):
            engine.kill()


def _bridge(name: BridgeName, config: PlannedConfig, folder: Path, sides: _Sides) -> Bridge:
    model, engine = sides.trainer.model, sides.engine
    if publishes_adapter(config):
        assert model.adapter is not None
        return create_adapter_bridge(
            folder=folder, engine=engine, adapter=model.adapter.config, base_weights=model.base_weights()
        )
    timeout_s, apply_s = config.inference.start_timeout_s, config.weights.apply_timeout_s
    in_loop = partial(call, sides.thread)
    whole: Literal["disk", "restart", "broadcast", "single_copy"]
    assert name not in ("lora", "single_copy+lora")
    whole = "disk" if name == "disk+delta" else "broadcast" if name == "broadcast+delta" else name
    return create_bridge(
        whole,
        folder=folder,
        source=model.folder,
        engine=engine,
        timeout_s=apply_s,
        num_workers=engine_workers(config),
        between_gpus=_between_gpus(config, sides.trainer),
        held=(lambda: in_loop(engine.held(), timeout_s, "the engine")) if config.weights.delta else None,
        go_on=lambda version: in_loop(engine.go_on(version, apply_s), apply_s, "the engine to go on"),
    )


def _between_gpus(config: PlannedConfig, trainer: SyncTrainer) -> bool:
    return trainer.on_gpu and config.run.placement == "separate"


@dataclass(frozen=True)
class _Update:
    """Times of one update, in seconds."""

    report: ApplyReport
    copied_bytes: int
    """Bytes that the trainer copied to the engine while it wrote the weights."""
    publish_s: float
    commit_s: float
    stall_s: float
    total_s: float


class _Load:
    """Keeps `options.streams` long requests running between `start` and `stop`."""

    def __init__(self, engine: RunEngine, thread: EventLoopThread, options: SyncOptions, length: int) -> None:
        self._engine = engine
        self._thread = thread
        self._options = options
        self._length = length
        self._numbers = itertools.count()
        self._running: Future[None] | None = None

    def start(self) -> None:
        """Start the requests; each is followed by another one."""

        async def all_streams() -> None:
            async with asyncio.TaskGroup() as group:
                for _ in range(self._options.streams):
                    group.create_task(one_stream())

        async def one_stream() -> None:
            while True:
                await self._engine.generate(self._request(self._length - PROMPT_TOKENS))

        self._running = self._thread.submit(all_streams())

    def stop(self) -> None:
        """Cancel the requests; raises the error of one that has failed."""
        running, self._running = self._running, None
        if running is None:
            return
        if running.done():
            running.result()
        running.cancel()

    def first_token(self) -> None:
        """Send a new request and wait for its first token."""
        timeout_s = self._options.timeout_s
        call(self._thread, self._engine.generate(self._request(1)), timeout_s, "the engine's first token")

    def _request(self, num_tokens: int) -> GenerateRequest:
        number = next(self._numbers)
        prompt = [(7 * number + place * place) % WORD_IDS + 1 for place in range(PROMPT_TOKENS)]
        sampling = SamplingParams(max_tokens=num_tokens)
        return GenerateRequest(f"load-{number}", prompt, sampling, number, self._options.timeout_s)


class _Measurement:
    """The updates of one bridge."""

    def __init__(
        self, name: BridgeName, config: PlannedConfig, options: SyncOptions, sides: _Sides, bridge: Bridge, lineage: int
    ) -> None:
        self._name = name
        self._config = config
        self._options = options
        self._lineage = lineage
        """Lineage of this bridge's versions, so that no two bridges of one engine publish the same version."""
        self._trainer = sides.trainer
        self._engine = sides.engine
        self._thread = sides.thread
        self._should_stop = sides.should_stop
        self._bridge = bridge
        self._length = config.inference.max_model_len
        self._load = _Load(sides.engine, sides.thread, options, self._length)
        # Under `restart` an update starts a new engine, which does not have the running requests.
        self._keeps_requests = bridge.name != "restart"

    def measure(self) -> SyncFigures:
        """Run all updates, read the memory after the last one, and return the figures."""
        first = self._update(0)
        self._load.start()
        updates: list[_Update] = []
        num_counted, skipped = self._options.updates, WARM_UP - 1
        if not self._keeps_requests:
            num_counted, skipped = min(num_counted, MAX_RESTARTS), 0
        for step in range(1, 1 + skipped + num_counted):
            if self._should_stop():
                raise Interrupted("the measurement was stopped: start it again")
            if self._bridge.name == "lora":
                # The engine holds two adapters: a third one would wait until all requests of the first have ended.
                self._load.stop()
                self._load.start()
            time.sleep(self._options.pause_s)
            updates.append(self._update(step))
        counted = updates[skipped:]
        memory = self._memory(counted[-1].report)
        gathered = self._gathered(1 + skipped + num_counted)
        self._load.stop()
        return self._figures(first, counted, memory, gathered)

    def _gathered(self, step: int) -> tuple[float | None, float | None]:
        """Return `SyncFigures.gather_s` and `SyncFigures.from_one_s`."""
        if self._config.training.ranks == 1 or self._bridge.fence is not None:
            return None, None
        alone = [self._trainer.gather_s() for _ in range(1 + GATHER_REPEATS)][1:]
        if self._name != "broadcast":
            return statistics.median(alone), None
        transfers: list[float] = []
        for number in range(GATHER_REPEATS):
            time.sleep(self._options.pause_s)
            update = self._update(step + number, [(name, tensor.clone()) for name, tensor in self._trainer.published()])
            transfers.append(update.report.transfer_s)
        return statistics.median(alone), statistics.median(transfers)

    def _update(self, step: int, weights: NamedWeights | None = None) -> _Update:
        """Do one update as the training loop does: write new weights, publish, apply and verify.

        With `weights`, publish these and write nothing.
        """
        timeout_s = self._options.timeout_s
        if not self._keeps_requests:
            self._load.stop()
        copied_bytes = 0
        if self._bridge.fence is None and weights is None:
            self._change(step)
        began = time.perf_counter()
        commit_s = 0.0
        if self._bridge.fence is not None:
            call(self._thread, _await_fence(self._bridge.fence, timeout_s), timeout_s, "the engine to pause")
            fenced = time.perf_counter()
            copied_bytes = self._change(step)
            commit_s = time.perf_counter() - fenced
        published = time.perf_counter()
        under_way: list[Future[ApplyReport]] = []

        def announce(ticket: Ticket) -> Callable[[], bool]:
            under_way.append(self._thread.submit(self._bridge.receiver.apply(ticket, timeout_s)))
            return under_way[0].done

        try:
            weights = self._trainer.published() if weights is None else weights
            ticket = self._bridge.publisher.publish(weights, step, self._lineage, announce)
        except WeightsError as error:
            if under_way and under_way[0].done() and (cause := under_way[0].exception()) is not None:
                raise cause from error
            raise
        publish_s = time.perf_counter() - published
        report = wait_for(
            under_way[0],
            timeout_s,
            f"the engine to apply version {ticket.version.name}",
            should_stop=self._thread.should_stop,
        )
        check_report(report, ticket)
        total_s = time.perf_counter() - began
        stall_s = report.stall_s
        if not self._keeps_requests:
            self._load.first_token()
            stall_s = time.perf_counter() - began
            self._load.start()
        return _Update(report, copied_bytes, publish_s, commit_s, stall_s, total_s)

    def _change(self, step: int) -> int:
        """Flip the sign of the configured fraction of columns; returns the bytes copied to the engine for it."""
        changed = self._options.changed
        stride = max(1, round(1 / (min(changed, DELTA_CHANGED) if self._config.weights.delta else changed)))
        return self._trainer.change(step % stride, stride)

    def _memory(self, report: ApplyReport) -> tuple[Memory, Memory]:
        theirs = [pid for leader in pids_of(self._engine) for pid in session_of(leader)]
        on_gpu = self._trainer.on_gpu
        sides = ((self._trainer.pids, self._trainer.allocated_bytes()), (theirs, report.memory_bytes))
        ours, others = (
            Memory(**host_memory(pids), torch=allocated if on_gpu else None, gpu=gpu_memory(pids) if on_gpu else None)
            for pids, allocated in sides
        )
        return ours, others

    def _raw_s(self, num_bytes: int) -> float | None:
        """Return `SyncFigures.raw_s`."""
        if self._name != "broadcast":
            return None
        receivers: list[tuple[str, ...]] = [()] * engine_workers(self._config)
        backend: Literal["gloo", "nccl"] = "gloo"
        if _between_gpus(self._config, self._trainer):
            backend, visible = "nccl", os.environ.get("CUDA_VISIBLE_DEVICES")
            cards = (engine_gpus(self._config, visible, number) for number in range(self._options.replicas))
            receivers = [(card,) for engine in cards for card in engine]
        return raw_broadcast_s(num_bytes, backend, receivers, timeout_s=self._options.timeout_s)

    def _figures(
        self,
        first: _Update,
        updates: list[_Update],
        memory: tuple[Memory, Memory],
        gathered: tuple[float | None, float | None],
    ) -> SyncFigures:
        reports = [update.report for update in updates]
        stalls = [update.stall_s for update in updates if update.stall_s > 0]
        transfer = spread([report.transfer_s for report in reports])
        num_bytes = reports[-1].num_bytes + updates[-1].copied_bytes
        on_gpu, raw_s = self._trainer.on_gpu, self._raw_s(num_bytes)
        return SyncFigures(
            bridge=self._name,
            model=self._options.model,
            num_parameters=self._trainer.num_parameters,
            dtype=self._config.model.dtype,
            placement=self._config.run.placement if on_gpu else "cpu",
            tensor_parallel_size=self._options.tensor_parallel_size,
            ranks=self._config.training.ranks,
            in_flight=self._options.in_flight,
            context=self._length,
            num_updates=len(updates),
            num_bytes=num_bytes,
            first_update_s=first.total_s,
            publish=spread([update.publish_s for update in updates]),
            transfer=transfer,
            verify=spread([report.verify_s for report in reports]),
            commit=spread([update.commit_s for update in updates]) if self._bridge.fence is not None else None,
            stall=spread(stalls) if stalls else None,
            update=spread([update.total_s for update in updates]),
            raw_s=raw_s,
            raw_share=raw_s / transfer.median if raw_s is not None else None,
            gather_s=gathered[0],
            from_one_s=gathered[1],
            trainer=memory[0],
            engine=memory[1],
            gpus=gpus_in_use() if on_gpu else [],
        )


async def _await_fence(fence: Fence, timeout_s: float) -> None:
    await fence(timeout_s)
