"""An update of the weights by Slipstream's `broadcast`, by vLLM's own NCCL weight transfer, and by TRL's sync.

    python benchmarks/sync_peers.py [--model 1.5b|7b|FOLDER] [--systems slipstream vllm trl] [--updates 20]
                                    [--streams 4] [--context 2048] [--in-flight keep|recompute] [--json]

For two GPUs and vLLM 0.26 or 0.27: the trainer's weights are on the first, the engine on the second, and `--streams`
generations of up to `--context` tokens go on, one after the other. Two updates are not counted.

- slipstream: `python -m benchmarks.weight_sync --bridges broadcast`; each version is verified inside
  transfer-to-first-token.
- vllm: a `vllm serve` of its own, told over HTTP to pause (`keep`), then `start_weight_update`, `update_weights`
  (packed) against `NCCLWeightTransferEngine.trainer_send_weights`, `finish_weight_update`, and to go on. Nothing is
  verified.
- trl: the same server and pause, and between them what TRL's GRPO trainer does: `VLLMClient.update_named_params` and
  `reset_prefix_cache`. Nothing is verified.
- pause: the server is paused and goes on, and nothing is moved: what the way there costs.

The transfer of the peers is from the call of `start_weight_update` to the answer of `finish_weight_update`; of
Slipstream it is the engine's part, and its `publish`, with the trainer's fingerprints, has a column of its own. The
stall is the longest time without a token, of any generation, from the update's begin to the first token after its end;
Slipstream's by the engine's clock, the peers' as their client sees it, HTTP included, so that the whole update is what
compares and the row `pause` what is to be taken off the peers' stalls.
Prints a Markdown table of medians and 95th percentiles; a system that fails is named below it, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from weight_sync.figures import PROMPT_TOKENS, WORD_IDS, spread

FOLDER = Path(__file__).resolve().parent
WARM_UP, PATIENCE_S, PAUSE_S = 2, 5.0, 0.2
SYSTEMS = ("slipstream", "vllm", "trl", "pause")
Post = Callable[..., Any]


class Streams:
    """Generations that go on, and when their tokens come."""

    def __init__(self, url: str, options: argparse.Namespace) -> None:
        self.ticks: list[float] = []
        self._url = url
        self._num_tokens = options.context - PROMPT_TOKENS
        self._is_over = False
        self._threads = [threading.Thread(target=self._go_on, args=(n,), daemon=True) for n in range(options.streams)]
        for thread in self._threads:
            thread.start()

    def _go_on(self, number: int) -> None:
        import requests

        while not self._is_over:
            body = {
                "model": "model",
                "prompt": [(7 * number + place * place) % WORD_IDS + 1 for place in range(PROMPT_TOKENS)],
                "max_tokens": self._num_tokens,
                "ignore_eos": True,
                "temperature": 1.0,
                "stream": True,
            }
            with requests.post(f"{self._url}/v1/completions", json=body, stream=True, timeout=600) as answer:
                answer.raise_for_status()
                for line in answer.iter_lines(chunk_size=None):
                    if line.startswith(b"data: {"):
                        self.ticks.append(time.perf_counter())
                    if self._is_over:
                        return

    def stop(self) -> None:
        """End them."""
        self._is_over = True

    def begin(self) -> None:
        """Wait until tokens come."""
        deadline = time.perf_counter() + 60
        while not self.ticks:
            if time.perf_counter() > deadline:
                raise RuntimeError("no token came within 60 s")
            time.sleep(0.01)

    def stall(self, began: float, ended: float) -> float:
        """The longest time without a token between them and the first token after; waits for that one."""
        deadline = time.perf_counter() + PATIENCE_S
        while self.ticks[-1] < ended and time.perf_counter() < deadline:
            time.sleep(0.0005)
        if self.ticks[-1] < ended:
            raise RuntimeError(f"no token came within {PATIENCE_S:g} s of the update")
        return longest_gap(list(self.ticks), began, ended)


def longest_gap(ticks: Sequence[float], began: float, ended: float) -> float:
    """The longest time from one tick to the next, of those that end after `began` and begin before `ended`."""
    return max((b - a for a, b in itertools.pairwise(sorted(ticks)) if b > began and a < ended), default=0.0)


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def cards() -> list[str]:
    """The GPUs that this program may use; none on a CPU."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named:
        return named.split(",")
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        found = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True, timeout=20).stdout
        return [str(number) for number in range(len(found.splitlines()))]
    return []


