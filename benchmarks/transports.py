"""Batches a second through each transport.

    python benchmarks/transports.py [--rollouts 64] [--tokens 512] [--batches 100] [--rounds 5] [--server PATH]
                                    [--only "put alone"]

A batch is put, taken and acknowledged: in turn in one process, and from one process to another with three places; and
only put, with places for all. The latter two also with bytes of the same size, which need not be made of Python objects
and into them. Rollouts keep the bytes that the ledger made of them when their group finished, as in a run, and the time
of that has a line of its own; "objects" are rollouts without. Starts a separate `redis-server`, without persistence.

Prints a Markdown table, medians (ranges) over rounds, and its rows as JSON lines on standard error.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import secrets
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from slipstream.records import Batch, Rollout, Sequence, Version, VersionSpan, encode, encode_rollouts
from slipstream.transport import FileStreams, MemoryTransport, RedisStreams, open_transport

CAPACITY, TIMEOUT_S, GROUP = 3, 60.0, 8
TOPIC, VARIABLE = "batches", "SLIPSTREAM_BENCHMARK_REDIS"
os.environ.setdefault(VARIABLE, secrets.token_hex(16))


def make_batch(num_rollouts: int, num_tokens: int) -> Batch:
    """A batch of random tokens, of which a fifth are the prompt's. Its rollouts keep no bytes."""
    chance, start = random.Random(0), num_tokens // 5
    rollouts = []
    for number in range(num_rollouts):
        tokens = [chance.randrange(150_000) for _ in range(num_tokens)]
        logprobs = [0.0 if place < start else -chance.random() for place in range(num_tokens)]
        mask = [place >= start for place in range(num_tokens)]
        sequence = Sequence(tokens, mask, logprobs, [VersionSpan(start, "0.1")])
        name = f"1.{number}"
        rollouts.append(
            Rollout(
                name,
                f"task-{number // GROUP}",
                name,
                [sequence],
                1.0,
                "done",
                completion="word " * (num_tokens - start),
            )
        )
    return Batch(1, Version(0, 1, "0" * 32), rollouts)


def finish_groups(rollouts, *, keep):
    """Encodes rollouts as the ledger does when their groups finish."""
    for start in range(0, len(rollouts), GROUP):
        encode_rollouts(rollouts[start : start + GROUP], keep=keep)


def encoding(batch, num_batches):
    """Batches a second whose groups are encoded for the ledger, as they are in every run."""
    start = time.perf_counter()
    for _ in range(num_batches):
        finish_groups(batch.rollouts, keep=False)
    return num_batches / (time.perf_counter() - start)


def in_turn(streams, batch, num_batches):
    """Batches a second in one process; without `streams` in its memory."""
    transport = (
        MemoryTransport(CAPACITY) if streams is None else open_transport(streams, TOPIC, Batch, capacity=CAPACITY)
    )
    start = time.perf_counter()
    for _ in range(num_batches):
        transport.put(batch, TIMEOUT_S)
        receipt, _ = transport.take(TIMEOUT_S)
        transport.ack(receipt)
    return num_batches / (time.perf_counter() - start)


def put_alone(streams, record, num_batches):
    """Records a second that are put, with places for all of them; they are taken afterwards."""
    transport = open_transport(streams, f"{TOPIC}-{type(record).__name__}", type(record), capacity=num_batches)
    start = time.perf_counter()
    for _ in range(num_batches):
        transport.put(record, TIMEOUT_S)
    seconds = time.perf_counter() - start
    for _ in range(num_batches):
        transport.ack(transport.take(TIMEOUT_S)[0])
    return num_batches / seconds


def produce(streams, record, num_batches):
    """The other process."""
    if isinstance(record, Batch):
        finish_groups(record.rollouts, keep=True)
    transport = open_transport(streams, TOPIC, type(record), capacity=CAPACITY)
    for _ in range(num_batches):
        transport.put(record, TIMEOUT_S)


def between(streams, record, num_batches):
    """Records a second from one process to another, after the first."""
    transport = open_transport(streams, TOPIC, type(record), capacity=CAPACITY)
    process = multiprocessing.get_context("spawn").Process(target=produce, args=(streams, record, num_batches + 1))
    process.start()
    transport.ack(transport.take(TIMEOUT_S)[0])
    start = time.perf_counter()
    for _ in range(num_batches):
        transport.ack(transport.take(TIMEOUT_S)[0])
    seconds = time.perf_counter() - start
    process.join()
    return num_batches / seconds


def start_server(program, folder):
    """A server on a free port of the loopback interface."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    settings = Path(folder) / "redis.conf"
    settings.touch(mode=0o600)
    settings.write_text(f"requirepass {os.environ[VARIABLE]}\n")
    options = [
        settings,
        "--bind",
        "127.0.0.1",
        "--port",
        str(port),
        "--dir",
        folder,
        "--save",
        "",
        "--appendonly",
        "no",
    ]
    process = subprocess.Popen([program, *options], stdout=subprocess.DEVNULL)
    for _ in range(500):
        try:
            socket.create_connection(("127.0.0.1", port)).close()
            return process, port
        except OSError:
            time.sleep(0.02)
    sys.exit(f"{program} did not start")


def spread(values, form):
    """Median and range."""
    return f"{statistics.median(values):{form}} ({min(values):{form}} to {max(values):{form}})"


def main():
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--batches", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="", help='what has this in its name, such as "put alone"')
    beside = Path(sys.executable).parent / "redis-server"
    parser.add_argument("--server", default=shutil.which("redis-server") or str(beside))
    options = parser.parse_args()
    number = options.batches
    batch = make_batch(options.rollouts, options.tokens)
    objects, value = make_batch(options.rollouts, options.tokens), encode(batch)
    finish_groups(batch.rollouts, keep=True)
    num_bytes = len(value)
    found: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        process, port = start_server(options.server, folder)
        try:
            for turn in range(options.rounds):
                url = f"redis://127.0.0.1:{port}"
                streams = {
                    "memory": None,
                    "files": FileStreams(Path(folder), turn),
                    "redis": RedisStreams(url, "bench", turn, VARIABLE),
                }
                measures = {f"{name}, in turn": (in_turn, place, batch, number) for name, place in streams.items()}
                measures["encoded for the ledger"] = (encoding, objects, number)
                for name in ("redis", "files"):
                    measures[f"{name}, put alone"] = (put_alone, streams[name], batch, number)
                    measures[f"{name}, put alone, objects"] = (put_alone, streams[name], objects, number)
                    measures[f"{name}, put alone, bytes"] = (put_alone, streams[name], value, number)
                    measures[f"{name}, from process to process"] = (between, streams[name], batch, number)
                    measures[f"{name}, from process to process, bytes"] = (between, streams[name], value, number)
                for name, (measure, *arguments) in measures.items():
                    if options.only not in name:
                        continue
                    found.setdefault(name, []).append(measure(*arguments))
        finally:
            process.terminate()
            process.wait()
    print(f"{num_bytes:,} bytes a batch\n\n| what | batches/s |\n|---|---|")
    for name, rates in found.items():
        print(f"| {name} | {spread(rates, ',.0f')} |")
        print(json.dumps({"what": name, "batches_a_second": rates, "num_bytes": num_bytes}), file=sys.stderr)


if __name__ == "__main__":
    main()
