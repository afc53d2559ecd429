"""The commands that measure and prove the weights' way: `bench sync`, `verify`, `trace`."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import App, Parameter

from slipstream.errors import ConfigError, SlipstreamError

bench_app = App(name="bench", help="Measure this machine.")

Json = Annotated[bool, Parameter(name="--json", negative="", help="Print JSON and nothing else.")]
Bridge = Literal["disk", "restart", "broadcast", "single_copy", "lora"]
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
            help="One GPU for both, or the first for the trainer and the second for the engine; no matter on CPUs."
        ),
    ] = "auto",
    changed: Annotated[float, Parameter(help="Part of the weights that an update changes.")] = 1.0,
    rank: Annotated[int, Parameter(help="Of the adapter, for the bridge lora.")] = 16,
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
    what part of its bandwidth was reached is shown. Nothing is trained, and nothing is left behind.
    """
    for name, value, good in (
        ("--updates", updates, updates >= 1),
        ("--streams", streams, streams >= 1),
        ("--changed", changed, 0 < changed <= 1),
        ("--rank", rank, rank >= 1),
    ):
        if not good:
            remedy = "use a part above 0 and up to 1" if name == "--changed" else "use 1 or more"
            raise ConfigError(f"{name} {value:g} leaves nothing to measure: {remedy}")
    if scratch is not None and not scratch.is_dir():
        raise ConfigError(f"--scratch {scratch} is not a folder: make it first")
    from slipstream.launch.sync_bench import BRIDGES, SyncOptions, measure_sync
    from slipstream.trainer.shapes import SHAPES, shaped_model

    with tempfile.TemporaryDirectory(prefix="slipstream-shape-", dir=scratch) as temporary:
        folder = model
        if model in SHAPES:
            print(f"making a model of shape {model}", file=sys.stderr)
            folder = str(shaped_model(Path(temporary) / "model", model))
        options = SyncOptions(folder, updates, streams, placement, changed, rank, scratch=scratch)
        if len(bridges) == 1:
            found = [dataclasses.asdict(measure_sync(bridges[0], options))]
            failures: list[str] = []
        else:
            found, failures = _each_apart(bridges or BRIDGES, options)
    figures = [row | {"model": model} for row in found]
    if json:
        _print_json({"bridges": figures, "failures": failures})
    elif figures:
        _show_sync(figures)
    if failures:
        raise SlipstreamError("; ".join(failures))
    return 0


def _each_apart(bridges: Sequence[Bridge], options: Any) -> tuple[list[dict[str, Any]], list[str]]:
    """Each bridge in a process of its own, so that its memory is its own; what was found, and what failed."""
    found: list[dict[str, Any]] = []
    failures: list[str] = []
    for name in bridges:
        print(f"measuring {name}", file=sys.stderr)
        command = [sys.executable, "-m", "slipstream.cli", "bench", "sync", "--json", "--bridges", name]
        for key in ("model", "updates", "streams", "placement", "changed", "rank"):
            command += [f"--{key}", str(getattr(options, key))]
        if options.scratch is not None:
            command += ["--scratch", str(options.scratch)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            found += json.loads(done.stdout)["bridges"]
        else:
            said = done.stderr.strip().removeprefix("error: ")
            failures.append(f"{name} was not measured ({said or f'exit code {done.returncode}'})")
    return found, failures


def _show_sync(figures: list[dict[str, Any]]) -> None:
    from rich.console import Console

    from slipstream.view import render_table

    first = figures[0]
    on_cpu = first["placement"] == "cpu"
    where = "on the CPU" if on_cpu else f"placement {first['placement']}"
    print(f"{first['model']}: {first['num_parameters'] / 1e6:,.1f} M parameters, {first['dtype']}, {where}")
    kinds = ("RSS", "PSS") if on_cpu else ("torch's", "nvidia-smi's")
    rows: dict[str, Callable[[dict[str, Any]], str]] = {
        "updates": lambda row: str(row["num_updates"]),
        "moved, MB": lambda row: f"{row['num_bytes'] / 1e6:,.2f}",
        "publish, ms": lambda row: _ms(row["publish"]),
        "transfer, ms": lambda row: _ms(row["transfer"]),
        "verify, ms": lambda row: _ms(row["verify"]),
        "write in place, ms": lambda row: _ms(row["commit"]),
        "stall, ms": lambda row: _ms(row["stall"]),
        "whole update, ms": lambda row: _ms(row["update"]),
        "collective alone, ms": lambda row: "-" if row["raw_s"] is None else f"{1000 * row['raw_s']:.1f}",
        "part of it reached": lambda row: "-" if row["raw_s"] is None else f"{100 * row['raw_share']:.0f} %",
        f"trainer, MiB: {', '.join(kinds)}": lambda row: _memory(row["trainer"]),
        f"engine, MiB: {', '.join(kinds)}": lambda row: _memory(row["engine"]),
    }
    if not on_cpu:
        rows["in use on each GPU, MiB"] = lambda row: ", ".join(f"{used // _MIB:,}" for used in row["gpus"]) or "?"
    table = [{"": name, **{row["bridge"]: cell(row) for row in figures}} for name, cell in rows.items()]
    console = Console()
    wide = console if console.is_terminal else Console(width=_WIDTH)
    wide.print(render_table(table, list(table[0])))
    print("times: median, 95th percentile")


def _ms(spread: dict[str, float] | None) -> str:
    if spread is None:
        return "-"
    values = (1000 * spread[name] for name in ("median", "p95"))
    return ", ".join(f"{value:,.0f}" if value >= 1000 else f"{value:.1f}" for value in values)


def _memory(memory: dict[str, int | None]) -> str:
    kinds: Iterable[str] = ("rss", "pss") if memory["torch"] is None else ("torch", "gpu")
    values = (memory[kind] for kind in kinds)
    return ", ".join("?" if value is None else f"{value // _MIB:,}" for value in values)


def _print_json(value: Any) -> None:
    print(json.dumps(value, default=str))
