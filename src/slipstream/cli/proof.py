"""The commands that measure and prove the weights' way: `bench sync`, `verify`, `trace`."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import App, Parameter

from slipstream.cli.output import print_json
from slipstream.errors import ConfigError, SlipstreamError
from slipstream.runlog.temporary import temporary

if TYPE_CHECKING:
    from slipstream.runlog.trace import Trace

bench_app = App(name="bench", help="Measure this machine.")

Json = Annotated[bool, Parameter(name="--json", negative="", help="Print JSON and nothing else.")]
Bridge = Literal[
    "disk", "restart", "broadcast", "single_copy", "lora", "disk+delta", "broadcast+delta", "single_copy+lora"
]
InFlight = Annotated[
    Literal["recompute", "keep", "drain"],
    Parameter(help="What becomes of the generations: their context is computed anew, kept, or they are awaited."),
]
_PASSED_ON = (
    *("model", "updates", "streams", "placement", "replicas", "changed", "rank", "tensor_parallel_size", "ranks"),
    *("in_flight", "context"),
)
"""What each bridge's own process is told."""
_MIB = 1 << 20
_WIDTH = 140
"""Of a table that goes to a file."""


@bench_app.command(name="sync")
def bench_sync(
    *,
    bridges: Annotated[
        tuple[Bridge, ...],
        Parameter(consume_multiple=True, negative="", help="Which to measure; all that can run here."),
    ] = (),
    model: Annotated[
        str, Parameter(help="A model folder, a hub id, or a shape with random weights: tiny, 0.5b, 1.5b, 7b.")
    ] = "tiny",
    updates: Annotated[int, Parameter(help="Updates that are counted, after two that are not; of restart, 3.")] = 20,
    streams: Annotated[int, Parameter(help="Generations that go on meanwhile.")] = 4,
    placement: Annotated[
        Literal["auto", "shared", "separate"],
        Parameter(
            help="One GPU for both, or the first for the trainer and the next for the engine; no matter on CPUs."
        ),
    ] = "auto",
    replicas: Annotated[int, Parameter(help="Engines that are updated together; not with single_copy.")] = 1,
    changed: Annotated[
        float, Parameter(help="Part of the weights that an update changes; 0.02 at most for deltas.")
    ] = 1.0,
    rank: Annotated[int, Parameter(help="Of the adapter, for the bridge lora.")] = 16,
    tensor_parallel_size: Annotated[
        int, Parameter(help="Workers of each engine, on GPUs of their own; over single_copy as many ranks train them.")
    ] = 1,
    ranks: Annotated[int | None, Parameter(help="Trainer processes; one, or over single_copy one a worker.")] = None,
    in_flight: InFlight = "recompute",
    context: Annotated[int, Parameter(help="Tokens that a generation grows to.")] = 2048,
    together: Annotated[
        bool,
        Parameter(negative="", help="One engine for all of them: quicker, and their memory is that of all. Not lora."),
    ] = False,
    timeout: Annotated[float, Parameter(help="Seconds that an engine's start, or one update, may take.")] = 600.0,
    scratch: Annotated[
        Path | None, Parameter(help="Folder to write files in; the system's for temporary files.")
    ] = None,
    json: Json = False,
) -> int:
    """Measure what an update of the weights costs by each bridge, while the engine generates.

    For each bridge a trainer and an engine are started as in a run, and the engine is updated and verified again and
    again. Shown are the bytes that move, the transfer (from the engine's first byte to loaded weights), the proof, the
    stall of generation (from the last token before an update to the first one after it, proof included), the whole
    update, and the memory of both sides. For broadcast the collective alone sends the same bytes in the same run, and
    what part of its bandwidth was reached is shown; with --ranks, how long it takes to bring the weights together, and
    the transfer of what was brought together before. Nothing is trained, and nothing is left behind.
    """
    counts = {"--updates": updates, "--streams": streams, "--replicas": replicas, "--rank": rank}
    counts |= {"--tensor-parallel-size": tensor_parallel_size, "--ranks": 1 if ranks is None else ranks}
    _check_sync(counts, changed, timeout, scratch)
    from slipstream.launch.sync_bench import BRIDGES, TOGETHER, measure_sync
    from slipstream.launch.sync_figures import SyncOptions
    from slipstream.trainer.shapes import SHAPES

    with temporary("shape", scratch) as own:
        folder = model
        if model in SHAPES:
            folder = str(_make_shape(own / "model", model))
        options = SyncOptions(
            *(folder, updates, streams, placement, replicas, changed, in_flight, context, rank),
            tensor_parallel_size=tensor_parallel_size,
            ranks=ranks,
            scratch=scratch,
            timeout_s=timeout,
        )
        names = bridges or (TOGETHER if together else BRIDGES)
        failures: list[str] = []
        if together or len(names) == 1:
            measured = measure_sync(names, options, lambda figures: _tell(dataclasses.asdict(figures), as_json=json))
            found = [dataclasses.asdict(figures) for figures in measured]
        else:
            found, failures = _each_apart(names, options, as_json=json)
    figures = [row | {"model": model} for row in found]
    if json:
        print_json({"bridges": figures, "failures": failures})
    elif figures:
        _show_sync(figures)
    if failures:
        raise SlipstreamError("; ".join(failures))
    return 0


