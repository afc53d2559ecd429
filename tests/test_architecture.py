"""Holds what the documents promise of the code's shape: who may import whom, and how long things are."""

import ast
import functools
import importlib
import re
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "slipstream"
FILES = sorted(SOURCE.rglob("*.py"))
MAX_MEDIAN_LINES = 200

LAYERS = {
    package: layer
    for layer, packages in enumerate(
        (
            ("records", "errors", "exports", "patience", "names", "progress", "processes", "regular_files"),
            ("engine_protocols", "config", "runlog", "nodes"),
            (
                "algo",
                "shared_kernels",
                "data",
                "transport",
                "sinks",
                "weights",
                "openai_client",
                "http_listener",
                "remote_files",
                "clusters",
            ),
            ("inference", "trainer", "envs"),
            ("orchestrator", "artifacts"),
            ("plan", "atropos", "plugins"),
            ("doctor",),
            ("launch",),
            ("commands",),
            ("report",),
            ("service",),
            ("cli", "view"),
            ("python", "__main__"),
        )
    )
    for package in packages
}
SAME_LAYER = {
    ("cli", "view"),
    ("records", "errors"),
    ("processes", "errors"),
    ("processes", "regular_files"),
}
"""Pairs of one layer in which the first may import the second."""
LIGHT_MODULES = (
    *("python", "records", "config", "runlog", "plan.derive"),
    *("launch.startup", "launch.parts.watchdog", "processes.exits", "cli", "report"),
)
LIGHT_PARTS = ("slipstream_matching.figures", "slipstream_matching.row_targets")
HEAVY_MODULES = ("torch", "transformers", "vllm")
PLUG_INS = {"slipstream_matching": {"cli", "report"}, "slipstream_preferences": set(), "slipstream_adapters": set()}
"""Each with the packages around the core that import it."""
PUBLIC = (
    *("slipstream.plugins", "slipstream.records", "slipstream.errors"),
    *("slipstream.envs", "slipstream.envs.hosted", "slipstream.envs.hosted.inside.host"),
)
"""A plug-in imports from these alone."""


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def package_of(path: Path) -> str:
    """The first name below `slipstream`; empty for the root package."""
    name = path.relative_to(SOURCE).parts[0].removesuffix(".py")
    return "" if name == "__init__" else name


