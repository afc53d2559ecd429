"""How many of some defects do the tests find? Draws defects with a seed, puts each into a copy of the tree, runs tests.

    make coverage TESTS=quick
    .venv/bin/python dev/defects.py --seed 7 --num 60 --out defects.json

A defect is one small change of one expression or statement in `PACKAGES`: a comparison, an operator, a constant, a
condition, an argument or a call that is left out. It meets the tests of `--tests` that run its line, by the coverage
that `make coverage` has left, those without an engine first, until one fails. A line that is run while a module is
imported meets those that run any line of its module, and then all of `--tests`; a line that no test runs meets none.
`--at-once` defects are tried side by side, each with one test at a time. What survives is for a person to judge: some
changes change nothing, or nothing without a GPU. dev/module_defects.py tries all defects of a module on its unit tests.
"""

from __future__ import annotations

import argparse
import ast
import copy
import functools
import json
import multiprocessing
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

import coverage
import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "slipstream"
PACKAGES = ("algo", "trainer", "weights", "orchestrator", "inference/plugin")
COMPARISONS = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
OPERATORS = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Mod: ast.Mult,
    ast.BitOr: ast.BitAnd, ast.BitAnd: ast.BitOr,
}  # fmt: skip
SLOW = ("tests/engine/", "tests/system/", "tests/launch/")
GUARDS = ("strict", "frozen", "slots", "kw_only")
"""Arguments that only refuse what no program does."""
TEST_LIMIT_S = 240
NO_TESTS_RAN, WRONG_USE = 5, 4
FORKS = multiprocessing.get_context("forkserver")
IMPORTED = [
    *("hypothesis", "torch._dynamo", "torch.distributed.nn", "torch.distributed.tensor", "torch.testing"),
    *("transformers.modeling_utils", "peft"),
]
"""Imported once, not in each fork."""