@contextlib.contextmanager
def serving(folder: str, options: argparse.Namespace, log: Path) -> Generator[str]:
    """A vLLM server on the last GPU, by its address."""
    import requests

    port, gpus = free_port(), cards()
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", folder]
    command += ["--served-model-name", "model", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--max-model-len", str(options.context), "--max-num-seqs", str(options.streams)]
    command += ["--generation-config", "vllm", "--logprobs-mode", "processed_logprobs", "--max-logprobs", "-1"]
    if gpus:
        command += ["--dtype", "bfloat16", "--gpu-memory-utilization", "0.8"]
        command += ["--weight-transfer-config", '{"backend": "nccl"}']
    else:
        command += ["--enforce-eager", "--kv-cache-memory-bytes", str(1 << 28)]
    environment = dict(os.environ, VLLM_SERVER_DEV_MODE="1", VLLM_HOST_IP="127.0.0.1", VLLM_NO_USAGE_STATS="1")
    environment |= {"CUDA_VISIBLE_DEVICES": gpus[-1]} if gpus else {}
    with log.open("wb") as file:
        server = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
    url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + options.timeout
    try:
        while True:
            with contextlib.suppress(requests.RequestException):
                if requests.get(f"{url}/health", timeout=5).status_code == 200:
                    break
            if server.poll() is not None or time.monotonic() > deadline:
                said = log.read_text(errors="replace")[-3000:]
                raise RuntimeError(f"the vLLM server did not start within {options.timeout:g} s; its log ends:\n{said}")
            time.sleep(0.3)
        yield url
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, 15)
            with contextlib.suppress(subprocess.TimeoutExpired):
                server.wait(15)
            os.killpg(server.pid, 9)
        server.wait(30)


def vllm_update(url: str, post: Post, weights: dict[str, Any]) -> Callable[[], None]:
    """An update by vLLM's own NCCL engine; joins the group first."""
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerSendWeightsArgs, NCCLWeightTransferEngine

    engine: Any = NCCLWeightTransferEngine
    if not hasattr(engine, "trainer_send_weights"):
        raise RuntimeError("this vLLM has no NCCLWeightTransferEngine.trainer_send_weights: use vLLM 0.26 or 0.27")
    init = {"master_address": "127.0.0.1", "master_port": free_port(), "rank_offset": 1, "world_size": 2}
    with ThreadPoolExecutor(1) as pool:
        joining = pool.submit(post, "/init_weight_transfer_engine", json={"init_info": init})
        group = engine.trainer_init(init)
        joining.result()
    info = {
        "names": list(weights),
        "dtype_names": [str(weight.dtype).removeprefix("torch.") for weight in weights.values()],
        "shapes": [list(weight.shape) for weight in weights.values()],
        "packed": True,
    }

    def update() -> None:
        post("/start_weight_update", json={})
        with ThreadPoolExecutor(1) as pool:
            receiving = pool.submit(post, "/update_weights", json={"update_info": info})
            engine.trainer_send_weights(iter(weights.items()), NCCLTrainerSendWeightsArgs(group=group, packed=True))
            receiving.result()
        post("/finish_weight_update", json={})

    return update


def trl_update(url: str, post: Post, weights: dict[str, Any]) -> Callable[[], None]:
    """An update as `VLLMGeneration.sync_weights` of TRL makes it; joins the group first."""
    from trl.generation.vllm_client import VLLMClient

    client = VLLMClient(base_url=url, group_port=free_port(), connection_timeout=60.0)
    client.init_communicator(device="cuda:0")
    metadata = [(n, str(w.dtype).removeprefix("torch."), list(w.shape)) for n, w in weights.items()]

    def update() -> None:
        client.update_named_params(metadata, iter(weights.items()))
        client.reset_prefix_cache()

    return update


UPDATES: dict[str, Callable[[str, Post, dict[str, Any]], Callable[[], None]]] = {
    "vllm": vllm_update,
    "trl": trl_update,
    "pause": lambda *_: lambda: None,
}


def measure(system: str, url: str, folder: str, options: argparse.Namespace) -> dict[str, Any]:
    """All updates of one peer, in this process, which has the trainer's GPU."""
    import requests
    import torch
    from transformers import AutoModelForCausalLM

    session = requests.Session()

    def post(path: str, **arguments: Any) -> Any:
        answer = session.post(f"{url}{path}", timeout=options.timeout, **arguments)
        if answer.status_code != 200:
            raise RuntimeError(f"{path} was answered with {answer.status_code}: {answer.text[:500]}")

    device = "cuda" if torch.cuda.is_available() else "cpu"
    network: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to(device)
    weights = {name: parameter.data for name, parameter in network.named_parameters()}
    keeps = options.in_flight == "keep"
    update = UPDATES[system](url, post, weights)
    streams = Streams(url, options)
    streams.begin()
    transfers: list[float] = []
    stalls: list[float] = []
    wholes: list[float] = []
    for _ in range(WARM_UP + options.updates):
        for weight in weights.values():
            weight.neg_()
        if device == "cuda":
            torch.cuda.synchronize()
        time.sleep(PAUSE_S)
        began = time.perf_counter()
        post("/pause", params={"mode": "keep", "clear_cache": str(not keeps).lower()})
        paused = time.perf_counter()
        update()
        updated = time.perf_counter()
        post("/resume")
        ended = time.perf_counter()
        transfers.append(updated - paused)
        wholes.append(ended - began)
        stalls.append(streams.stall(began, ended))
    streams.stop()
    figures = {"transfer": transfers, "stall": stalls, "update": wholes}
    row = {name: asdict(spread(values[WARM_UP:])) for name, values in figures.items()}
    return {"system": system, "num_bytes": sum(w.nbytes for w in weights.values()) * (system != "pause"), **row}