def module_of(path: Path) -> str:
    parts = ("slipstream", *path.relative_to(SOURCE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """All statements below a node, at whatever depth; expressions hold none."""
    for name in ("body", "orelse", "finalbody", "handlers", "cases"):
        for child in getattr(node, name, ()):
            yield child
            yield from statements(child)


@functools.cache
def imports(path: Path) -> list[tuple[int, str]]:
    """(line, module) of every import in the file, those inside functions included, relative ones resolved."""
    found = []
    package = module_of(path).split(".")
    if path.name != "__init__.py":
        package = package[:-1]
    for node in statements(parsed(path)):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            found += [(node.lineno, f"{module}.{alias.name}") for alias in node.names]
    return found


def imported_packages(path: Path) -> list[tuple[int, str]]:
    """(line, package) of every import of this project's own packages."""
    split = [(line, name.split(".")) for line, name in imports(path)]
    return [(line, names[1]) for line, names in split if names[0] == "slipstream" and len(names) > 1]


def label(path: Path) -> str:
    return str(path.relative_to(SOURCE))


def upward_imports(path: Path) -> list[str]:
    """What a file imports against the layers."""
    own = package_of(path)
    if not own:
        when_asked_for = ("algo", "python", "records")
        others = [other for _, other in imported_packages(path) if other not in when_asked_for]
        return [f"{label(path)}: the root package imports nothing of the project" for _ in others]
    assert own in LAYERS, f"{own} has no layer: add it to LAYERS, and to the documents"
    return [
        f"{label(path)}:{line}: {own} (layer {LAYERS[own]}) imports {other} ({LAYERS[other]})"
        for line, other in imported_packages(path)
        if other != own and other in LAYERS and LAYERS[other] >= LAYERS[own] and (own, other) not in SAME_LAYER
    ]


def test_imports_go_downward():
    assert [error for path in FILES for error in upward_imports(path)] == []


def import_cycles(paths: list[Path]) -> list[set[str]]:
    """Groups of modules that import one another, directly or through others, at whatever place in the file."""
    modules = {module_of(path) for path in paths}
    imported: dict[str, set[str]] = {module_of(path): set() for path in paths}
    for path in paths:
        for _, name in imports(path):
            while name and name not in modules:  # a name out of a module
                name = name.rpartition(".")[0]
            imported[module_of(path)] |= {name} - {"", module_of(path)}
    reached = {module: set(names) for module, names in imported.items()}
    for middle in reached:  # Warshall's transitive closure
        for names in reached.values():
            if middle in names:
                names |= reached[middle]
    cycles = {frozenset(other for other in reached[module] if module in reached[other]) for module in reached}
    return [set(cycle) for cycle in cycles if cycle]


def test_no_modules_import_one_another():
    """Imports inside functions and under TYPE_CHECKING count."""
    assert import_cycles(FILES) == []


def test_the_package_imports_no_benchmark():
    benchmarks = {path.stem for path in (ROOT / "benchmarks").iterdir()} | {"benchmarks"}
    assert "weight_sync" in benchmarks
    found = [(label(path), name) for path in FILES for _, name in imports(path)]
    assert [(file, name) for file, name in found if name.split(".")[0] in benchmarks] == []


OUTSIDE = [path for folder in ("benchmarks", "dev", "examples", "scripts") for path in (ROOT / folder).rglob("*.py")]


@functools.cache
def names_in(module: str) -> set[str]:
    """What a module of ours has at its top, and a package in its folder; empty for other modules."""
    base = SOURCE.parent.joinpath(*module.split("."))
    file = base / "__init__.py" if base.is_dir() else base.with_suffix(".py")
    if not file.is_file():
        return set()
    found = {path.stem for path in base.iterdir()} if base.is_dir() else set()
    for node in ast.walk(parsed(file)):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef | ast.alias):
            found.add(getattr(node, "asname", None) or node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
    return found


@pytest.mark.parametrize("path", OUTSIDE, ids=lambda path: str(path.relative_to(ROOT)))
def test_names_that_programs_beside_the_package_use_are_there(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    modules, missing = {}, []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "slipstream":
            for alias in node.names:
                modules[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                missing += [] if alias.name in names_in(node.module) else [f"{node.module}.{alias.name}"]
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            known = names_in(modules.get(node.value.id, ""))
            missing += [ast.unparse(node)] if known and node.attr not in known else []
    assert missing == []


@pytest.mark.parametrize("plug_in", PLUG_INS)
def test_the_core_imports_nothing_of_a_plug_in(plug_in):
    found = {package_of(path) for path in FILES for _, name in imports(path) if name.split(".")[0] == plug_in}
    assert found == PLUG_INS[plug_in]


@pytest.mark.parametrize("plug_in", PLUG_INS)
def test_a_plug_in_imports_public_names_only(plug_in):
    found = []
    for path in sorted((SOURCE.parent / plug_in).rglob("*.py")):
        for node in ast.walk(parsed(path)):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            module = node.module if isinstance(node, ast.ImportFrom) else None
            assert not any(name.startswith("slipstream.") for name in names), path
            if module is None or module.split(".")[0] != "slipstream":
                continue
            public = getattr(importlib.import_module(module), "__all__", None)
            known = all(not name.startswith("_") and (public is None or name in public) for name in names)
            found += [(path.name, module, names)] * (module not in PUBLIC or not known)
    assert found == []


def test_trainer_inference_and_environments_do_not_know_each_other():
    apart = {"trainer", "inference", "envs"}
    for path in FILES:
        own = package_of(path)
        if own in apart:
            assert not {other for _, other in imported_packages(path)} & (apart - {own}), label(path)


def test_heavy_libraries_are_not_imported_early():
    program = (
        f"import importlib, sys\nfor name in {[*(f'slipstream.{each}' for each in LIGHT_MODULES), *LIGHT_PARTS]!r}:\n"
        f"    importlib.import_module(name)\n"
        f"    assert not set({HEAVY_MODULES!r}) & sys.modules.keys(), name"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr


STARTS = re.compile(
    r"\bPopen\(|create_subprocess_|os\.(fork|forkpty|posix_spawnp?|spawn\w+)\(|multiprocessing\.(Process|Pool|get_context)"
    r"|\bpopen\("
)
PACKS = re.compile(r"\.to_bytes\(|struct\.pack")
STARTERS = {
    "envs/rewards/sandbox.py": "programs of rewards, in a sandbox",
    "envs/rewards/sandbox_child.py": "the same, inside",
    "envs/scoring/worker.py": "a reward worker forks itself for each call under fresh_worker",
}
"""Modules outside `processes/` that start a process, and which one."""
PACKERS = {
    "envs/hosted/inside/host.py": "the framing once more, for interpreters without Slipstream",
    "envs/rewards/judges.py": "counters in shared memory",
    "inference/plugin/tools/call_records.py": "a hash's input",
    "trainer/checkpoints/manifest.py": "a hash's input",
    "weights/model_files.py": "the header of safetensors",
}
"""Modules outside `processes/channel.py` that turn numbers into bytes, and what for."""


@pytest.mark.parametrize(
    ("what", "home", "listed"), [(STARTS, "processes/", STARTERS), (PACKS, "processes/channel.py", PACKERS)]
)
def test_one_package_starts_processes_and_one_module_frames_messages(what, home, listed):
    found = {label(path) for path in FILES if what.search(path.read_text(encoding="utf-8"))}
    assert {name for name in found if not name.startswith(home)} == listed.keys()


def test_files_are_mostly_small():
    lengths = [len(path.read_text(encoding="utf-8").splitlines()) for path in FILES]
    assert statistics.median(lengths) < MAX_MEDIAN_LINES


def test_every_module_says_what_it_is():
    assert [label(path) for path in FILES if not ast.get_docstring(parsed(path))] == []


def test_every_folder_with_code_is_a_package():
    folders = {path.parent for path in FILES}
    assert [str(folder) for folder in folders if not (folder / "__init__.py").is_file()] == []


def test_nothing_is_left_for_later():
    marker = re.compile(r"\b(" + "TO" + "DO|FIX" + r"ME)\b")
    folders = (ROOT / name for name in ("src", "tests", "examples", "docs", "benchmarks"))
    files = [path for folder in folders for path in folder.rglob("*") if path.suffix in (".py", ".md", ".toml")]
    assert [str(path) for path in files if marker.search(path.read_text(encoding="utf-8"))] == []
