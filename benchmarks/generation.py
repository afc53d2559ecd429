"""Generated tokens per second, with and without log-probabilities: our engine against vLLM as shipped, in one run.

Both run the same program with the same arguments, prompts and sampling; one has the plugin, the other an empty
`VLLM_PLUGINS`. `--systems ours required` compares `inference.patches` "all" and "required". They are alive at once and
measured in turn, and each starts a round with all its sequences; none ends early. What comes out of a request is what a
run uses: tokens, and one number for each.

    python benchmarks/generation.py [--shape chars|tiny|0.5b|1.5b] [--sequences 256 1024] [--tokens 128] [--repeats 3]
                                    [--group 1] [--in-process] [--systems vllm ours required] [--model FOLDER]
                                    [--requests even seeds ends rollouts]

`chars` is a new model of 0.1 M parameters with a vocabulary of 98: nearly all of its time is Python, which is what it
is for. With `--group 8` eight sequences have one prompt, as in a batch of GRPO. As on GPUs, engine core and worker
share a process of their own, unless `--in-process`. Prints two Markdown tables: speeds (median, range), and where the
milliseconds of a decode step go: CPU time of vLLM's functions.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from slipstream.inference.plugin.patches import patch_table
from slipstream.inference.plugin.weights.receiver import WorkerExtension

START_TIMEOUT_S, ROUND_TIMEOUT_S = 400.0, 400.0
SYSTEMS = {
    "vllm": {"VLLM_PLUGINS": ""},
    "ours": {"VLLM_PLUGINS": "slipstream", "SLIPSTREAM_ENGINE": "1", patch_table.VARIABLE: "all"},
    "required": {"VLLM_PLUGINS": "slipstream", "SLIPSTREAM_ENGINE": "1", patch_table.VARIABLE: "required"},
}
KINDS = ("even", "seeds", "ends", "rollouts")
"""Of requests: all of one length, with a seed each, with lengths and stop tokens of their own, or both as in a run."""
_seconds: dict[str, float] = {}
_inner = threading.local()


def timed(owner: Any, name: str, label: str) -> None:
    """Count the CPU time that a function of vLLM's takes, less what others that are counted take inside it."""
    function: Callable[..., Any] | None = getattr(owner, name, None)
    if function is None:
        return

    def counted(*args: Any, **kwargs: Any) -> Any:
        outer, _inner.s = getattr(_inner, "s", 0.0), 0.0
        began = time.thread_time()
        try:
            return function(*args, **kwargs)
        finally:
            took = time.thread_time() - began
            _seconds[label] = _seconds.get(label, 0.0) + took - _inner.s
            _inner.s = outer + took

    setattr(owner, name, counted)


def watch_core() -> None:
    """In the engine core's process: what it does for a step."""
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.executor.uniproc_executor import UniProcExecutor
    from vllm.v1.serial_utils import MsgpackEncoder

    for kind in (Scheduler, *Scheduler.__subclasses__()):
        if "schedule" in vars(kind):
            timed(kind, "schedule", "core: schedule")
    timed(Scheduler, "update_from_output", "core: scheduler's update from the output")
    timed(UniProcExecutor, "execute_model", "core: model (its launch)")
    timed(UniProcExecutor, "sample_tokens", "core: sampler (its launch)")
    timed(MsgpackEncoder, "encode_into", "core, another thread: packing outputs")


def watch_front() -> None:
    """In the server's process."""
    from vllm.v1.engine.output_processor import OutputProcessor
    from vllm.v1.serial_utils import MsgpackDecoder

    timed(OutputProcessor, "process_outputs", "server: outputs of requests")
    timed(MsgpackDecoder, "decode", "server: unpacking outputs")


class Watched(WorkerExtension):
    """The worker's end of the measurement; with one worker it is in the core's process."""

    def slipstream_watch(self, command: str) -> str:
        """`start` the watch, or say what was counted since the last time."""
        if command == "start":
            watch_core()
        seconds = dict(_seconds)
        _seconds.clear()
        return json.dumps(seconds)


@dataclass(frozen=True)
class Load:
    """What is generated in one round."""

    num_sequences: int
    num_tokens: int
    prompt_tokens: int
    logprobs: bool
    group: int = 1
    """Sequences that have one prompt."""
    kind: str = "even"
    """See `KINDS`."""
    vocabulary: int = 0


@dataclass(frozen=True)
class Setting:
    """How both engines are started."""

    model: str
    max_sequences: int
    max_tokens: int
    dtype: str
    in_process: bool
    on_gpu: bool


