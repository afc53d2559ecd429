"""Tokens per second of `slipstream engine` for foreign clients, beside `vllm serve` with the same arguments.

    python benchmarks/serving.py [--shape 1.5b] [--streams 256] [--requests 1024] [--input 128] [--output 256]
                                 [--repeats 3]

Both servers are alive at once, with the same memory for the KV cache, and are measured in turn by vLLM's own benchmark
(`vllm.benchmarks.serve`, streamed completions of random prompts). Prints a Markdown table: medians and ranges.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

from shapes import shaped_model

START_S, ROUND_S = 300.0, 300.0
CLIENT = """
import json, sys
from vllm.benchmarks import serve
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
serve.add_cli_args(parser)
for line in sys.stdin:
    serve.main(parser.parse_args(json.loads(line)))
    print("DONE", flush=True)
"""
"""One process for all rounds: its imports take longer than a round."""


def commands(model: Path, options: argparse.Namespace) -> dict[str, list[str]]:
    """The two servers' commands, without host and port."""
    length = str(options.input + options.output + 64)
    vllm = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--dtype", "bfloat16"]
    vllm += ["--served-model-name", "model", "--max-model-len", length, "--max-num-seqs", str(options.streams)]
    vllm += ["--disable-log-stats", "--disable-uvicorn-access-log"]
    ours = [sys.executable, "-m", "slipstream.cli", "engine", str(model), "--dtype", "bfloat16", "--max-length", length]
    # The utilization is checked against free memory, and the other server takes some at the same time.
    vllm += ["--kv-cache-memory-bytes", str(int(options.memory_gib * 2**30)), "--gpu-memory-utilization", "0.05"]
    return {"vllm serve": vllm, "slipstream engine": [*ours, "--memory", str(options.memory_gib)]}


def wait_ready(url: str, process: subprocess.Popen[bytes], log: Path) -> float:
    """Seconds until the server answers."""
    begun = time.monotonic()
    while time.monotonic() < begun + START_S:
        if process.poll() is not None:
            raise SystemExit(f"the server ended: {log.read_text(errors='replace')[-3000:]}")
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=5):
            return time.monotonic() - begun
        time.sleep(0.5)
    raise SystemExit(f"{url} was not ready after {START_S:.0f} s: {log.read_text(errors='replace')[-3000:]}")


def measure(
    client: subprocess.Popen[str], url: str, model: Path, folder: Path, options: argparse.Namespace
) -> dict[str, Any]:
    """One round of the benchmark: its result file."""
    sizes = ["--random-input-len", str(options.input), "--random-output-len", str(options.output)]
    load = ["--num-prompts", str(options.requests), "--max-concurrency", str(options.streams), "--ignore-eos"]
    with urllib.request.urlopen(f"{url}/v1/models", timeout=30) as answer:
        name = json.load(answer)["data"][0]["id"]
    asked = ["--base-url", url, "--model", name, "--tokenizer", str(model), "--dataset-name", "random", *sizes, *load]
    asked += ["--save-result", "--result-filename", "result.json", "--result-dir", str(folder), "--disable-tqdm"]
    assert client.stdin is not None
    assert client.stdout is not None
    client.stdin.write(json.dumps(asked) + "\n")
    client.stdin.flush()
    timer = threading.Timer(ROUND_S, client.kill)
    timer.daemon = True
    timer.start()
    if "DONE" not in map(str.strip, client.stdout):  # reads until then
        raise SystemExit(f"the client ended: {(folder / 'client.log').read_text(errors='replace')[-3000:]}")
    timer.cancel()
    return json.loads((folder / "result.json").read_text())


def main() -> int:
    """Measure both and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="1.5b")
    for name, value in (("streams", 256), ("requests", 1024), ("input", 128), ("output", 256), ("repeats", 3)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--memory-gib", type=float, default=24.0, help="KV cache of each server")
    options = parser.parse_args()
    results: dict[str, list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as scratch, contextlib.ExitStack() as stack:
        folder, urls = Path(scratch), dict[str, str]()
        model = shaped_model(folder / "model", options.shape)
        processes: list[subprocess.Popen[bytes]] = []
        for number, (name, command) in enumerate(commands(model, options).items()):
            urls[name] = f"http://127.0.0.1:{29460 + number}"
            with (folder / f"{number}.log").open("wb") as output:
                listening = ["--host", "127.0.0.1", "--port", str(29460 + number)]
                environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
                process = subprocess.Popen([*command, *listening], stdout=output, stderr=output, env=environment)
            stack.callback(process.wait, 60)
            stack.callback(process.terminate)
            processes.append(process)
        for number, ((name, url), process) in enumerate(zip(urls.items(), processes, strict=True)):
            seconds = wait_ready(url, process, folder / f"{number}.log")
            print(f"{name}: ready after {seconds:.0f} s more", file=sys.stderr, flush=True)
        with (folder / "client.log").open("w") as output:
            pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": output, "text": True}
            client = subprocess.Popen([sys.executable, "-c", CLIENT], **pipes)
        stack.callback(client.kill)
        for repeat in range(options.repeats + 1):  # the first warms up
            for name, url in urls.items():
                result = measure(client, url, model, folder, options)
                shown = {key: result[key] for key in ("output_throughput", "mean_ttft_ms", "mean_tpot_ms", "failed")}
                print(json.dumps({"system": name, "repeat": repeat, **shown}), file=sys.stderr, flush=True)
                if repeat:
                    results.setdefault(name, []).append(shown)
    print("| server | tokens/s | ms to the first token | ms a token | failed |\n|---|---|---|---|---|")
    for name, rows in results.items():
        cells = []
        for key in ("output_throughput", "mean_ttft_ms", "mean_tpot_ms"):
            values = sorted(row[key] for row in rows)
            cells.append(f"{statistics.median(values):,.1f} ({values[0]:,.1f} to {values[-1]:,.1f})")
        print(f"| {name} | {' | '.join(cells)} | {sum(row['failed'] for row in rows)} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
