"""What it costs on a CPU to keep vLLM's weights live: generation speed with our patch against vLLM as shipped.

As shipped, vLLM packs each linear layer's weight for its kernel and throws the weight away, so that no update can
reach the engine. The patch `live_cpu_weights` keeps the weight and packs it again after each update. Both engines
run the same program in the same run: same model, arguments, host, prompts and sampling; one process has the plugin,
the other has `VLLM_PLUGINS` empty. They stand side by side, are measured in turn, and rest while the other works. The
patched one first takes a new version and proves it, so its speed is that of repacked weights.

    .venv/bin/python benchmarks/live_weights.py [--repeats 7] [--dtypes float32 bfloat16]

Prints a Markdown table of medians and spreads; the exit code is 1 when a ratio is below the target.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

TARGET = 0.80
PATCH = "live_cpu_weights"
START_TIMEOUT_S, ROUND_TIMEOUT_S = 300.0, 300.0
PROMPT_TOKENS = 64


@dataclass(frozen=True)
class Load:
    """What is generated in one round."""

    num_sequences: int
    num_tokens: int


def engine_main(connection: Connection, model: str, dtype: str, load: Load, threads: int) -> None:
    """A child process: an engine that generates one round for each message, until the connection closes."""
    os.dup2(2, 1)  # vLLM logs to stdout, where the table goes
    from slipstream.inference.plugin.arguments import engine_arguments
    from slipstream.inference.plugin.hosts import create_host
    from slipstream.inference.settings import EngineSettings

    settings = EngineSettings(
        model=model,
        dtype=dtype,
        max_model_len=PROMPT_TOKENS + load.num_tokens,
        max_num_seqs=load.num_sequences,
        kv_cache_bytes=1 << 29,
        threads=threads,
    )
    asyncio.run(_answer(connection, create_host(engine_arguments(settings)), load))


async def _answer(connection: Connection, host: Any, load: Load) -> None:
    import msgspec

    from slipstream.inference.plugin.patches import patch_table

    connection.send(patch_table.applied())
    while True:
        try:
            command, argument = connection.recv()
        except EOFError:
            return
        if command == "load":
            await host.rpc("slipstream_load", argument)
            await host.reset_prefix_cache()
            connection.send(None)
        elif command == "fingerprint":
            (answer,) = await host.rpc("slipstream_fingerprint", argument)
            connection.send(msgspec.json.decode(answer))
        else:
            connection.send(await _round(host, load, argument))


async def _round(host: Any, load: Load, number: int) -> float:
    """Tokens per second of one round: all sequences at once, none of them ending early."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    params = SamplingParams(
        max_tokens=load.num_tokens,
        temperature=1.0,
        ignore_eos=True,
        logprobs=0,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    # Every round and sequence has a prompt of its own: nothing comes from the prefix cache.
    prompts = [
        [(7 * place + 13 * number + (3 + place) * position) % 90 + 1 for position in range(PROMPT_TOKENS)]
        for place in range(load.num_sequences)
    ]
    started = time.perf_counter()
    outputs = await asyncio.gather(
        *(
            host.generate({"prompt_token_ids": prompt}, params, f"{number}.{place}")
            for place, prompt in enumerate(prompts)
        )
    )
    seconds = time.perf_counter() - started
    return sum(len(output.outputs[0].token_ids) for output, _ in outputs) / seconds


