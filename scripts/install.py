"""Makes `.venv` with everything that a development or quickstart machine needs; safe to run again.

    python3 scripts/install.py [--gpu] [--extras NAME,NAME]
    python3 scripts/install.py --for-tests

uv does the installing, because it can leave out packages that vLLM asks for and a CPU machine cannot have
(constraints/cpu-overrides.txt). torch's CPU build comes from pip's own `find-links`, where one is set up and has
it, and otherwise from PyTorch's CPU index, which uv knows by name. torchvision gets a folder of its own, for tests with
image models only, and so do the last TRL that had PPO and a verl, which tests read and nobody imports. verifiers, whose
dependencies are not vLLM's, gets virtual environments of its own for the tests: the last version of each interface; so
does atroposlib. The
tests of `slipstream report` need a Chromium, and the tests of jobs need Slurm: both come from Debian's or Ubuntu's
packages, if this user may install them. All are brought by `--for-tests`, which `make test` calls, and not by an
installation.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
OLDEST, NEWEST = (3, 11), (3, 13)
BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
BROWSER_PACKAGE = "chromium-headless-shell"
SLURM_PACKAGES = ("slurm-wlm", "munge")
BESIDE = VENV / "torchvision"
"""Where tests with image models find it; on no process's path otherwise, as not every torch can load its operators."""
REFERENCE = VENV / "reference"
"""Where the tests of PPO find TRL's, and those of validation verl's."""
VERIFIERS = VENV / "verifiers"
"""Where the tests of verifiers' environments find their interpreters, each in a folder of its version's name."""
ATROPOS = VENV / "atropos"
"""Where the tests of Atropos find an interpreter with atroposlib."""


def run(*command: str | Path) -> None:
    """Run a command and end with its exit code if it fails."""
    print("+", shlex.join(map(str, command)), flush=True)
    code = subprocess.call([str(part) for part in command], cwd=ROOT)
    if code:
        sys.exit(code)


def find_links() -> list[str]:
    """Folders and pages that pip looks into beside its index."""
    listed = subprocess.run([VENV / "bin/pip", "config", "list"], capture_output=True, text=True, check=True).stdout
    found: list[str] = []
    for line in listed.splitlines():
        key, _, value = line.partition("=")
        if key.endswith(".find-links"):
            found += value.strip("'\"").replace("\\n", " ").split()
    return list(dict.fromkeys(found))


def torch_source() -> list[str]:
    """uv's arguments that lead it to a CPU build of torch."""
    links = find_links()
    arguments = [argument for link in links for argument in ("--find-links", link)]
    has_wheel = any(Path(link).is_dir() and any(Path(link).glob("torch-*+cpu-*.whl")) for link in links)
    return arguments if has_wheel else [*arguments, "--torch-backend", "cpu"]


def install_beside(constraints: Path, folder: Path) -> None:
    """Make a virtual environment: some seconds and 350 to 750 MB."""
    if not (folder / "bin/python").exists():
        run(VENV / "bin/uv", "venv", "--quiet", "--python", VENV / "bin/python", folder)
    install = [VENV / "bin/uv", "pip", "install", "--quiet", "--python", folder / "bin/python"]
    # Compiled once here: an environment process starts in half the time.
    run(*install, "--compile-bytecode", "--requirement", constraints)


def install_environments() -> None:
    """Make the virtual environments of verifiers' and of Atropos' environments."""
    for constraints in sorted((ROOT / "constraints").glob("verifiers-*.txt")):
        install_beside(constraints, VERIFIERS / constraints.stem.removeprefix("verifiers-"))
    install_beside(ROOT / "constraints/atropos-0.4.txt", ATROPOS)


def install_browser() -> None:
    """Bring a headless Chromium, or say why not: only tests that open a report need it."""
    if os.environ.get("CHROMIUM") or any(map(shutil.which, BROWSERS)):
        return
    if reason := apt_install(BROWSER_PACKAGE):
        print(
            f"note: no Chromium ({reason}): tests that open a report in a browser are skipped; install one, or name it "
            "in CHROMIUM",
            flush=True,
        )


def install_slurm() -> None:
    """Bring Slurm, or say why not: only tests of jobs need it."""
    if shutil.which("slurmctld", path=f"{os.environ.get('PATH', '')}:/usr/local/sbin:/usr/sbin:/sbin"):
        return
    if reason := apt_install(*SLURM_PACKAGES):
        print(f"note: no Slurm ({reason}): tests of jobs are skipped", flush=True)


def apt_install(*packages: str) -> str:
    """Install Debian's or Ubuntu's packages; the reason if that is not possible."""
    may_ask = shutil.which("sudo") and subprocess.call(["sudo", "-n", "true"], stderr=subprocess.DEVNULL) == 0
    if shutil.which("apt-get") is None:
        return "there is no apt-get"
    if os.geteuid() != 0 and not may_ask:
        return "this user may not install packages"
    root = [] if os.geteuid() == 0 else ["sudo", "-n"]
    apt = [*root, "env", "DEBIAN_FRONTEND=noninteractive", "apt-get", "-qq"]
    install = [*apt, "install", "-y", "--no-install-recommends", *packages]
    for command in (install, [*apt, "update"], install):
        print("+", shlex.join(command), flush=True)
        code = subprocess.call(command, stdout=subprocess.DEVNULL, stdin=subprocess.DEVNULL)
        if command is install and code == 0:
            return ""
    return f"apt-get could not install {' and '.join(packages)}"


def main() -> None:
    """Create the environment and install into it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", action="store_true", help="vLLM's CUDA build instead of its CPU build")
    parser.add_argument("--extras", default="reasoning-gym,dev", help="further extras of pyproject.toml")
    parser.add_argument("--for-tests", action="store_true", help="only bring what tests need: Chromium, Slurm ...")
    options = parser.parse_args()
    if options.for_tests:
        install_browser()
        install_slurm()
        install_environments()
        return
    if not OLDEST <= sys.version_info[:2] <= NEWEST:
        sys.exit(
            f"Python {sys.version.split()[0]} is not supported: use 3.11 to 3.13, for example PYTHON=python3.12 make"
        )
    print(f"installing into {VENV.relative_to(ROOT)}: some minutes, and about 4 GB on the disk", flush=True)
    if not (VENV / "bin/python").exists():
        run(sys.executable, "-m", "venv", VENV)
    run(VENV / "bin/pip", "install", "--quiet", "--disable-pip-version-check", "uv>=0.9")
    kind = "gpu" if options.gpu else "cpu"
    bare = [VENV / "bin/uv", "pip", "install", "--quiet", "--python", VENV / "bin/python"]
    install = [*bare, "--constraint", f"constraints/{kind}.txt", *(torch_source() if kind == "cpu" else [])]
    extras = ",".join([kind, *filter(None, options.extras.split(","))])
    leave_out = ["--override", "constraints/cpu-overrides.txt"] if kind == "cpu" else []
    # Compiled once here, and not by the first import of every process that may not write there.
    run(*install, *leave_out, "--compile-bytecode", "--editable", f".[{extras}]")
    if kind == "cpu":
        run(*install, "--no-deps", "--target", BESIDE, "torchvision")
    if "dev" in options.extras.split(","):
        run(*bare, "--no-deps", "--target", REFERENCE, "trl==1.0.0", "verl==0.9.1")
    print("done; next: source .venv/bin/activate, then slipstream --help or docs/tutorial.md; or: make quickstart")


if __name__ == "__main__":
    main()
