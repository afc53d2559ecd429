"""How far does a reader walk through the files to follow one function? Counts it for a call that a test makes.

    .venv/bin/python dev/walk.py BatchTrainer.train tests/trainer/test_batch_trainer.py

A stay is a series of calls of functions of one file, while the function and all that it calls run; a room is a file; a
return is a stay in a room that was left before. The same functions called again by the same ones count once: a loop is
read once. Of all calls that the tests make, those with the most stays are printed.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

SOURCE = Path(__file__).resolve().parents[1] / "src" / "slipstream"


class Walk:
    """Records the files that one call of the function visits."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._within: FrameType | None = None
        self._steps: set[tuple[CodeType | None, CodeType]] = set()
        self._route: list[str] = []
        self.longest: list[str] = []

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        """The profiler's callback."""
        code = frame.f_code
        if event == "return" and frame is self._within:
            self._within = None
            self.longest = max(self.longest, self._route, key=len)
            return
        if event != "call" or not code.co_filename.startswith(str(SOURCE)) or code.co_name.startswith("<"):
            return
        if self._within is None:
            if code.co_qualname != self._name:
                return
            self._within, self._route = frame, []
            self._steps.clear()
        caller = frame.f_back.f_code if frame.f_back is not None else None
        room = str(Path(code.co_filename).relative_to(SOURCE))
        if (caller, code) in self._steps:
            return
        self._steps.add((caller, code))
        if not self._route or self._route[-1] != room:
            self._route.append(room)


def main(name: str, *tests: str) -> int:
    """Run the tests and print the figures; returns the exit code."""
    walk = Walk(name)
    sys.setprofile(walk)
    code = pytest.main(["-q", "-n", "0", "--no-header", "-p", "no:randomly", *tests])
    sys.setprofile(None)
    route = walk.longest
    print(f"{name}: {len(route)} stays, {len(set(route))} rooms, {len(route) - len(set(route))} returns")
    print(*route, sep="\n")
    return int(code) or (0 if route else 1)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