class Engine:
    """One engine's process, seen from here. Every wait has a deadline."""

    def __init__(self, name: str, variables: dict[str, str], model: Path, dtype: str, load: Load, threads: int) -> None:
        self.name = name
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=engine_main, args=(theirs, str(model), dtype, load, threads))
        common = {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE", "KMP_BLOCKTIME": "0"}
        before = dict(os.environ)
        os.environ.update(common | {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING"} | variables)
        try:
            self._process.start()
        finally:
            os.environ.clear()
            os.environ.update(before)
        theirs.close()
        self.patches: tuple[str, ...] = ()

    def ready(self) -> None:
        """Wait until it can generate."""
        self.patches = self._receive(START_TIMEOUT_S)

    def ask(self, command: str, argument: Any) -> Any:
        """Send a command and wait for its answer."""
        self._connection.send((command, argument))
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
        self._process.join(10)
        self._process.kill()
        self._process.join()


def update(engine: Engine, model: Path, folder: Path, dtype: str) -> None:
    """Give the engine another version of the weights and check that it holds exactly that one."""
    import msgspec
    import torch

    from slipstream.records import Ticket, Version
    from slipstream.weights.fingerprint import describe, digest
    from slipstream.weights.model_files import read_model_folder, write_model_folder

    noise = torch.Generator().manual_seed(1)
    weights = [
        (name, (w.float() + 0.01 * torch.randn(w.shape, generator=noise)).to(getattr(torch, dtype)))
        for name, w in read_model_folder(model)
    ]
    write_model_folder(folder, weights, model)
    parameters = describe(weights)
    ticket = Ticket(Version(0, 1, digest(parameters)), "disk", str(folder), parameters)
    engine.ask("load", msgspec.json.encode(ticket).decode())
    answer = engine.ask("fingerprint", msgspec.json.encode(parameters).decode())
    wrong = [p.name for p in parameters if int(answer["shares"][p.name][0], 16) != int(p.fingerprint, 16)]
    if wrong or answer["stale"]:
        sys.exit(f"after the update {wrong + answer['stale']} differ from what was published: the patch does not work")


def compare(dtype: str, model: Path, folder: Path, load: Load, repeats: int, threads: int) -> dict[str, list[float]]:
    """Speeds in tokens per second, by engine, from alternating rounds."""
    engines = [
        Engine("as shipped", {"VLLM_PLUGINS": ""}, model, dtype, load, threads),
        Engine("live", {"VLLM_PLUGINS": "slipstream", "SLIPSTREAM_ENGINE": "1"}, model, dtype, load, threads),
    ]
    shipped, live = engines
    try:
        for engine in engines:
            engine.ready()
        if PATCH in shipped.patches or PATCH not in live.patches:
            sys.exit(
                f"patches are {shipped.patches} as shipped and {live.patches} live: only the second may be patched"
            )
        update(live, model, folder, dtype)
        for engine in engines:
            engine.ask("generate", 0)  # the first round compiles and warms up
        speeds: dict[str, list[float]] = {engine.name: [] for engine in engines}
        for repeat in range(repeats):
            for engine in engines if repeat % 2 else reversed(engines):
                speeds[engine.name].append(engine.ask("generate", repeat + 1))
        return speeds
    finally:
        for engine in engines:
            engine.stop()


def cell(values: list[float]) -> str:
    """Median and range."""
    return f"{statistics.median(values):,.0f} ({min(values):,.0f} to {max(values):,.0f})"


def main() -> int:
    """Measure, print the table, judge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"], choices=["float32", "bfloat16"])
    parser.add_argument("--model", type=Path, help="a model folder instead of the quickstart's new 0.8 M parameters")
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    options = parser.parse_args()
    load = Load(options.sequences, options.tokens)
    ratios: list[float] = []
    rows: list[str] = []
    with tempfile.TemporaryDirectory(prefix="slipstream-live-") as temporary:
        folder = Path(temporary)
        model: Path | None = options.model
        if model is None:
            from slipstream.commands.small_models.tiny_qwen3 import new_model

            model = new_model(folder / "model")
        for dtype in options.dtypes:
            speeds = compare(dtype, model, folder / dtype, load, options.repeats, options.threads)
            pairs = [live / shipped for live, shipped in zip(speeds["live"], speeds["as shipped"], strict=True)]
            ratios.append(statistics.median(pairs))
            spread = f"{ratios[-1]:.2f} ({min(pairs):.2f} to {max(pairs):.2f})"
            rows.append(f"| {dtype} | {cell(speeds['as shipped'])} | {cell(speeds['live'])} | {spread} |")
    print(
        f"{options.repeats} alternating rounds, {load.num_sequences} sequences of {PROMPT_TOKENS} + {load.num_tokens} "
        f"tokens, {options.threads} threads; median (range); target of the ratio: at least {TARGET:.2f}\n"
    )
    print("| weights | as shipped, tokens/s | live, tokens/s | ratio |")
    print("|---|---|---|---|")
    print("\n".join(rows))
    return 0 if min(ratios) >= TARGET else 1


if __name__ == "__main__":
    sys.exit(main())