def _check_sync(counts: Mapping[str, int], changed: float, timeout: float, scratch: Path | None) -> None:
    """Refuse values with which nothing can be measured."""
    for name, value in counts.items():
        if value < 1:
            raise ConfigError(f"{name} {value} leaves nothing to measure: use 1 or more")
    if not 0 < changed <= 1:
        raise ConfigError(f"--changed {changed:g} leaves nothing to measure: use a part above 0 and up to 1")
    if timeout <= 0:
        raise ConfigError(f"--timeout {timeout:g} leaves no time: use some hundred seconds")
    if scratch is not None and not scratch.is_dir():
        raise ConfigError(f"--scratch {scratch} is not a folder: make it first")


def _make_shape(folder: Path, shape: str) -> Path:
    """A model with random weights; on a GPU by another process, whose memory there ends with it."""
    from slipstream.launch.usage import gpus_in_use
    from slipstream.trainer.shapes import shaped_model

    print(f"making a model of shape {shape}", file=sys.stderr)
    if not gpus_in_use():
        return shaped_model(folder, shape)
    command = [sys.executable, "-m", "slipstream.trainer.shapes", str(folder), shape]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        why = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise SlipstreamError(
            f"no model of shape {shape} could be made ({why}): free the GPU, or use another --scratch"
        )
    return folder


def _tell(row: dict[str, Any], *, as_json: bool) -> None:
    """A bridge's figures as soon as they are there: what comes after it may fail, or be killed."""
    said = f"{row['bridge']}: whole update {_ms(row['update'])} ms, stall {_ms(row['stall'])} ms"
    print(json.dumps(row) if as_json else said, file=sys.stderr, flush=True)


def _each_apart(bridges: Sequence[Bridge], options: Any, *, as_json: bool) -> tuple[list[dict[str, Any]], list[str]]:
    """Each bridge in a process of its own, so that its memory is its own; what was found, and what failed."""
    found: list[dict[str, Any]] = []
    failures: list[str] = []
    for name in bridges:
        print(f"measuring {name}", file=sys.stderr)
        command = [sys.executable, "-m", "slipstream.cli", "bench", "sync", "--json", "--bridges", name]
        for key in _PASSED_ON:
            if (value := getattr(options, key)) is not None:
                command += [f"--{key.replace('_', '-')}", str(value)]
        command += ["--timeout", str(options.timeout_s)]
        if options.scratch is not None:
            command += ["--scratch", str(options.scratch)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            found += json.loads(done.stdout)["bridges"]
            _tell(found[-1], as_json=as_json)
        else:
            said = done.stderr.strip().removeprefix("error: ")
            failures.append(f"{name} was not measured ({said or f'exit code {done.returncode}'})")
    return found, failures


def _show_sync(figures: list[dict[str, Any]]) -> None:
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
        "publish, ms": lambda row: _ms(row["publish"]),
        "transfer, ms": lambda row: _ms(row["transfer"]),
        "verify, ms": lambda row: _ms(row["verify"]),
        "write in place, ms": lambda row: _ms(row["commit"]),
        "stall, ms": lambda row: _ms(row["stall"]),
        "whole update, ms": lambda row: _ms(row["update"]),
        "collective alone, ms": lambda row: _one_ms(row["raw_s"]),
        "part of it reached": lambda row: "-" if row["raw_s"] is None else f"{100 * row['raw_share']:.0f} %",
        f"trainer, MiB: {', '.join(kinds)}": lambda row: _memory(row["trainer"]),
        f"engine, MiB: {', '.join(kinds)}": lambda row: _memory(row["engine"]),
    }
    if any(row["gather_s"] is not None for row in figures):
        rows["gathering alone, ms"] = lambda row: _one_ms(row["gather_s"])
        rows["transfer without it, ms"] = lambda row: _one_ms(row["from_one_s"])
    if not on_cpu:
        rows["in use on each GPU, MiB"] = lambda row: ", ".join(f"{used // _MIB:,}" for used in row["gpus"]) or "?"
    table = [{"": name, **{row["bridge"]: cell(row) for row in figures}} for name, cell in rows.items()]
    _print_table(table)
    print("times: median, 95th percentile")


def _ms(spread: dict[str, float] | None) -> str:
    if spread is None:
        return "-"
    values = (1000 * spread[name] for name in ("median", "p95"))
    return ", ".join(f"{value:,.0f}" if value >= 1000 else f"{value:.1f}" for value in values)


def _one_ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1000 * seconds:.1f}"


def _memory(memory: dict[str, int | None]) -> str:
    kinds: Iterable[str] = ("rss", "pss") if memory["torch"] is None else ("torch", "gpu")
    values = (memory[kind] for kind in kinds)
    return ", ".join("?" if value is None else f"{value // _MIB:,}" for value in values)


