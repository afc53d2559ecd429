"""Nodes with a part of one host's GPUs each, beside the host as a whole: seconds a step, and losses.

    python benchmarks/nodes.py [--shape 0.5b] [--steps 20] [--repeats 3] [--tokens 256] [--nodes 2] [--out FOLDER]
    python benchmarks/nodes.py --sft --ranks 4            # full and hybrid sharding; SFT, no engine

GRPO has its trainer on the first GPU and an engine on each other; weights go by `broadcast`. The cases take turns.
`nodes` has one agent a node on loopback, `network` also a value of NCCL_HOSTID for each node: NCCL then takes them for
different hosts and uses sockets. `server`: the second GPU has an engine as a server (`slipstream engine`).
Prints a Markdown table: medians and ranges over all steps but the first two. Transfer and stall, in milliseconds, are
the engine's part of an update.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import secrets
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gpu import ENVIRONMENT, WARM_UP, figures, run_file, small_table, spread
from shapes import shaped_model

ADDRESS, RUN_ID = "127.0.0.1:29450", "nodes"
SFT = """
evaluation = false
model = {{ path = "{model}", dtype = "bfloat16" }}
algorithm.kind = "sft"
data.path = "{rows}"
training = {{ steps = {steps}, prompts_per_batch = 32, learning_rate = 1e-5 }}
run.checkpoint_every = 1000
"""
GRPO_CASES, SFT_CASES = ("one host", "nodes", "network"), ("one host", "full", "hybrid")
SERVER_PORTS, SERVER_START_S = (29451, 29452), 240.0
"""The control port and the inference port."""


@contextlib.contextmanager
def served(model: Path, max_length: int, environment: dict[str, str]) -> Iterator[list[str]]:
    """A server of `model`, and the options of a run on it."""
    control, port = (f"127.0.0.1:{SERVER_PORTS[0]}", str(SERVER_PORTS[1]))
    command = [sys.executable, "-m", "slipstream.cli", "engine", str(model), "--dtype", "bfloat16"]
    command += ["--control", control, "--port", port, "--max-length", str(max_length)]
    server = subprocess.Popen(command, env=environment, stdout=sys.stderr)
    try:
        deadline = time.monotonic() + SERVER_START_S
        while time.monotonic() < deadline and server.poll() is None:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                break
            time.sleep(0.5)
        else:
            raise SystemExit(f"the server was not ready after {SERVER_START_S:.0f} s: its output is above")
        yield ["--inference.servers", f'[{{url = "http://{control}"}}]']
    finally:
        server.terminate()
        server.wait(60)


def measure(case: str, file: Path, run: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Run a case, and read its run folder."""
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(options.gpus)))).split(",")[: options.gpus]
    nodes = 1 if case in ("one host", "server") else options.nodes
    num_parts = 2 if case == "server" else nodes
    parts = [gpus[start:][: len(gpus) // num_parts] for start in range(0, len(gpus), len(gpus) // num_parts)]
    token = {"SLIPSTREAM_CLUSTER_TOKEN": secrets.token_hex(16)}
    environments = [
        {**os.environ, **token, "CUDA_VISIBLE_DEVICES": ",".join(part)}
        | ({"NCCL_HOSTID": f"host-{number}"} if case == "network" else {})
        for number, part in enumerate(parts)
    ]
    command = ["sft" if options.sft else "train", "--plain", str(file), "--run.folder", str(run)]
    command += ["--training.ranks", str(options.ranks), "--run.max_restarts", "0"]
    if nodes > 1:
        command += ["--cluster.nodes", str(nodes), "--cluster.address", ADDRESS, "--cluster.run_id", RUN_ID]
    if case in ("full", "hybrid"):
        command += ["--training.sharding", case]
    program, begun = [sys.executable, "-m", "slipstream.cli"], time.monotonic()
    with contextlib.ExitStack() as stack:
        if case == "server":
            model, length = options.folder / f"model-{options.shape}", options.tokens + 128
            command += stack.enter_context(served(model, length, environments.pop()))
        for environment in environments[1:]:
            join = [*program, "node", "--join", ADDRESS, "--run-id", RUN_ID, "--attempt", "0"]
            agent = subprocess.Popen(join, env=environment, stdout=sys.stderr)
            stack.callback(agent.kill)
        done = subprocess.run(
            [*program, *command], env=environments[0], stdout=sys.stderr, check=False, timeout=options.timeout
        )
    return read(case, run, done.returncode) | {"seconds": time.monotonic() - begun}


def read(case: str, run: Path, code: int) -> dict[str, Any]:
    """The figures of a run."""
    from slipstream.runlog import read_events, read_metrics

    result: dict[str, Any] = {"case": case, "code": code}
    every = [row for row in read_metrics(run) if row["step"] > 0] if code == 0 else []
    if not every:
        return result | {
            log.name: log.read_text(errors="replace")[-3000:] for log in sorted((run / "logs").glob("*.log"))
        }
    rows = every[WARM_UP:]
    applied = read_events(run, kinds=["apply"])[1 + WARM_UP :]
    parts = {name: spread([event[f"{name}_s"] for event in applied]) for name in ("transfer", "stall")}
    return result | figures(rows) | parts | {"losses": [row["train/loss"] for row in every]}


def last_cell(result: dict[str, Any]) -> str:
    """The parts of updates in milliseconds, medians and ranges, and the last loss."""
    cells: list[str] = []
    for name in ("transfer", "stall"):
        middle, low, high = (1000 * seconds for seconds in result[name])
        cells.append(f"{name} {middle:.0f} ({low:.0f} to {high:.0f}) ms")
    return f"{', '.join(cells)}; {result['losses'][-1]:.8f}"


def main() -> int:
    """Measure all cases and print the table."""
    import torch

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="0.5b")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--gpus", type=int, default=torch.cuda.device_count())
    parser.add_argument("--sft", action="store_true")
    parser.add_argument("--cases", nargs="+")
    parser.add_argument("--timeout", type=float, default=300.0)
    parser.add_argument("--out", type=Path, help="keep the model and runs here")
    options = parser.parse_args()
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.folder = options.out or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        model = folder / f"model-{options.shape}"
        if not model.exists():
            shaped_model(model, options.shape)
        (folder / "environment.py").write_text(ENVIRONMENT)
        file, rows = folder / "run.toml", folder / "rows.jsonl"
        if options.sft:
            with rows.open("w") as to:
                for number in range(2000):
                    text = "".join(chr(97 + (number * each) % 26) for each in range(40, 300))
                    to.write(json.dumps({"prompt": text[:100], "completion": text[100:]}) + "\n")
            file.write_text(SFT.format(model=model, rows=rows, steps=options.steps))
        else:
            task, steps, tokens = folder / "environment.py", options.steps, options.tokens
            text = run_file(model, task, lora=False, placement="separate", steps=steps, tokens=tokens, evaluates=False)
            file.write_text(text)
        for repeat in range(options.repeats):
            for case in options.cases or (SFT_CASES if options.sft else GRPO_CASES):
                results.append(measure(case, file, folder / f"{case.replace(' ', '-')}-{repeat}", options))
                print(json.dumps(results[-1]), file=sys.stderr, flush=True)
    print(small_table(results, "updates; last loss", last_cell))
    return 1 if any("step" not in result for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
