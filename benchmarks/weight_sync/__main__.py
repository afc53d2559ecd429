"""What one weight update costs by each bridge, while the engine generates.

    python -m benchmarks.weight_sync [--bridges NAME ...] [--model FOLDER] [--together] [--ranks N] [--replicas N]
                                     [--tensor-parallel-size N] [--in-flight recompute|keep|drain] [--json]

For each bridge, starts a trainer and an engine as a run does, and updates and verifies the engine's weights again and
again. Prints the bytes moved, the transfer (from the first byte that the engine receives until its weights are loaded),
the verification, the stall of generation (from the last token before an update to the first one after it, verification
included), the whole update, and the memory of both sides. For `broadcast`, also times the bare collective on the same
bytes and prints the fraction of its bandwidth that the transfer reached; with --ranks, also the time to gather the
weights alone, and the transfer of weights that were gathered beforehand. Trains nothing and leaves no files behind.

Run it from the root of the repository.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import shapes
from slipstream.cli.output import print_json, print_table
from slipstream.errors import ConfigError, Interrupted, SlipstreamError
from slipstream.processes.exits import leave
from slipstream.processes.temporary import temporary

from .figures import BRIDGES, TOGETHER, BridgeName, SyncOptions
from .process_memory import gpus_in_use

_MIB = 1 << 20


@dataclass(frozen=True)
class Request:
    """The command line."""

    bridges: tuple[BridgeName, ...]
    together: bool
    """Whether one engine is updated by all bridges."""
    as_json: bool
    options: SyncOptions


def parse(arguments: Sequence[str]) -> Request:
    """Read the command line. Raises `ConfigError` for values with which nothing can be measured."""
    default = SyncOptions(model="tiny")
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.weight_sync",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--bridges",
        nargs="+",
        choices=BRIDGES,
        metavar="NAME",
        default=(),
        help=f"default: all of {', '.join(BRIDGES)}",
    )
    add("--model", default=default.model, help=f"model folder, hub id, or a shape: {', '.join(shapes.SHAPES)}")
    add("--updates", type=int, default=default.updates, help="counted updates, after 2 to warm up; restart: 3 at most")
    add("--streams", type=int, default=default.streams, help="requests that generate during the updates")
    add(
        "--placement",
        choices=["auto", "shared", "separate"],
        default=default.placement,
        help="on GPUs: trainer and engine share one, or the trainer has the first and the engine the next",
    )
    add("--replicas", type=int, default=default.replicas, help="engines that are updated; not with single_copy")
    add("--changed", type=float, default=default.changed, help="fraction of the weights that changes; deltas: <= 0.02")
    add("--rank", type=int, default=default.rank, help="LoRA rank, for lora and single_copy+lora")
    add("--tensor-parallel-size", type=int, default=default.tensor_parallel_size, help="workers of each engine")
    add("--ranks", type=int, default=default.ranks, help="trainer processes; 1, or for single_copy one a worker")
    add(
        "--in-flight",
        choices=["recompute", "keep", "drain"],
        default=default.in_flight,
        help="running requests: recompute their KV cache, keep it, or wait until they end",
    )
    add("--context", type=int, default=default.context, help="tokens of a request at its end")
    add("--together", action="store_true", help=f"start one engine for all of {', '.join(TOGETHER)}")
    add("--timeout", type=float, default=default.timeout_s, dest="timeout_s", help="seconds for a start or an update")
    add("--scratch", type=Path, help="folder for temporary files; else the system's")
    add("--json", action="store_true", help="print JSON instead of a table")
    values = vars(parser.parse_args(arguments))
    bridges, together, as_json = tuple(values.pop("bridges")), values.pop("together"), values.pop("json")
    options = SyncOptions(**values)
    check(options)
    return Request(bridges or (TOGETHER if together else BRIDGES), together, as_json, options)


def check(options: SyncOptions) -> None:
    """Raise `ConfigError` for values with which nothing can be measured."""
    for name in ("updates", "streams", "replicas", "rank", "tensor_parallel_size", "ranks"):
        if (value := getattr(options, name)) is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} {value} leaves nothing to measure: use 1 or more")
    if not 0 < options.changed <= 1:
        raise ConfigError(
            f"--changed {options.changed:g} leaves nothing to measure: use a fraction above 0 and up to 1"
        )
    if options.timeout_s <= 0:
        raise ConfigError(f"--timeout {options.timeout_s:g} leaves no time: use some hundred seconds")
    if options.scratch is not None and not options.scratch.is_dir():
        raise ConfigError(f"--scratch {options.scratch} is not a folder: make it first")


def run(arguments: Sequence[str]) -> None:
    """Measure and print the results. Raises `SlipstreamError` if a bridge could not be measured."""
    request = parse(arguments)
    name = request.options.model
    with temporary("shape", request.options.scratch) as scratch:
        folder = make_shape(scratch / "model", name) if name in shapes.SHAPES else name
        if request.together or len(request.bridges) == 1:
            found, failures = measure_here(request, str(folder)), []
        else:
            found, failures = measure_apart(request, arguments, str(folder))
    figures = [row | {"model": name} for row in found]
    if request.as_json:
        print_json({"bridges": figures, "failures": failures})
    elif figures:
        show(figures)
    if failures:
        raise SlipstreamError("; ".join(failures))


def make_shape(folder: Path, shape: str) -> Path:
    """Write a model with random weights; with GPUs in another process, so that its GPU memory is freed."""
    print(f"making a model of shape {shape}", file=sys.stderr)
    if not gpus_in_use():
        return shapes.shaped_model(folder, shape)
    command = [sys.executable, shapes.__file__, str(folder), shape]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        why = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise SlipstreamError(
            f"no model of shape {shape} could be made ({why}): free the GPU, or use another --scratch"
        )
    return folder


def measure_here(request: Request, folder: str) -> list[dict[str, Any]]:
    """Measure all bridges with one engine; returns their figures."""
    from .measure import measure_sync

    options = dataclasses.replace(request.options, model=folder)
    measured = measure_sync(
        request.bridges, options, lambda figures: report(dataclasses.asdict(figures), as_json=request.as_json)
    )
    return [dataclasses.asdict(figures) for figures in measured]


def measure_apart(request: Request, arguments: Sequence[str], folder: str) -> tuple[list[dict[str, Any]], list[str]]:
    """Measure each bridge in a process of its own, so that memory is that of one bridge.

    Returns the figures of the bridges that were measured, and a sentence for each that was not.
    """
    found: list[dict[str, Any]] = []
    failures: list[str] = []
    for bridge in request.bridges:
        print(f"measuring {bridge}", file=sys.stderr)
        # Later options override earlier ones.
        command = [sys.executable, "-m", "benchmarks.weight_sync", *arguments]
        command += ["--model", folder, "--json", "--bridges", bridge]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            found += json.loads(done.stdout)["bridges"]
            report(found[-1], as_json=request.as_json)
        else:
            reason = done.stderr.strip().removeprefix("error: ")
            failures.append(f"{bridge} was not measured ({reason or f'exit code {done.returncode}'})")
    return found, failures


def report(row: dict[str, Any], *, as_json: bool) -> None:
    """Print a bridge's figures on standard error at once: a later bridge may fail, or be killed."""
    text = f"{row['bridge']}: whole update {_milliseconds(row['update'])} ms, stall {_milliseconds(row['stall'])} ms"
    print(json.dumps(row) if as_json else text, file=sys.stderr, flush=True)