def verify(
    path: Annotated[Path, Parameter(help="A run's folder, one of its checkpoints, or a version below its weights/.")],
    /,
    *,
    engine: Annotated[
        Path | None, Parameter(help="Socket of the engine to ask; that of the run, while it goes on, if not given.")
    ] = None,
    json: Json = False,
) -> int:
    """Compare weights with what was trained: a run's checkpoints, its published versions, and its live engine.

    When a version is published and when a checkpoint is written, the fingerprint of every parameter is taken from the
    trainer's memory and kept. This command takes them anew, from the files and, while the run goes on, in the engine's
    own memory, which holds up generation as long as the table says. A single flipped bit is found, and the parameter
    that has it is named; then the exit code is 6. Nothing is changed. The optimizer's state is looked at by size only.
    """
    from slipstream.launch.tools.verify import raise_unless_right
    from slipstream.launch.tools.verify import verify as find

    verdicts = find(Path(path), None if engine is None else Path(engine))
    if json:
        print_json([dataclasses.asdict(verdict) | {"gb_per_s": verdict.gb_per_s} for verdict in verdicts])
    else:
        rows: list[dict[str, object]] = [
            {
                "what": verdict.what,
                "version": verdict.version or None,
                "digest": verdict.digest or None,
                "parameters": verdict.num_parameters,
                "MB": round(verdict.num_bytes / 1e6, 2),
                "seconds": verdict.seconds,
                "GB/s": verdict.gb_per_s,
                "verdict": "differs" if verdict.problems else "not compared" if verdict.note else "the same",
            }
            for verdict in verdicts
        ]
        _print_table(rows)
        for verdict in verdicts:
            if verdict.note:
                print(f"{verdict.what}: {verdict.note}")
    raise_unless_right(verdicts)
    return 0


def trace(
    run: Annotated[Path, Parameter(help="A run's folder.")],
    sample: Annotated[
        str, Parameter(help="Id of a kept rollout: STEP.PLACE.NUMBER, such as 38.0.1, or eval.STEP.PLACE.")
    ],
    /,
    *,
    token: Annotated[int | None, Parameter(help="Follow this sampled token of the rollout, counted from 0.")] = None,
    json: Json = False,
) -> int:
    """Follow a rollout back to the weights that made each of its tokens, and on to the batch that it was trained in.

    Kept rollouts and their ids are in samples.jsonl (run.save_samples for each step). For every span of tokens it shows
    the version that sampled them (0.38: after 38 steps, in a run that was never resumed), that version's digest,
    whether the engine proved it, and which folder holds it; and of the rollout its reward, its advantage, and the
    version that training on it made. Only the run's folder is read.
    """
    from slipstream.runlog import read_run
    from slipstream.runlog.trace import trace as follow

    found = follow(read_run(Path(run)), sample, token)
    if json:
        print_json(dataclasses.asdict(found))
    else:
        _show_trace(found)
    return 0


def _show_trace(found: Trace) -> None:
    kind = "batch" if found.split == "train" else "evaluation"
    print(f"rollout {found.id} of task {found.task}, {kind} of step {found.step}, {found.outcome}")
    told = [f"reward {found.reward:g}" if found.reward is not None else ""]
    told.append(f"advantage {found.advantage:+.4g}" if found.advantage is not None else "")
    told.append("left out of the loss" if found.carries_loss is False else "")
    told.append(f"trained on: made version {found.update}" if found.update else "")
    told.append(f"loss of the batch {found.loss:.4g}" if found.loss is not None else "")
    print("; ".join(filter(None, told)))
    if found.note:
        print(found.note)
    if found.spans:
        rows: list[dict[str, object]] = [
            {
                "sampled tokens": f"{span.first} to {span.first + span.end - span.start - 1}",
                "of sequence": span.sequence,
                "positions": f"{span.start} to {span.end - 1}",
                "version": span.version,
                "mean log-probability": span.mean_logprob,
            }
            for span in found.spans
        ]
        _print_table(rows)
    if found.token is not None:
        one = found.token
        logprob = "unknown" if one.logprob is None else f"{one.logprob:.6g}"
        print(
            f"token {one.number}: id {one.token_id} at position {one.position} of sequence {one.sequence}, "
            f"log-probability {logprob}, made by version {one.version}"
        )
    for version in found.versions:
        proof = "proved in the engine" if version.verified else "no proof in the engine was written"
        print(f"version {version.name}: digest {version.digest or 'unknown'}, {proof}")
        print(f"  held by {version.held_by}" if version.held_by else f"  {version.note}")


def _print_table(rows: Sequence[Mapping[str, object]]) -> None:
    from rich.console import Console

    from slipstream.view import render_table

    console = Console(emoji=False)
    (console if console.is_terminal else Console(width=_WIDTH, emoji=False)).print(render_table(rows, list(rows[0])))
