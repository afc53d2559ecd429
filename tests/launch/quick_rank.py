"""A rank whose compiler is a quick one, or, if the environment says so, broken on some ranks: for the tests of compiled
layers over ranks, which would otherwise wait for a C++ compiler."""

import json
import os
import sys

from slipstream.launch import rank
from slipstream.trainer import layers

COMPILER = "aot_eager"


def broken(*_):
    """A compiler that cannot."""
    raise RuntimeError("no C++ compiler\nhere")


if __name__ == "__main__":
    with open(sys.argv[1]) as file:
        number = json.load(file)["rank"]
    broken_ranks = json.loads(os.environ.get("TEST_BROKEN_RANKS", "[]"))
    layers.COMPILER = broken if number in broken_ranks else COMPILER
    sys.exit(rank.main(*sys.argv[1:]))
