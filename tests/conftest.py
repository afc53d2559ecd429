"""Settings of all tests: which are run, and how their processes start."""

import gc
import os
import subprocess
import zlib
from fnmatch import fnmatch
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from slipstream.processes import launchers
from slipstream.trainer import garbage_collection

from .fork_server import VARIABLE, ForkServers, name_context, take_for_usual
from .seeing import seeing_servers, sees  # noqa: F401 (fixtures)

# Children look for modules of the tests (workers, ranks) here: they do not look in the current folder.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")]))
# On a GPU vLLM's attention is Triton's in float32, which multiplies in TF32 unless it is told not to.
os.environ.setdefault("TRITON_F32_DEFAULT", "ieee")

NUM_PARTS = 12
APART = ("cluster", "servers", "service")
"""Markers of tests that no other choice but `full` runs."""
CHOICES = ("quick", *(str(part) for part in range(NUM_PARTS)), "full", *APART)

# How long an example takes is a matter of the machine, and nothing that a test should fail for.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    name_context(item.nodeid)


def pytest_addoption(parser):
    parser.addoption(
        "--tests",
        choices=CHOICES,
        default="full",
        help="quick: without those marked full, cluster, servers or service; 0 to 11: with that part of the full ones; "
        "cluster, servers, service: those alone; full: all (default)",
    )


def pytest_itemcollected(item):
    if (rows := item.get_closest_marker("quick")) and not any(fnmatch(item.callspec.id, row) for row in rows.args):
        item.add_marker("full")


def part_of(item):
    """The part of the full tests that a test function is in; the same whatever others come or go."""
    name = f"{item.path.relative_to(item.config.rootpath).as_posix()}::{item.function.__name__}"
    return zlib.crc32(name.encode()) % NUM_PARTS


def pytest_collection_modifyitems(config, items):
    chosen = config.getoption("--tests")

    def is_chosen(item):
        marks = [name for name in APART if item.get_closest_marker(name)]
        if marks or chosen in APART:
            return chosen == "full" or chosen in marks
        return not item.get_closest_marker("full") or chosen in ("full", str(part_of(item)))

    left_out = [item for item in items if not is_chosen(item)]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in set(left_out)]


@pytest.fixture(scope="session", autouse=True)
def state_folder(tmp_path_factory):
    """Commands find no queue of the user's."""
    os.environ["SLIPSTREAM_STATE"] = str(tmp_path_factory.mktemp("state"))


@pytest.fixture(scope="session", autouse=True)
def fork_servers(tmp_path_factory):
    """Children are forked where they can be, which is not where there are GPUs; see `fork_server`."""
    if os.environ.get(VARIABLE) or Path("/dev/nvidiactl").exists():
        yield
        return
    take_for_usual(os.environ)  # for fixtures that start something before the first test
    with ForkServers(tmp_path_factory.mktemp("forks")).install():
        yield


@pytest.fixture(scope="module", autouse=True)
def small_heap():
    """Collections of garbage look at a module's own objects alone; otherwise they take a quarter of the time."""
    gc.collect()
    gc.freeze()


FREEZING = {name: getattr(garbage_collection, name) for name in ("freeze", "unfreeze")}


@pytest.fixture(scope="session", autouse=True)
def frozen_by_modules():
    """What a run in this process freezes would be all that it holds, for good."""
    with pytest.MonkeyPatch.context() as patch:
        for name in FREEZING:
            patch.setattr(garbage_collection, name, lambda: None)
        yield
    gc.unfreeze()


@pytest.fixture
def freezing(monkeypatch):
    """Runs freeze what they find, as users' do."""
    for name, function in FREEZING.items():
        monkeypatch.setattr(garbage_collection, name, function)


@pytest.fixture(autouse=True)
def starts(request, monkeypatch):
    """A test that is marked `real_start` starts its children as users do."""
    take_for_usual(os.environ)
    if request.node.get_closest_marker("real_start"):
        monkeypatch.setattr(launchers, "popen", subprocess.Popen)


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Makes a module of this source, with these entry points, one of an installed package for the test's duration."""

    def install(module, source, entry_points):
        (tmp_path / f"{module}.py").write_text(source)
        info = tmp_path / "theirs-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(entry_points)
        monkeypatch.syspath_prepend(str(tmp_path))

    return install