def engine_main(connection: Connection, setting: Setting) -> None:
    """A child process: an engine that generates one round for each message, until the connection closes."""
    os.dup2(2, 1)  # vLLM logs to stdout, where the tables go
    from slipstream.inference.plugin.arguments import engine_arguments
    from slipstream.inference.plugin.hosts import create_host
    from slipstream.inference.settings import EngineSettings

    settings = EngineSettings(
        model=setting.model,
        dtype=setting.dtype,
        max_model_len=setting.max_tokens,
        max_num_seqs=setting.max_sequences,
        enforce_eager=not setting.on_gpu,
        kv_cache_bytes=(48 << 30) if setting.on_gpu else (1 << 30),
        gpu_memory_utilization=0.4,
        options={
            "worker_extension_cls": f"{Path(__file__).stem}.Watched",
            **({} if setting.in_process else {"distributed_executor_backend": "uni"}),
        },
    )
    if not setting.in_process:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # else vLLM gives a CPU's worker another process still
    watch_front()
    arguments = engine_arguments(settings)
    if not os.environ["VLLM_PLUGINS"]:
        arguments.pop("cudagraph_capture_sizes", None)
    asyncio.run(_answer(connection, create_host(arguments, own_process=not setting.in_process)))


async def _answer(connection: Connection, host: Any) -> None:
    (described,) = await host.rpc("slipstream_describe")
    await host.rpc("slipstream_watch", "start")
    connection.send(json.loads(described)["patches"])
    number = 0
    while True:
        try:
            load: Load = connection.recv()
        except EOFError:
            host.shutdown()
            return
        number += 1
        await host.rpc("slipstream_watch", "read")
        _seconds.clear()
        speed, taken = await _round(host, load, number)
        (core,) = await host.rpc("slipstream_watch", "read")
        steps = load.num_tokens
        parts = {label: 1000 * s / steps for label, s in ({"all": taken} | _seconds | json.loads(core)).items()}
        connection.send((speed, parts))