def changes(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """What may stand in the place of a node, and the change's name."""
    other = copy.deepcopy(node)
    match node:
        case ast.Compare() if type(node.ops[0]) in COMPARISONS:
            other.ops[0] = COMPARISONS[type(node.ops[0])]()
            yield "comparison", other
        case ast.BinOp() if type(node.op) in OPERATORS:
            other.op = OPERATORS[type(node.op)]()
            yield "operator", other
        case ast.AugAssign() if type(node.op) in OPERATORS:
            other.op = OPERATORS[type(node.op)]()
            yield "operator", other
        case ast.BoolOp():
            other.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
            yield "and, or", other
        case ast.UnaryOp(op=ast.Not() | ast.USub()):
            yield "sign", copy.deepcopy(node.operand)
        case ast.IfExp():
            other.body, other.orelse = other.orelse, other.body
            yield "branches", other
        case ast.If():
            other.test = ast.UnaryOp(ast.Not(), other.test)
            yield "condition", other
        case ast.Constant(value=bool()):
            other.value = not node.value
            yield "constant", other
        case ast.Constant(value=int() | float()):
            other.value = node.value + 1
            yield "constant", other
        case ast.Expr(value=ast.Call() | ast.Await()):
            yield "call left out", ast.Pass()
        case ast.Call() if node.keywords and node.keywords[-1].arg not in (None, *GUARDS):
            other.keywords.pop()
            yield "argument left out", other
        case ast.Return() if node.value is not None and not isinstance(node.value, ast.Constant):
            other.value = ast.Constant(None)
            yield "result", other
        case ast.Break():
            yield "break", ast.Continue()
        case ast.Continue():
            yield "continue", ast.Break()


def places(path: Path) -> list[tuple[int, int, str]]:
    """(number of the node, line, change) of every possible defect."""
    tree = ast.parse(path.read_text())
    hidden = {id(part) for node in ast.walk(tree) for part in _no_behaviour(node)}
    return [
        (number, node.lineno, name)
        for number, node in enumerate(ast.walk(tree))
        if id(node) not in hidden
        for name, _ in changes(node)
    ]


def _no_behaviour(node: ast.AST) -> Iterator[ast.AST]:
    """Annotations, what is raised and said, guards, and what only a type checker reads."""
    match node:
        case ast.keyword(arg=str() as name) if name in GUARDS:
            yield from ast.walk(node)
        case ast.arg(annotation=ast.AST() as part) | ast.AnnAssign(annotation=part):
            yield from ast.walk(part)
        case ast.Raise() | ast.Assert() | ast.JoinedStr():
            yield from ast.walk(node)
        case ast.FunctionDef(returns=ast.AST() as part) | ast.AsyncFunctionDef(returns=ast.AST() as part):
            yield from ast.walk(part)
        case ast.If(test=ast.Name(id="TYPE_CHECKING")):
            yield from ast.walk(node)


def changed(path: Path, number: int) -> str:
    """The file with that defect."""
    text = path.read_text()
    tree = ast.parse(text)
    node = list(ast.walk(tree))[number]
    ((_, other),) = changes(node)
    lines = text.encode().splitlines(keepends=True)
    before = b"".join(lines[: node.lineno - 1]) + lines[node.lineno - 1][: node.col_offset]
    after = lines[node.end_lineno - 1][node.end_col_offset :] + b"".join(lines[node.end_lineno :])
    new = ast.unparse(ast.fix_missing_locations(other))
    if isinstance(node, ast.stmt):
        new = new.replace("\n", "\n" + " " * node.col_offset)
    elif not isinstance(node, ast.Constant):
        new = f"({new})"
    return (before + new.encode() + after).decode()


def run_tests(tree: Path, names: list[str], options: argparse.Namespace) -> str | None:
    """What the first test that failed said; None when none did. One that hangs fails by itself.

    Raises TimeoutError after `--limit` seconds.
    """
    arguments = ["-q", "-x", "--tests", options.tests, "-p", "no:cacheprovider"]
    arguments += ["--numprocesses", "0", "--timeout", str(TEST_LIMIT_S), *names]
    printed = tree.parent / "printed"
    process = FORKS.Process(target=_pytest, args=(tree, arguments, printed))
    process.start()
    process.join(options.limit)
    if process.is_alive():
        process.terminate()
        process.join(60)
        process.kill()  # a defect may keep it from ending
        raise TimeoutError
    out = printed.read_text(errors="replace")
    if process.exitcode in (0, NO_TESTS_RAN):
        return None
    if process.exitcode == WRONG_USE and "while loading conftest" not in out:
        sys.exit(f"pytest does not know these tests, so measure the coverage again: {out[-2000:]}")
    said = [line for line in out.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return (said or out.splitlines()[-1:] or [f"exit {process.exitcode}"])[0]


def _pytest(tree: Path, arguments: list[str], printed: Path) -> None:
    """pytest in a fork of a process that has imported what takes long, and nothing of Slipstream."""
    os.setsid()
    descriptor = os.open(printed, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.chdir(tree)
    sys.path[:0] = [str(tree), str(tree / "src")]
    os.environ["PYTHONPATH"] = str(tree / "src")
    sys.exit(pytest.main(arguments))


def main() -> None:
    """Draw, run, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--num", type=int, default=60)
    parser.add_argument("--coverage", type=Path, default=ROOT / ".coverage" / "data")
    parser.add_argument("--tests", default="quick")
    parser.add_argument("--at-once", type=int, default=2)
    parser.add_argument(
        "--limit", type=float, default=1200, help="seconds for the tests without an engine, and for the others"
    )
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # others run beside it
    FORKS.set_forkserver_preload(IMPORTED)
    data = coverage.CoverageData(str(options.coverage))
    data.read()
    measured = {Path(file): data.contexts_by_lineno(file) for file in data.measured_files()}
    candidates = []
    for package in PACKAGES:
        for path in sorted((SOURCE / package).rglob("*.py")):
            candidates += [(path, *place) for place in places(path)]
    drawn = random.Random(options.seed).sample(candidates, min(options.num, len(candidates)))
    print(f"{len(candidates)} possible defects, {len(drawn)} drawn", flush=True)
    rows: dict[str, dict] = json.loads(options.out.read_text()) if options.out.exists() else {}
    left = [(str(key), place) for key, place in enumerate(drawn) if str(key) not in rows]
    with ThreadPoolExecutor(options.at_once) as threads:
        running = {threads.submit(_try, *place, measured.get(place[0], {}), options): key for key, place in left}
        for done in as_completed(running):
            rows[running[done]] = done.result()
            options.out.write_text(json.dumps(rows, indent=1))
            print(len(rows), json.dumps(done.result()), flush=True)
    found = sum(row["found"] for row in rows.values())
    print(f"{found} of {len(rows)} found")


def _try(
    path: Path, number: int, line: int, change: str, measured: dict[int, list[str]], options: argparse.Namespace
) -> dict:
    name, began = str(path.relative_to(ROOT)), time.monotonic()
    old, new = path.read_text(), changed(path, number)
    shown = [text.splitlines()[line - 1].strip() for text in (old, new)]
    contexts = measured.get(line, [])
    covering = _tests_of(contexts)
    of_module = _tests_of(context for each in measured.values() for context in each)
    near = covering or (of_module if contexts else [])
    stages = [_tests_of(near, [slow]) for slow in (False, True)]
    if not covering and contexts:
        files = {path.relative_to(ROOT).parts[:2] for path in (ROOT / "tests").rglob("test_*.py")}
        folders = ["/".join(parts) + "/" * (not parts[1].endswith(".py")) for parts in sorted(files)]
        stages += [[folder for folder in folders if folder.startswith(SLOW) == slow] for slow in (False, True)]
    said, num_tests, late = None, "all" if not covering and contexts else len(covering), False
    with tempfile.TemporaryDirectory(prefix="slipstream-defect-") as folder:
        tree = Path(folder) / "tree"
        ignored = shutil.ignore_patterns(".git", ".venv", ".coverage", "runs", "models", "__pycache__")
        shutil.copytree(ROOT, tree, ignore=ignored)
        (tree / ".venv").symlink_to(ROOT / ".venv")
        (tree / name).write_text(new)
        for tests in stages:
            if said is None and tests:
                try:
                    said = run_tests(tree, tests, options)
                except TimeoutError:
                    late = True
    return {
        "file": name, "line": line, "change": change, "was": shown[0], "is": shown[1], "found": said is not None,
        "by": said, "late": late, "tests": num_tests, "seconds": round(time.monotonic() - began),
    }  # fmt: skip


def _tests_of(contexts: Iterable[str], slow: Sequence[bool] = (False, True)) -> list[str]:
    """The tests in the order in which their files have them: some go on with the engine of the test before."""
    tests = {context.partition("[")[0] for context in contexts if context}
    return sorted((test for test in tests if test.startswith(SLOW) in slow), key=_place)


@functools.cache
def _place(test: str) -> tuple[str, int]:
    file, *_, name = test.split("::")
    return file, _text(file).find(f"def {name}(")


@functools.cache
def _text(file: str) -> str:
    return (ROOT / file).read_text()


if __name__ == "__main__":
    main()