def ours(folder: str, options: argparse.Namespace) -> dict[str, Any]:
    """Slipstream's row."""
    command = [sys.executable, "-m", "benchmarks.weight_sync", "--bridges", "broadcast", "--model", folder]
    for name in ("updates", "streams", "context", "timeout", "in_flight"):
        command += [f"--{name.replace('_', '-')}", str(getattr(options, name))]
    paths = os.pathsep.join([str(FOLDER.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [*command, "--json"],
        capture_output=True,
        text=True,
        timeout=3 * options.timeout,
        check=False,
        env=dict(os.environ, PYTHONPATH=paths),
    )
    if done.returncode:
        raise RuntimeError(done.stderr.strip()[-3000:])
    return {"system": "slipstream", **json.loads(done.stdout)["bridges"][0]}


def peer(system: str, url: str, folder: str, options: argparse.Namespace) -> dict[str, Any]:
    """A peer's row, from a process of its own, which can be given up."""
    gpus = cards()
    environment = dict(os.environ, VLLM_HOST_IP="127.0.0.1", **({"CUDA_VISIBLE_DEVICES": gpus[0]} if gpus else {}))
    command = [sys.executable, __file__, *sys.argv[1:], "--model", folder, "--role", system, "--url", url]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=options.timeout, check=False, env=environment
    )
    if done.returncode:
        raise RuntimeError(done.stderr.strip()[-3000:])
    return json.loads(done.stdout.splitlines()[-1])


def rows_of(folder: str, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Each system's row, or its name and what went wrong. The peers share a server, until one fails on it."""
    systems = [system for system in options.systems if system != "slipstream"]
    if "slipstream" in options.systems:
        yield attempt("slipstream", lambda: ours(folder, options))
    while systems:
        with contextlib.ExitStack() as stack:
            try:
                url = stack.enter_context(serving(folder, options, Path(options.log)))
            except (OSError, RuntimeError) as error:
                yield from ({"system": system, "error": str(error)} for system in systems)
                return
            while systems:
                system = systems.pop(0)
                row = attempt(system, lambda system=system, url=url: peer(system, url, folder, options))
                yield row
                if "error" in row:
                    break


def attempt(system: str, call: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """A row, or why there is none."""
    try:
        return call()
    except (OSError, RuntimeError, ValueError, subprocess.SubprocessError) as error:
        return {"system": system, "error": str(error)}


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows in Markdown; milliseconds."""
    lines = ["| system | GB | publish | transfer | verify | stall | whole update |", f"|{'---|' * 7}"]
    for row in rows:
        if "error" in row:
            continue
        cells = [row["system"], f"{row['num_bytes'] / 1e9:.3f}"]
        for name in ("publish", "transfer", "verify", "stall", "update"):
            found = row.get(name)
            cells.append(f"{1000 * found['median']:.1f}, {1000 * found['p95']:.1f}" if found else "")
        lines.append(f"| {' | '.join(cells)} |")
    lines += [f"\n{row['system']} failed: {row['error'].splitlines()[-1]}" for row in rows if "error" in row]
    raw = [row["raw_s"] for row in rows if row.get("raw_s")]
    lines += [f"\nThe collective alone: {1000 * raw[0]:.1f} ms."] if raw else []
    return "\n".join(lines)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="1.5b", help="a shape with random weights, or a folder")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=["slipstream", "vllm", "trl"])
    parser.add_argument("--updates", type=int, default=20)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--in-flight", choices=["keep", "recompute"], default="keep")
    parser.add_argument("--timeout", type=float, default=150.0, help="seconds for a start, and for all of one peer")
    parser.add_argument("--log", default=str(Path(tempfile.gettempdir()) / "sync_peers_server.log"))
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--role", choices=tuple(UPDATES), help=argparse.SUPPRESS)
    parser.add_argument("--url", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main() -> int:
    """Measure, print; 1 when a system failed."""
    options = parse()
    if options.role:
        print(json.dumps(measure(options.role, options.url, options.model, options)), flush=True)
        os._exit(0)  # the group of another process may be gone: nothing is waited for
    from shapes import SHAPES

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the server is ended with us
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.model
        if folder in SHAPES:
            folder = str(Path(scratch) / "model")
            subprocess.run([sys.executable, str(FOLDER / "shapes.py"), folder, options.model], check=True)
        rows: list[dict[str, Any]] = []
        for row in rows_of(folder, options):
            rows.append(row)
            print(json.dumps(row), file=sys.stderr, flush=True)
    print(json.dumps(rows) if options.json else table(rows))
    return int(any("error" in row for row in rows))


if __name__ == "__main__":
    sys.exit(main())
