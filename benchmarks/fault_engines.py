"""What faults happen to: engines with a bridge, versions that anybody can make again, and those who ask."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file

from benchmarks.bridges import Bridge, create_bridge
from benchmarks.event_loop import call
from benchmarks.weight_sync.process_memory import pids_of
from slipstream.commands.small_models.tiny_qwen3 import new_model
from slipstream.errors import EngineError
from slipstream.inference.engine import SupervisedEngine
from slipstream.inference.replicas import EngineReplicas
from slipstream.inference.settings import EngineSettings
from slipstream.orchestrator.thread import EventLoopThread
from slipstream.records import Completion, GenerateRequest, SamplingParams, Sequence, Ticket
from slipstream.trainer.learner import score
from slipstream.trainer.model.policy import PolicyModel
from slipstream.weights import check_report

TIMEOUT_S, GROUP_TIMEOUT_S = 60.0, 2.0
START_S = 300.0
PROMPTS = [[(7 * i + 3 * j) % 90 + 1 for j in range(12 + 5 * i)] for i in range(4)]


class Weights:
    """Versions that anybody can make again from their number, and what they answer."""

    def __init__(self, model: Path) -> None:
        self.original = load_file(model / "model.safetensors")
        self.policy = PolicyModel.load(model)

    def of(self, step: int) -> dict[str, torch.Tensor]:
        """The weights of version `step`."""
        generator = torch.Generator().manual_seed(step)
        return {k: w + 0.02 * torch.randn(w.shape, generator=generator) for k, w in self.original.items()}

    def num_wrong(self, completions: list[Completion]) -> int:
        """How many of these are not what the versions that they name would have sampled."""
        return sum(not self._is_right(completion) for completion in completions)

    def _is_right(self, completion: Completion) -> bool:
        prompt = PROMPTS[int(completion.id.rpartition("-")[2])]
        ends = [span.start for span in completion.versions[1:]] + [len(completion.token_ids)]
        for span, end in zip(completion.versions, ends, strict=True):
            self.policy.network.load_state_dict(self.of(int(span.version.split(".")[1])), strict=False)
            tokens = [*prompt, *completion.token_ids[:end]]
            mask = [False] * (len(prompt) + span.start) + [True] * (end - span.start)
            (ours,) = score(self.policy, [Sequence(tokens, mask)], micro_batch_tokens=8192).logprobs
            if (ours - torch.tensor(completion.logprobs[span.start : end])).abs().max() > 1e-3:
                return False
        return True


class Pair:
    """An engine that may die any number of times, and a bridge to it."""

    def __init__(self, folder: Path, bridge: str, timeout_s: float = TIMEOUT_S) -> None:
        self.folder = folder
        self.model = folder / "model"
        if not self.model.exists():
            new_model(self.model, hidden_size=64, num_layers=2, seed=3)
        self.weights = Weights(self.model)
        self.thread = EventLoopThread(lambda: False)
        self.engine = call(self.thread, self._start(), 300, "the engine")
        self.bridge = self.to(bridge, timeout_s)
        self.step = 0

    async def _start(self) -> SupervisedEngine | EngineReplicas:
        engine = self.supervised()
        engine.launch()
        await engine.wait_ready()
        return engine

    def supervised(self, number: int = 0, threads: int = 2) -> SupervisedEngine:
        """An engine that does not run yet, the one of that number."""
        settings = EngineSettings(
            model=str(self.model),
            dtype="float32",
            max_model_len=256,
            max_num_seqs=16,
            kv_cache_bytes=1 << 27,
            threads=threads,
            first_rank=1 + number,
        )
        return SupervisedEngine(
            settings,
            self.folder / f"engine-{number}.log",
            start_timeout_s=300,
            max_restarts=10_000,
            on_event=lambda *_, **__: None,
        )

    def to(self, bridge: str, timeout_s: float = TIMEOUT_S) -> Bridge:
        """A bridge to the engine."""
        folder = self.folder / f"weights-{bridge}"
        return create_bridge(bridge, folder=folder, source=self.model, engine=self.engine, timeout_s=timeout_s)

    def publish(self, spoil: Callable[[Ticket], Ticket] = lambda ticket: ticket) -> None:
        """Send the next version; raises what a run would."""
        self.step += 1
        under_way = []

        def announce(ticket: Ticket) -> None:
            under_way.append(self.thread.submit(self.bridge.receiver.apply(spoil(ticket), TIMEOUT_S)))

        ticket = self.bridge.publisher.publish(self.weights.of(self.step).items(), self.step, 0, announce)
        check_report(under_way[0].result(START_S), spoil(ticket))

    def ask(self) -> list[Completion]:
        """One completion for each prompt; raises when the engine refuses."""

        async def all_of_them() -> list[Completion]:
            requests = [
                GenerateRequest(f"ask-{i}", p, SamplingParams(max_tokens=16), seed=i, timeout_s=20)
                for i, p in enumerate(PROMPTS)
            ]
            return await asyncio.gather(*(self.engine.generate(request) for request in requests))

        return call(self.thread, all_of_them(), TIMEOUT_S, "the engine")

    def close(self) -> None:
        """Stop the engine."""
        self.bridge.publisher.close()
        self.thread.stop(self.engine.stop())


class Two(Pair):
    """Two engines as one, which may die any number of times, and a bridge to both."""

    engine: EngineReplicas

    async def _start(self) -> EngineReplicas:
        engines = [self.supervised(number, threads=1) for number in range(2)]
        replicas = EngineReplicas(engines, num_places=16, on_event=lambda *_, **__: None)
        replicas.launch()
        await replicas.wait_ready()
        return replicas

    def to(self, bridge: str, timeout_s: float = TIMEOUT_S) -> Bridge:
        """A bridge to both."""

        def joined() -> int:
            return call(self.thread, self.engine.joined(), START_S, "both engines")

        folder = self.folder / f"weights-{bridge}"
        return create_bridge(
            bridge,
            folder=folder,
            source=self.model,
            engine=self.engine,
            timeout_s=timeout_s,
            num_workers=2,
            joined=joined,
        )

    def kill(self, number: int) -> None:
        """The one of that number."""
        os.kill(pids_of(self.engine)[number], signal.SIGKILL)


class Asking:
    """Eight who ask the engines all the time, as a run does, until `stop`."""

    def __init__(self, two: Two) -> None:
        self._two = two
        self._goes_on = True
        self._asked = 0
        self.answered: list[tuple[float, Completion]] = []
        self._running = two.thread.submit(self._all())

    async def _all(self) -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(8):
                group.create_task(self._one_after_the_other())

    async def _one_after_the_other(self) -> None:
        while self._goes_on:
            number, self._asked = self._asked, self._asked + 1
            place = number % len(PROMPTS)
            request = GenerateRequest(
                f"{number}-{place}", PROMPTS[place], SamplingParams(max_tokens=64), number, 60, f"group {number // 4}"
            )
            completion = await self._two.engine.generate(request)
            self.answered.append((time.monotonic(), completion))
            await asyncio.sleep(0.1)

    def stop(self) -> list[Completion]:
        """All answers, each asked once; raises what a request raised."""
        self._goes_on = False
        self._running.result(TIMEOUT_S)
        found = [completion for _, completion in self.answered]
        if len({completion.id for completion in found}) != self._asked or len(found) != self._asked:
            raise EngineError(f"{self._asked} were asked and {len(found)} answered")
        return found
