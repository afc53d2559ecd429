"""Every small defect of one module against some of its unit tests, in minutes. Prints those that no test finds.

    .venv/bin/python dev/module_defects.py src/slipstream/algo/balancing.py tests/algo/test_balancing.py
    .venv/bin/python dev/module_defects.py src/slipstream/trainer/packing.py --lines 100-200 tests/trainer

Defects are those of dev/defects.py. The tests are collected once; each defect meets them in a fork of that process, in
which the code of one function is another. What stands outside of functions (constants, fields, defaults of arguments)
is counted, not tried: dev/defects.py draws it, too. A defect that hangs is named and counts as found. Tests that fail
without a defect are named and left out. What survives is for a person to judge: some changes change nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import os
import select
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FunctionType

import pytest
from defects import IMPORTED, ROOT, changed, places

LEAVE = os._exit  # some tests put something else there
SLOWEST_S = 300
"""Of all tests together, without a defect."""


class ModuleDefects:
    """A pytest plugin that runs the tests once for each defect instead of once."""

    def __init__(self, path: Path, first: int, last: int) -> None:
        self.path, self.first, self.last = path, first, last
        self.pipe: int | None = None
        self.until_first_failure = False

    def pytest_report_teststatus(self) -> tuple[str, str, str]:
        """Nothing is printed about single tests."""
        return "", "", ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Tell the parent of this fork which tests fail."""
        if self.pipe is not None and report.failed:
            os.write(self.pipe, f"{report.nodeid}\n".encode())
            if self.until_first_failure:
                LEAVE(1)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Once without a defect, then once for each."""
        parts = self.path.relative_to(ROOT / "src").with_suffix("").parts
        importlib.import_module(".".join(parts).removesuffix(".__init__"))
        began = time.monotonic()
        failed, in_time = self._run(session.items, lambda: None, SLOWEST_S)
        took = time.monotonic() - began
        items = [item for item in session.items if item.nodeid not in failed]
        if not (in_time and items):
            pytest.exit(f"no test passes without a defect within {SLOWEST_S} s: name other tests", returncode=1)
        print(f"{len(items)} tests in {took:.1f} s", *(f"left out, as it fails: {name}" for name in failed), sep="\n")
        functions = _functions(str(self.path))
        self.until_first_failure, num_found, num_tried, num_others = True, 0, 0, 0
        for line, shown, codes in self._defects():
            swaps = [(function, code) for key, code in codes.items() for function in functions.get(key, [])]
            if not swaps:
                num_others += 1
                continue
            failed, in_time = self._run(items, lambda swaps=swaps: _swap(swaps), 5 + 4 * took)
            num_tried, num_found = num_tried + 1, num_found + bool(failed or not in_time)
            if not failed:
                print("survives" if in_time else "hangs", line, shown, flush=True)
        print(f"{num_found} of {num_tried} found; {num_others} that are not in a loaded function were not tried")
        return True

    def _defects(self) -> Iterator[tuple[int, str, dict[tuple[str, int], CodeType]]]:
        """(line, what it is, changed code by function) of each defect in the lines."""
        text = self.path.read_text()
        own = dict(_codes(compile(text, str(self.path), "exec")))
        for number, line, change in places(self.path):
            if self.first <= line <= self.last:
                new = changed(self.path, number)
                was, now = (each.splitlines()[line - 1].strip() for each in (text, new))
                others = dict(_codes(compile(new, str(self.path), "exec")))
                # A change may take lines away: functions are paired in their order.
                pairs = zip(own.items(), others.values(), strict=True)
                yield line, f"{change}: {was}  =>  {now}", {key: code for (key, old), code in pairs if old != code}

    def _run(self, items: list[pytest.Item], prepare: Callable[[], None], limit_s: float) -> tuple[list[str], bool]:
        """The tests that fail in a fork, and whether it ended in time."""
        reading, writing = os.pipe()
        folder = tempfile.mkdtemp(prefix="slipstream-defects-")
        if not (process := os.fork()):
            os.setsid()
            nothing = os.open(os.devnull, os.O_RDWR)
            os.dup2(nothing, 1)
            os.dup2(nothing, 2)
            self.pipe = writing
            items[0].config._tmp_path_factory._basetemp = Path(folder)  # type: ignore[attr-defined]
            try:
                prepare()
                for item, following in zip(items, [*items[1:], None], strict=True):
                    item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
                LEAVE(0)
            finally:
                LEAVE(1)
        os.close(writing)
        said, end, in_time = [b""], time.monotonic() + limit_s, False
        while select.select([reading], [], [], max(0.0, end - time.monotonic()))[0]:
            said.append(os.read(reading, 65536))
            if in_time := not said[-1]:
                break
        os.close(reading)
        for kill in (os.killpg, os.kill):  # its own children, and itself if it has no group yet
            with contextlib.suppress(ProcessLookupError):
                kill(process, signal.SIGKILL)
        _, status = os.waitpid(process, 0)
        shutil.rmtree(folder, ignore_errors=True)
        failed = b"".join(said).decode().splitlines()
        return failed or ["a fixture or a hook"] * (in_time and status != 0), in_time


def _codes(code: CodeType) -> Iterator[tuple[tuple[str, int], CodeType]]:
    """The outermost functions of a module, by name and first line."""
    for part in code.co_consts:
        if isinstance(part, CodeType):
            is_function = part.co_flags & 2  # inspect.CO_NEWLOCALS
            yield from [((part.co_qualname, part.co_firstlineno), part)] if is_function else _codes(part)


def _functions(file: str) -> dict[tuple[str, int], list[FunctionType]]:
    found: dict[tuple[str, int], list[FunctionType]] = {}
    for each in gc.get_objects():
        if isinstance(each, FunctionType) and each.__code__.co_filename == file:
            code = each.__code__
            found.setdefault((code.co_qualname, code.co_firstlineno), []).append(each)
    return found


def _swap(swaps: list[tuple[FunctionType, CodeType]]) -> None:
    for function, code in swaps:
        function.__code__ = code


def main() -> None:
    """Read the arguments, run pytest with the plugin."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("module", type=Path)
    parser.add_argument("tests", nargs="+")
    parser.add_argument("--lines", default="1-1000000", help="from-to")
    options = parser.parse_args()
    first, last = map(int, options.lines.split("-"))
    os.environ["OMP_NUM_THREADS"] = "1"  # a process with threads cannot be forked
    for name in IMPORTED:
        importlib.import_module(name)
    arguments = ["-q", "-p", "no:cacheprovider", "--numprocesses", "0", "--timeout", "0", *options.tests]
    sys.exit(pytest.main(arguments, plugins=[ModuleDefects(options.module.resolve(), first, last)]))


if __name__ == "__main__":
    main()
