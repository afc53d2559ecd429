"""Is a run with `run.exact` repeated to the last digit? One run, the same killed and resumed, the same beside others.

    python benchmarks/exact.py MODEL [--steps 8] [--tokens 192] [--length 512] [--set KEY=VALUE ...]

Each is GRPO of 32 prompts, 8 completions each, bridge `single_copy`, one seed, in a process of its own. The second is
killed (SIGKILL) in the middle and resumed. In the third somebody else's requests, 24 at once, are in the engine from
the first step on. Prints a Markdown table: a digest of the last weights, one of all losses, gradient norms and rewards,
and the largest difference between engine and trainer; the exit code is 1 where digests or log-probabilities differ.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import random
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from closeness import ENVIRONMENT, TEMPLATE
from gpu import run_file

from slipstream.errors import SlipstreamError
from slipstream.inference.client import EngineClient
from slipstream.records import GenerateRequest, SamplingParams
from slipstream.runlog import read_metrics

NAMES = ("train/loss", "train/grad_norm", "reward/mean", "mismatch/abs_logprob_diff", "probe/max_logprob_diff")
AT_ONCE = 24


class Beside:
    """Sends requests to the engine of a run while it trains."""

    def __init__(self) -> None:
        self.num_answers = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._all()))

    def __enter__(self) -> Beside:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    async def _all(self) -> None:
        while not (sockets := engine_sockets()):
            if self._ended.is_set():
                return
            await asyncio.sleep(0.2)
        client = EngineClient(sockets[-1], is_alive=lambda: True, describe=lambda: "an engine", silence_s=600.0)
        await asyncio.gather(*(self._ask(client, number) for number in range(AT_ONCE)))
        await client.close()

    async def _ask(self, client: EngineClient, number: int) -> None:
        draw = random.Random(number)
        while not self._ended.is_set():
            prompt = [draw.randrange(10, 1000) for _ in range(draw.randrange(2, 90))]
            sampling = SamplingParams(max_tokens=draw.randrange(1, 150))
            request = GenerateRequest(f"beside.{number}.{draw.random()}", prompt, sampling, draw.randrange(1000), 60.0)
            try:
                await client.generate(request)
                self.num_answers += 1
            except (SlipstreamError, OSError):
                await asyncio.sleep(0.5)  # before the engine is ready, and after its end


def engine_sockets() -> list[str]:
    """Sockets on which engines listen on this machine."""
    lines = Path("/proc/net/unix").read_text().splitlines()
    return [line.split()[-1] for line in lines if line.endswith("/engine.sock")]


def start(options: argparse.Namespace, file: Path, run: Path, *further: str) -> subprocess.Popen[str]:
    """Start `slipstream train`."""
    settings = ["run.exact=true", f"inference.max_model_len={options.length}", "weights.bridge=single_copy"]
    command = [
        sys.executable,
        "-m",
        "slipstream.cli",
        "train",
        "--plain",
        str(file),
        "--run.folder",
        str(run),
        *further,
    ]
    for setting in [*settings, "run.checkpoint_every=2", *options.set]:
        key, _, value = setting.partition("=")
        command += [f"--{key}", value]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finish(process: subprocess.Popen[str]) -> None:
    """Wait for its end; a failure ends the benchmark."""
    output = process.communicate(timeout=900)[0]
    if process.returncode:
        raise SystemExit(output[-3000:])


def killed(options: argparse.Namespace, file: Path, run: Path) -> None:
    """Kill a run after half of its steps, and resume it."""
    process = start(options, file, run)
    while process.poll() is None and len(list(read_metrics(run)) if run.exists() else ()) <= options.steps // 2:
        time.sleep(0.05)
    if process.poll() is not None:
        raise SystemExit(f"the run ended before it could be killed: {process.communicate()[0][-3000:]}")
    process.kill()
    process.wait()
    finish(start(options, file, run, "--resume"))


def digests(run: Path) -> tuple[str, str, float]:
    """Of the last weights and of all metrics, and the largest difference between engine and trainer."""
    weights = hashlib.sha256()
    last = max((run / "checkpoints").glob("step-*"))
    for file in sorted((last / "weights").glob("*.safetensors")):
        weights.update(file.read_bytes())
    rows = {row["step"]: [row.get(name) for name in NAMES] for row in read_metrics(run)}
    rows.pop(0, None)
    worst = max(abs(value or 0.0) for row in rows.values() for value in row[3:])
    return weights.hexdigest()[:16], hashlib.sha256(repr(sorted(rows.items())).encode()).hexdigest()[:16], worst


def main() -> int:
    """Make the three runs and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=192)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--set", action="append", default=[], help="further settings of the run")
    options = parser.parse_args()
    template = options.model / "chat_template.jinja"
    if not template.exists():
        template.write_text(TEMPLATE)
    table: dict[str, tuple[str, str, float]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "environment.py").write_text(ENVIRONMENT)
        places = options.model.absolute(), folder / "environment.py"
        size = {"steps": options.steps, "tokens": options.tokens}
        file = folder / "run.toml"
        file.write_text(run_file(*places, lora=False, placement="auto", evaluates=False, **size))
        finish(start(options, file, folder / "alone"))
        table["alone"] = digests(folder / "alone")
        killed(options, file, folder / "killed")
        table["killed and resumed"] = digests(folder / "killed")
        with Beside() as beside:
            finish(start(options, file, folder / "beside"))
        table[f"beside {beside.num_answers} other requests"] = digests(folder / "beside")
    print("| run | weights | losses, gradient norms, rewards | largest difference of a log-probability |")
    print("|---|---|---|---|")
    for name, (weights, metrics, worst) in table.items():
        print(f"| {name} | {weights} | {metrics} | {worst:g} |")
    return int(len({(row[0], row[1]) for row in table.values()}) > 1 or any(row[2] for row in table.values()))


if __name__ == "__main__":
    sys.exit(main())
