"""A wheel, built from the source distribution, has all that its commands need: nothing of the clone is used."""

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from slipstream.runlog import read_metrics

ROOT = Path(__file__).parents[2]
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
BUILD = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
pytestmark = pytest.mark.full


def run(*command, cwd, **environment):
    """Run a command far from the clone: no path of it is in the environment."""
    own = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd, env={**own, **environment}, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built from a copy, since a build leaves files behind, and what an earlier one left would get into this one."""
    folder = tmp_path_factory.mktemp("build")
    clone = folder / "clone"
    clone.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, clone)
    shutil.copytree(ROOT / "src", clone / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    run(sys.executable, "-c", BUILD, folder, cwd=clone)
    (source,) = folder.glob("slipstream-*.tar.gz")
    run(*PIP, "wheel", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", folder, source, cwd=folder)
    (path,) = folder.glob("slipstream-*.whl")
    return path


def test_it_has_every_file_of_the_package(wheel):
    package = ROOT / "src"
    files = [path.relative_to(package).as_posix() for path in package.rglob("*") if path.is_file()]
    source = {name for name in files if "__pycache__/" not in name and ".egg-info/" not in name}
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
        (metadata,) = (archive.read(name).decode() for name in archive.namelist() if name.endswith("/METADATA"))
    assert packed == source
    assert {"slipstream/py.typed", "slipstream/report/page.css", "slipstream/report/page.js"} <= packed
    assert "License-File: LICENSE" in metadata


@pytest.mark.engine
def test_it_trains_outside_of_the_clone(wheel, tmp_path):
    """In an environment that sees the packages of this one, but not the clone that is installed there."""
    place, bin_folder = tmp_path / "elsewhere", tmp_path / "venv" / "bin"
    place.mkdir()
    run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv", cwd=tmp_path)
    python = bin_folder / "python"
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=place).strip())
    (site / "packages.pth").write_text(sysconfig.get_path("purelib"))
    run(*PIP, "--python", python, "install", "--quiet", "--no-deps", "--no-index", wheel, cwd=place)
    used = run(python, "-c", "import slipstream; print(slipstream.__file__)", cwd=place).strip()
    assert Path(used).is_relative_to(site)

    def slipstream(*arguments, cwd=place):
        return run(bin_folder / "slipstream", *arguments, cwd=cwd, OMP_NUM_THREADS="1")

    assert "slipstream train" in slipstream("--help")
    slipstream("init", "task")
    task = place / "task"
    slipstream("model", "new", "models/new", cwd=task)
    assert "derived settings" in slipstream("plan", "sft.toml", cwd=task)
    short = ("--training.steps", "12", "--evaluation.num_tasks", "20", "--run.threads", "1")
    slipstream("sft", "sft.toml", "--run.folder", "runs/sft", *short, cwd=task)
    assert [row["step"] for row in read_metrics(task / "runs/sft") if "eval/accuracy" in row] == [0, 12]
    slipstream("report", "runs/sft", cwd=task)
    assert "</html>" in (task / "report.html").read_text(encoding="utf-8")