def show(figures: list[dict[str, Any]]) -> None:
    """Print a table with a column for each bridge."""
    first = figures[0]
    on_cpu = first["placement"] == "cpu"
    where = "on the CPU" if on_cpu else f"placement {first['placement']}"
    if (size := first["tensor_parallel_size"]) > 1:
        where += f", {size} workers"
    if (ranks := first["ranks"]) > 1:
        where += f", {ranks} ranks"
    print(f"{first['model']}: {first['num_parameters'] / 1e6:,.1f} M parameters, {first['dtype']}, {where}")
    kinds = ("RSS", "PSS") if on_cpu else ("torch's", "nvidia-smi's")
    rows: dict[str, Callable[[dict[str, Any]], str]] = {
        "updates, each verified": lambda row: str(row["num_updates"]),
        "generations, of tokens": lambda row: f"{row['in_flight']}, {row['context']}",
        "moved, MB": lambda row: f"{row['num_bytes'] / 1e6:,.2f}",
        "publish, ms": lambda row: _milliseconds(row["publish"]),
        "transfer, ms": lambda row: _milliseconds(row["transfer"]),
        "verify, ms": lambda row: _milliseconds(row["verify"]),
        "write in place, ms": lambda row: _milliseconds(row["commit"]),
        "stall, ms": lambda row: _milliseconds(row["stall"]),
        "whole update, ms": lambda row: _milliseconds(row["update"]),
        "collective alone, ms": lambda row: _one_time(row["raw_s"]),
        "part of it reached": lambda row: "-" if row["raw_s"] is None else f"{100 * row['raw_share']:.0f} %",
        f"trainer, MiB: {', '.join(kinds)}": lambda row: _memory(row["trainer"]),
        f"engine, MiB: {', '.join(kinds)}": lambda row: _memory(row["engine"]),
    }
    if any(row["gather_s"] is not None for row in figures):
        rows["gathering alone, ms"] = lambda row: _one_time(row["gather_s"])
        rows["transfer without it, ms"] = lambda row: _one_time(row["from_one_s"])
    if not on_cpu:
        rows["in use on each GPU, MiB"] = lambda row: ", ".join(f"{used // _MIB:,}" for used in row["gpus"]) or "?"
    print_table([{"": name, **{row["bridge"]: cell(row) for row in figures}} for name, cell in rows.items()])
    print("times: median, 95th percentile")


def _milliseconds(spread: dict[str, float] | None) -> str:
    """Median and 95th percentile."""
    if spread is None:
        return "-"
    values = (1000 * spread[name] for name in ("median", "p95"))
    return ", ".join(f"{value:,.0f}" if value >= 1000 else f"{value:.1f}" for value in values)


def _one_time(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1000 * seconds:.1f}"


def _memory(memory: dict[str, int | None]) -> str:
    kinds: Iterable[str] = ("rss", "pss") if memory["torch"] is None else ("torch", "gpu")
    values = (memory[kind] for kind in kinds)
    return ", ".join("?" if value is None else f"{value // _MIB:,}" for value in values)


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark; returns the exit code, after one sentence on standard error if it failed."""
    # As in the command `slipstream`, before torch is imported: idle OpenMP threads that spin slow the engine down.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        run(arguments)
    except Interrupted as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except SlipstreamError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return Interrupted.exit_code
    return 0


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
