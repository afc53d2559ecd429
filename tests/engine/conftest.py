"""Real vLLM engines, shared by the session: starting one costs about fifteen seconds."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pytest
import torch
from benchmarks.bridges import Bridge
from benchmarks.event_loop import call

from slipstream.commands.small_models.tiny_qwen3 import new_model
from slipstream.inference.engine import SupervisedEngine
from slipstream.inference.replicas import EngineReplicas
from slipstream.inference.settings import EngineSettings
from slipstream.orchestrator.thread import EventLoopThread
from slipstream.records import ApplyReport, Completion, GenerateRequest, SamplingParams, Ticket
from slipstream.records import Sequence as Tokens
from slipstream.trainer.learner import score
from slipstream.trainer.model.policy import PolicyModel
from slipstream.weights import check_report

T = TypeVar("T")
PROMPTS = [[(7 * i + 3 * j) % 90 + 1 for j in range(10 + 5 * i)] for i in range(8)]


@dataclasses.dataclass
class LiveEngine:
    """An engine and the thread whose event loop it belongs to."""

    engine: SupervisedEngine | EngineReplicas
    thread: EventLoopThread
    model: Path
    events: list[tuple[str, dict[str, Any]]]

    def __enter__(self) -> LiveEngine:
        return self

    def __exit__(self, *_: object) -> None:
        stop(self)

    def call(self, work: Coroutine[Any, Any, T], timeout_s: float = 120.0) -> T:
        return call(self.thread, work, timeout_s, "the engine under test")

    def bring(self, bridge: Bridge, weights: Any, step: int, lineage: int = 0) -> tuple[Ticket, ApplyReport]:
        """Publish weights, which the engine takes meanwhile."""
        under_way = []

        def announce(ticket: Ticket) -> None:
            under_way.append(self.thread.submit(bridge.receiver.apply(ticket, 60)))

        ticket = bridge.publisher.publish(weights, step, lineage, announce)
        return ticket, under_way[0].result(60)

    def update(self, bridge: Bridge, weights: Any, step: int, lineage: int = 0) -> Ticket:
        """Bring weights, and have the engine prove them."""
        ticket, report = self.bring(bridge, weights, step, lineage)
        check_report(report, ticket)
        return ticket

    def generate(self, *requests: GenerateRequest) -> list[Completion]:
        import asyncio

        async def all_of_them() -> list[Completion]:
            return await asyncio.gather(*(self.engine.generate(request) for request in requests))

        return self.call(all_of_them())

    def sample(self, tag: str, sampling: SamplingParams, prompts: list[list[int]] | None = None) -> list[Completion]:
        prompts = prompts or PROMPTS
        return self.generate(
            *(GenerateRequest(f"{tag}-{i}", prompt, sampling, seed=i) for i, prompt in enumerate(prompts))
        )

    def until_running(
        self, number: int = 1, *, ended: Callable[[], int] = lambda: 0, engine: SupervisedEngine | None = None
    ) -> None:
        """Wait until so many requests, those that have ended already included, have begun inside the engine."""
        deadline = time.monotonic() + 120
        while True:
            num_ended = ended()
            health = self.call((engine or self.engine).process.client.health())
            if health is not None and health.num_running + num_ended >= number:
                return
            assert time.monotonic() < deadline, f"{number} requests have not begun: {health}"
            time.sleep(0.005)

    @contextlib.contextmanager
    def under_load(
        self, tag: str, prompts: Any = PROMPTS, images: tuple[bytes, ...] = ()
    ) -> Iterator[list[tuple[list[int], Completion]]]:
        """Long requests again and again, from when they have tokens to the end of the block, however fast they are;
        prompts and completions of those that have ended."""
        has_tokens, is_over, ended = threading.Event(), threading.Event(), []

        async def go_on(place: int) -> None:
            sampling = SamplingParams(max_tokens=200 if place else 2)
            for number in itertools.count():
                id_ = f"{tag}-{place}-{number}"
                request = GenerateRequest(id_, prompts[place], sampling, seed=number, images=images)
                completion = await self.engine.generate(request)
                assert completion.finish_reason != "abort", completion.error
                ended.append((prompts[place], completion))
                # The short one has ended: the others came with it.
                if place == 0:
                    has_tokens.set()
                if is_over.is_set():
                    return

        running = [self.thread.submit(go_on(place)) for place in range(len(prompts))]
        try:
            assert has_tokens.wait(120), "no request was answered"
            yield ended
        finally:
            is_over.set()
            for each in running:
                each.result(120)


def settings_for(model: Path, dtype: str = "float32", *, threads: int = 1, **changes: Any) -> EngineSettings:
    size = {"max_model_len": 256, "max_num_seqs": 64, "kv_cache_bytes": 1 << 28}
    return EngineSettings(model=str(model), dtype=dtype, threads=threads, **size, **changes)


def create(
    model: Path,
    folder: Path,
    dtype: str = "float32",
    *,
    max_restarts: int = 1,
    start_timeout_s: float = 300,
    **changes: Any,
) -> LiveEngine:
    """An engine that does not run yet."""
    thread = EventLoopThread(lambda: False)
    events: list[tuple[str, dict[str, Any]]] = []

    async def create() -> SupervisedEngine:
        return SupervisedEngine(
            settings_for(model, dtype, **changes),
            folder / "engine.log",
            start_timeout_s=start_timeout_s,
            max_restarts=max_restarts,
            on_event=lambda kind, **fields: events.append((kind, fields)),
            silence_s=60.0,
        )

    return LiveEngine(call(thread, create(), 10, "the engine object"), thread, model, events)


def create_replicas(
    model: Path,
    folder: Path,
    dtype: str = "float32",
    *,
    max_restarts: int,
    gpus: Sequence[tuple[str, ...]] = ((), ()),
    kind: type[LiveEngine] = LiveEngine,
) -> Any:
    """An engine for each of `gpus`, as one that does not run yet, of this kind."""
    thread = EventLoopThread(lambda: False)
    events: list[tuple[str, dict[str, Any]]] = []

    def note(kind: str, **fields: Any) -> None:
        events.append((kind, fields))

    async def create() -> EngineReplicas:
        settings = msgspec.structs.replace(settings_for(model, dtype), threads=1)
        engines = [
            SupervisedEngine(
                msgspec.structs.replace(settings, first_rank=1 + number, gpus=own),
                folder / f"engine-{number}.log",
                start_timeout_s=300,
                max_restarts=max_restarts,
                on_event=note,
            )
            for number, own in enumerate(gpus)
        ]
        return EngineReplicas(engines, num_places=settings.max_num_seqs, on_event=note)

    return kind(call(thread, create(), 10, "the engine objects"), thread, model, events)


def start(model: Path, folder: Path, dtype: str = "float32", *, max_restarts: int = 1, **changes: Any) -> LiveEngine:
    live = create(model, folder, dtype, max_restarts=max_restarts, **changes)
    live.engine.launch()
    live.call(live.engine.wait_ready(), 320)
    return live


def stop(live: LiveEngine) -> None:
    live.thread.stop(live.engine.stop())


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return new_model(tmp_path_factory.mktemp("models") / "tiny", hidden_size=64, num_layers=2, seed=3)


@pytest.fixture(scope="session")
def live(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveEngine]:
    """A float32 engine; whoever applies another version to it leaves it in service."""
    live = start(tiny_model, tmp_path_factory.mktemp("engine"), options={"max_logprobs": -1})
    yield live
    stop(live)


def perturbed(weights: dict[str, torch.Tensor], seed: int, scale: float = 0.02) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: (w.float() + scale * torch.randn(w.shape, generator=generator)).to(w.dtype) for name, w in weights.items()
    }


def sequence_of(prompt: list[int], completion: Completion, **more: Any) -> Tokens:
    """What the trainer sees of it: its own tokens are the sampled ones."""
    said = completion.token_ids
    return Tokens([*prompt, *said], [False] * len(prompt) + [True] * len(said), **more)


def differences(
    live: LiveEngine, model: PolicyModel, sampling: SamplingParams, prompts: list[list[int]] | None = None
) -> torch.Tensor:
    """Of each sampled token's log-probability between engine and trainer."""
    completions = live.sample(f"compared-{os.urandom(4).hex()}", sampling, prompts)
    sequences = [sequence_of(prompt, c) for prompt, c in zip(prompts or PROMPTS, completions, strict=True)]
    ours = torch.cat(score(model, sequences, sampling, micro_batch_tokens=1024).logprobs)
    return (ours - torch.tensor([value for c in completions for value in c.logprobs or []])).abs()


def mean_difference(live: LiveEngine, policy: PolicyModel, sampling: SamplingParams) -> float:
    """The mean of `differences`."""
    return differences(live, policy, sampling).mean().item()


def sparsely(
    weights: dict[str, torch.Tensor], seed: int, density: float = 0.03, scale: float = 0.3
) -> dict[str, torch.Tensor]:
    """Changed in about that part of the elements, as an optimizer's small steps do in bfloat16."""
    generator = torch.Generator().manual_seed(seed)
    changed = {}
    for name, w in weights.items():
        noise = scale * torch.randn(w.shape, generator=generator)
        noise[torch.rand(w.shape, generator=generator) >= density] = 0
        changed[name] = (w.float() + noise).to(w.dtype)
    return changed