async def _round(host: Any, load: Load, number: int) -> tuple[float, float]:
    """Tokens per second of one round, and its seconds."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    from slipstream.inference.plugin.patches.undelivered import sampled_logprobs

    ours = bool(os.environ["VLLM_PLUGINS"])
    draw = random.Random(number)
    ends = load.kind in ("ends", "rollouts")
    stops = [draw.randrange(load.vocabulary) for _ in range(max(1, load.vocabulary // 1000))] if ends else None

    def sampling(place: int) -> SamplingParams:
        return SamplingParams(
            max_tokens=draw.randint(1, load.num_tokens) if ends and place % 4 else load.num_tokens,
            temperature=1.0,
            seed=number * load.num_sequences + place if load.kind in ("seeds", "rollouts") else None,
            stop_token_ids=stops,
            ignore_eos=True,
            logprobs=0 if load.logprobs else None,
            flat_logprobs=ours,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    async def one(place: int) -> int:
        # Every round and group has a prompt of its own: nothing comes from the prefix cache of another.
        first = place // load.group
        prompt = [(7 * first + 13 * number + (3 + first) * i) % 90 + 1 for i in range(load.prompt_tokens)]
        prompt[:2] = [first // 90 % 90 + 1, first % 90 + 1]
        output, _ = await host.generate({"prompt_token_ids": prompt}, sampling(place), f"{number}.{place}")
        ids = output.outputs[0].token_ids
        if load.logprobs:
            assert len(sampled_logprobs(output.outputs[0].logprobs, ids)) == len(ids)
        return len(ids)

    started = time.perf_counter()
    counts = await asyncio.gather(*(one(place) for place in range(load.num_sequences)))
    seconds = time.perf_counter() - started
    return sum(counts) / seconds, seconds


class Engine:
    """One engine's process, seen from here. Every wait has a deadline."""

    def __init__(self, name: str, setting: Setting) -> None:
        self.name = name
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=engine_main, args=(theirs, setting))
        before = dict(os.environ)
        paths = os.pathsep.join([str(Path(__file__).parent), *filter(None, [before.get("PYTHONPATH")])])
        quiet = {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING", "PYTHONPATH": paths}
        os.environ.update(quiet | SYSTEMS[name])
        try:
            self._process.start()
        finally:
            os.environ.clear()
            os.environ.update(before)
        theirs.close()

    def ready(self) -> list[str]:
        """Wait until it can generate; the patches in force."""
        return self._receive(START_TIMEOUT_S)

    def generate(self, load: Load) -> tuple[float, dict[str, float]]:
        """Tokens per second, and milliseconds of a decode step by what they went to."""
        self._connection.send(load)
        return self._receive(ROUND_TIMEOUT_S)

    def _receive(self, timeout_s: float) -> Any:
        if not self._connection.poll(timeout_s):
            sys.exit(f"the engine {self.name} did not answer within {timeout_s:.0f} s: see its output above")
        try:
            return self._connection.recv()
        except EOFError:
            sys.exit(f"the engine {self.name} died: see its output above")

    def stop(self) -> None:
        """End the process."""
        self._connection.close()
        self._process.join(20)
        self._process.kill()
        self._process.join()


def measure(setting: Setting, systems: list[str], loads: list[Load], repeats: int) -> dict[tuple[str, Load], list[Any]]:
    """Every load on every engine, in turn; the first round of each is not counted."""
    engines = [Engine(name, setting) for name in systems]
    try:
        for engine in engines:
            print(f"{engine.name}: {engine.ready()}", file=sys.stderr, flush=True)
        results: dict[tuple[str, Load], list[Any]] = {}
        for load in loads:
            for repeat in range(repeats + 1):
                for engine in engines if repeat % 2 else reversed(engines):
                    answer = engine.generate(load)
                    if repeat:
                        results.setdefault((engine.name, load), []).append(answer)
                        told = [engine.name, load.num_sequences, load.kind, load.logprobs, *answer]
                        print(json.dumps(told), file=sys.stderr, flush=True)
        return results
    finally:
        for engine in engines:
            engine.stop()


def tables(results: dict[tuple[str, Load], list[Any]]) -> str:
    """The speeds, and the parts of a decode step."""
    heads = ("engine", "sequences", "requests", "log-probabilities", "tokens/s", "ms a decode step")
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for (name, load), answers in results.items():
        speeds = [speed for speed, _ in answers]
        step = statistics.median(parts["all"] for _, parts in answers)
        spread = f"{statistics.median(speeds):,.0f} ({min(speeds):,.0f} to {max(speeds):,.0f})"
        asked = "yes" if load.logprobs else "no"
        lines.append(f"| {name} | {load.num_sequences:,} | {load.kind} | {asked} | {spread} | {step:.2f} |")
    labels = sorted({label for answers in results.values() for _, parts in answers for label in parts} - {"all"})
    names = [f"{name}, {load.num_sequences:,}, {load.kind}{', lp' if load.logprobs else ''}" for name, load in results]
    lines += ["", f"| CPU ms of a decode step | {' | '.join(names)} |", "|---" * (1 + len(names)) + "|"]
    for label in labels:
        cells = [
            f"{statistics.median(parts.get(label, 0.0) for _, parts in answers):.2f}" for answers in results.values()
        ]
        lines.append(f"| {label} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="chars", choices=["chars", "tiny", "0.5b", "1.5b"])
    parser.add_argument("--sequences", type=int, nargs="+", default=[256, 1024])
    parser.add_argument("--prompt", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--group", type=int, default=1, help="sequences that have one prompt")
    parser.add_argument("--requests", nargs="+", default=["even"], choices=KINDS, help="see KINDS in the source")
    parser.add_argument("--logprobs", choices=["both", "yes"], default="both", help="with them only, or without too")
    parser.add_argument("--model", type=Path, help="a model's folder; made, of that shape, when it is not there")
    parser.add_argument("--systems", nargs="+", default=["vllm", "ours"], choices=list(SYSTEMS))
    parser.add_argument("--in-process", action="store_true", help="as on a CPU: core, worker and server in one process")
    options = parser.parse_args()
    import torch

    from slipstream.plan.measure import read_model

    on_gpu = torch.cuda.is_available()
    with tempfile.TemporaryDirectory(prefix="slipstream-generation-") as folder:
        model = options.model or Path(folder) / "model"
        if options.shape == "chars":
            from slipstream.commands.small_models.tiny_qwen3 import new_model

            new_model(model, hidden_size=64, num_layers=2)
        elif not model.exists():
            from shapes import shaped_model

            shaped_model(model, options.shape)
        length = options.prompt + options.tokens
        dtype = "bfloat16" if on_gpu else "float32"
        setting = Setting(str(model), max(options.sequences), length, dtype, options.in_process, on_gpu)
        vocabulary = read_model(str(model)).vocab_size
        asked = (False, True) if options.logprobs == "both" else (True,)
        loads = [
            Load(number, options.tokens, options.prompt, with_logprobs, options.group, kind, vocabulary)
            for number in options.sequences
            for kind in options.requests
            for with_logprobs in asked
        ]
        print(tables(measure(setting, options.systems, loads, options.repeats)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
