"""The bridge `broadcast` without an engine: how message sizes decide what part of the link it uses.

    python benchmarks/broadcast_messages.py [--shapes 1.5b 7b] [--direct 4 16 64 256] [--bucket 64 256] [--repeats 9]

Two processes, on two GPUs over NCCL, or on a CPU over gloo. One sends the parameters of a Qwen2 of the named shape with
random weights by the very code of the bridge, the other receives them to where its own parameters lie. `--direct`: from
how many MiB on a tensor is a message of its own; `--bucket`: how large the messages of smaller ones get. In the same
processes the same bytes are sent in messages of 1 GiB, which is what the link gives, and the fingerprints of both sides
are compared; their time, of a first call and of a later one, is shown too. Takes about twenty seconds on two H200s.

Prints a Markdown table, medians (ranges), and its rows as JSON lines on standard error.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec
import torch
from weight_sync.collective import passes

from slipstream.records import ParameterSpec, Ticket, Version
from slipstream.weights.bridges import broadcast
from slipstream.weights.bridges.broadcast import Group, Rendezvous, copy_all, flat_bytes
from slipstream.weights.fingerprint import fingerprints
from slipstream.weights.fingerprint_torch import Slice

MIB = 1 << 20
TIMEOUT_S = 120.0


def parameters_of(shape: str) -> list[ParameterSpec]:
    """The parameters of a Qwen2 of that shape; a tied head is no parameter of its own."""
    from shapes import shape_config
    from transformers import Qwen2ForCausalLM

    with torch.device("meta"):
        network: Any = Qwen2ForCausalLM(shape_config(shape, eos_token_id=2, pad_token_id=0))
    return [ParameterSpec(name, tuple(p.shape), "bfloat16", "") for name, p in network.named_parameters()]


def one_side(options: argparse.Namespace, group: Group, rank: int) -> dict[str, Any]:
    """All passes of one process: seconds of each, and what its parameters are at the end."""
    backend = group.rendezvous.backend
    device = group.device
    found: dict[str, Any] = {"backend": backend, "raw": {}, "passes": {}, "prints": {}, "fingerprint_s": {}}
    for shape in options.shapes:
        specs = parameters_of(shape)
        ticket = Ticket(Version(0, 0), "broadcast", "", tuple(specs))
        torch.manual_seed(rank)
        make = torch.randn if rank == 0 else torch.zeros
        own = {spec.name: make(spec.shape, dtype=torch.bfloat16, device=device) for spec in specs}
        size = sum(map(broadcast.num_bytes, specs))
        found["raw"][shape] = passes(group, size, options.repeats)
        for direct in options.direct:
            for bucket in options.bucket:
                broadcast.DIRECT_BYTES[backend], broadcast.BUCKET_BYTES[backend] = direct * MIB, bucket * MIB
                if rank == 1:
                    torch._foreach_zero_(list(own.values()))  # what a setting before has sent proves nothing
                seconds: list[float] = []
                for _ in range(options.repeats + 1):
                    group.broadcast(torch.zeros(1, dtype=torch.uint8, device=device))
                    group.finish()
                    began = time.perf_counter()
                    if rank == 0:
                        group.send(specs, own.values())
                    else:
                        for arrived in group.receive(ticket, lambda spec, own=own: flat_bytes(own[spec.name])):
                            copy_all([own[name] for name, _ in arrived], [tensor for _, tensor in arrived])
                    group.finish()
                    seconds.append(time.perf_counter() - began)
                key = f"{shape} {direct} {bucket} {len(broadcast.messages(specs, group.rendezvous))} {size}"
                found["passes"][key] = seconds[1:]
                found["prints"][key] = fingerprints([Slice(tensor) for tensor in own.values()])
                group._buckets.clear()
        slices, times = [Slice(tensor) for tensor in own.values()], []
        for _ in range(3):
            began = time.perf_counter()
            fingerprints(slices)
            times.append(time.perf_counter() - began)
        found["fingerprint_s"][shape] = [times[1], times[2]]  # the first one compiles the kernel
        del own, slices
    return found


def rows_of(ours: dict[str, Any], theirs: dict[str, Any]) -> list[dict[str, Any]]:
    """One row for each shape and setting; a pass took as long as the slower side."""
    rows: list[dict[str, Any]] = []
    for key, sent in ours["passes"].items():
        shape, direct, bucket, num_messages, size = key.split()
        seconds = list(map(max, sent, theirs["passes"][key]))
        raw_s = statistics.median(map(max, ours["raw"][shape], theirs["raw"][shape]))
        median = statistics.median(seconds)
        rows.append(
            {
                "shape": shape,
                "backend": ours["backend"],
                "direct from, MiB": int(direct),
                "bucket, MiB": int(bucket),
                "messages": int(num_messages),
                "GB": int(size) / 1e9,
                "ms": [1000 * value for value in (median, min(seconds), max(seconds))],
                "raw, ms": 1000 * raw_s,
                "part of raw": raw_s / median,
                "fingerprints, ms": 1000 * max(side["fingerprint_s"][shape][-1] for side in (ours, theirs)),
                "exact": ours["prints"][key] == theirs["prints"][key],
            }
        )
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """The rows in Markdown."""
    lines = [
        "| shape | direct from, MiB | bucket, MiB | messages | GB | ms | raw, ms | part of raw | fingerprints, ms "
        "| exact |",
        f"|{'---|' * 10}",
    ]
    for row in rows:
        median, low, high = row["ms"]
        cells = [
            *(row[key] for key in ("shape", "direct from, MiB", "bucket, MiB", "messages")),
            f"{row['GB']:.2f}",
            f"{median:.2f} ({low:.2f} to {high:.2f})",
            f"{row['raw, ms']:.2f}",
            f"{100 * row['part of raw']:.0f} %",
            f"{row['fingerprints, ms']:.1f}",
            "yes" if row["exact"] else "NO",
        ]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def main() -> int:
    """Measure with a second process, print the table; 1 when the two sides did not end with the same bits."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["1.5b", "7b"])
    parser.add_argument("--direct", type=int, nargs="+", default=[4, 16, 64, 256])
    parser.add_argument("--bucket", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--store", help=argparse.SUPPRESS)
    options = parser.parse_args()
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    if options.store:
        print(json.dumps(one_side(options, Group(Rendezvous(options.store, 1, TIMEOUT_S, backend), 1), 1)))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        cards = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")
        environment = dict(os.environ, CUDA_VISIBLE_DEVICES=cards[-1]) if torch.cuda.is_available() else None
        command = [sys.executable, __file__, *sys.argv[1:], "--store", store]
        child = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment)
        try:
            group = Group(Rendezvous(store, 1, TIMEOUT_S, backend), 0)
            ours = one_side(options, group, 0)
            answer, _ = child.communicate(timeout=TIMEOUT_S)
        finally:
            child.kill()
            child.wait()
    rows = rows_of(ours, msgspec.json.decode(answer))
    for row in rows:
        print(json.dumps(row), file=sys.stderr)
    print(table(rows))
    return int(not all(row["exact"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
