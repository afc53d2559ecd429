"""Token arrays of a record as MessagePack lists, which Slipstream writes, or as raw bytes: time and size.

    python benchmarks/token_arrays.py [--tokens 2048] [--rounds 9]

One sequence's ids, mask and log-probabilities, as Python lists on both sides, encoded and decoded. Prints a Markdown
table: microseconds of a sequence, medians (ranges) over rounds, and bytes.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from array import array

import msgspec
import numpy as np

NUM_CALLS = 100
Lists = tuple[list[int], list[bool], list[float]]


class AsLists(msgspec.Struct, array_like=True):
    """What Slipstream writes."""

    ids: list[int]
    mask: list[bool]
    logprobs: list[float]


class AsBytes(msgspec.Struct, array_like=True):
    """Little-endian arrays."""

    ids: bytes
    mask: bytes
    logprobs: bytes


def forms(lists: Lists) -> dict[str, tuple]:
    """name: (encode, decode)"""
    encode, as_lists, as_bytes = (
        msgspec.msgpack.encode,
        msgspec.msgpack.Decoder(AsLists).decode,
        msgspec.msgpack.Decoder(AsBytes).decode,
    )

    def from_arrays(data, code):
        read, ids, logprobs = as_bytes(data), array("i"), array(code)
        ids.frombytes(read.ids)
        logprobs.frombytes(read.logprobs)
        return ids.tolist(), list(map(bool, read.mask)), logprobs.tolist()

    def of_arrays(code):
        ids, mask, logprobs = lists
        return encode(AsBytes(array("i", ids).tobytes(), bytes(mask), array(code, logprobs).tobytes()))

    def from_numpy(data, kind):
        read = as_bytes(data)
        types = ((read.ids, "<i4"), (read.mask, "?"), (read.logprobs, kind))
        return tuple(np.frombuffer(part, type_).tolist() for part, type_ in types)

    def of_numpy(kind):
        types = zip(lists, ("<i4", "?", kind), strict=True)
        return encode(AsBytes(*(np.array(part, dtype=type_).tobytes() for part, type_ in types)))

    def of_lists():
        return encode(AsLists(*lists))

    def from_lists(data):
        read = as_lists(data)
        return read.ids, read.mask, read.logprobs

    return {
        "MessagePack lists": (of_lists, from_lists),
        "`array`, float64": (lambda: of_arrays("d"), lambda data: from_arrays(data, "d")),
        "`array`, float32": (lambda: of_arrays("f"), lambda data: from_arrays(data, "f")),
        "numpy, float64": (lambda: of_numpy("<f8"), lambda data: from_numpy(data, "<f8")),
        "numpy, float32": (lambda: of_numpy("<f4"), lambda data: from_numpy(data, "<f4")),
    }


def microseconds(function, *arguments) -> float:
    """Of one call."""
    began = time.perf_counter()
    for _ in range(NUM_CALLS):
        function(*arguments)
    return (time.perf_counter() - began) / NUM_CALLS * 1e6


def main() -> None:
    """Measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    chance = random.Random(0)
    lists: Lists = (
        [chance.randrange(150_000) for _ in range(options.tokens)],
        [place > options.tokens // 5 for place in range(options.tokens)],
        [float(np.float32(-chance.expovariate(1.0))) for _ in range(options.tokens)],
    )
    found = forms(lists)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in found}
    for number in range(options.rounds):
        for name, (encode, decode) in found.items():
            data = encode()
            assert tuple(decode(data)) == lists
            times[name].append((microseconds(encode), microseconds(decode, data)))
        print(f"round {number + 1} of {options.rounds}", file=sys.stderr)
    print("| a sequence's arrays | encode, us | decode, us | bytes |\n|---|---|---|---|")
    for name, (encode, _) in found.items():
        columns = [
            f"{statistics.median(each):.0f} ({min(each):.0f} to {max(each):.0f})"
            for each in zip(*times[name], strict=True)
        ]
        print(f"| {name} | {columns[0]} | {columns[1]} | {len(encode()):,} |")


if __name__ == "__main__":
    main()
