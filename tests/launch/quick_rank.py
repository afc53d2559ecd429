"""A rank with another compiler than the one that takes minutes: for the tests of compiled layers over ranks.
`TEST_COMPILERS` in the environment names each rank's."""

import json
import os
import sys

from slipstream.launch.ranks import child
from slipstream.trainer.model import layers

VARIABLE = "TEST_COMPILERS"


def broken(*_):
    """A compiler that cannot."""
    raise RuntimeError("no C++ compiler\nhere")


def compiler(number):
    """What rank `number` compiles with."""
    name = json.loads(os.environ[VARIABLE])[number]
    return broken if name == "broken" else name


if __name__ == "__main__":
    with open(sys.argv[1]) as file:
        layers.COMPILER = compiler(json.load(file)["rank"])
    sys.exit(child.main(*sys.argv[1:]))
