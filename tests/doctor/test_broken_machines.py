"""Real faults of a machine: the command runs in namespaces, control groups and limits of its own."""

import contextlib
import json
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.nodes.networks import CAN_MAKE

GIB = 1 << 30
CLOCK = shutil.which("faketime")
GROUPS = Path("/sys/fs/cgroup")
LIMITS = {"NOFILE": 512, "NPROC": 500, "AS": 128 * GIB, "FSIZE": 4 * GIB}
SMI = """#!{python}
import sys
asked = " ".join(sys.argv[1:])
print("GPU-a, 81920, 61440, 580.1, 40, NVIDIA H100" if "query-gpu" in asked else "GPU-a, 7, 60000, python")
"""
FOUND = {
    "packages": ("fault", "rich is 0.1, and", "pip install 'rich"),
    "torch": ("warning", "a build for the CPU, and this machine has a GPU", "--gpu"),
    "GPUs": ("fault", "the driver (580.1) has 1 GPUs, and this torch is built for the CPU", "--gpu"),
    "two variables": ("warning", "CUDA_VISIBLE_DEVICES and ROCR_VISIBLE_DEVICES are both set", "unset ROCR"),
    "no such GPU": ("fault", "CUDA_VISIBLE_DEVICES = 7 names '7'", "name some of 0"),
    "compiler": ("fault", "no C compiler", "apt install gcc"),
    "open files": ("warning", "512 open files", "ulimit -n 4096"),
    "processes": ("warning", "500 processes", "ulimit -u 1024"),
    "address space": ("fault", "bytes of address space", "ulimit -v unlimited"),
    "size of files": ("fault", "4,294,967,296 bytes a file", "ulimit -f unlimited"),
    "temporary folder": ("fault", "longer than 59 bytes", "set TMPDIR to a shorter path"),
    "interfaces": ("fault", "SLIPSTREAM_INTERFACE = ib9 names no network interface", "unset SLIPSTREAM_INTERFACE"),
    "proxies": ("warning", "http_proxy is set", "export NO_PROXY"),
}
if CAN_MAKE:
    FOUND |= {
        "shared memory": ("fault", "/dev/shm has 0.06 GiB free", "--shm-size"),
        "network": ("fault", "no connection over 127.0.0.1", "ip link set lo up"),
    }
if CLOCK:
    FOUND |= {"clock": ("fault", "the clock says 2020-01-01", "timedatectl")}
if os.access(GROUPS / "memory", os.W_OK) and os.access(GROUPS / "cpu", os.W_OK):
    FOUND |= {
        "CPUs": ("warning", "cores are usable: trainer, engine and rewards share one", "--cpus"),
        "memory": ("fault", "of 2.0 GiB are free, and the smallest run takes 4 GiB", "--mem"),
    }


@contextlib.contextmanager
def control_groups():
    """Files of groups of version 1 with one core and 2 GiB; none where no group can be made."""
    name, made = f"slipstream-{os.getpid()}", []
    try:
        for group, settings in {
            "memory": {"memory.limit_in_bytes": 2 * GIB},
            "cpu": {"cpu.cfs_period_us": 100_000, "cpu.cfs_quota_us": 100_000},
        }.items():
            if "memory" in FOUND:
                (folder := GROUPS / group / name).mkdir()
                made.append(folder)
                for file, value in settings.items():
                    (folder / file).write_text(str(value))
        yield [folder / "cgroup.procs" for folder in made]
    finally:
        for folder in made:
            folder.rmdir()


@pytest.fixture(scope="module")
def broken(tmp_path_factory):
    """The findings on a machine with all of these faults, and the exit code."""
    folder = tmp_path_factory.mktemp("broken")
    (long := folder / ("x" * 60)).mkdir()
    (tools := folder / "tools").mkdir()
    (tools / "nvidia-smi").write_text(SMI.format(python=sys.executable))
    (tools / "nvidia-smi").chmod(0o755)
    (old := folder / "packages" / "rich-0.1.dist-info").mkdir(parents=True)
    (old / "METADATA").write_text("Metadata-Version: 2.1\nName: rich\nVersion: 0.1\n")
    environ = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(old.parent), os.environ["PYTHONPATH"]]),
        "CUDA_VISIBLE_DEVICES": "7",
        "ROCR_VISIBLE_DEVICES": "0",
        "SLIPSTREAM_INTERFACE": "ib9",
        "http_proxy": "http://127.0.0.1:9",
        "TMPDIR": str(long),
    }
    for name in ("no_proxy", "NO_PROXY", "CC", "SLIPSTREAM_GPUS_IN_USE"):
        environ.pop(name, None)
    script = f'{"mount -t tmpfs -o size=64m none /dev/shm && " * CAN_MAKE}PATH=$1 && shift && exec "$@"'
    command = ["sh", "-c", script, "sh", str(tools), sys.executable, "-m", "slipstream.cli", "doctor", "--json"]
    if CLOCK:
        command = ["faketime", "-f", "@2020-01-01 00:00:00", *command]
    if CAN_MAKE:  # a network without a loopback that is up
        command = ["unshare", "--net", "--mount", *command]
    with control_groups() as groups:

        def enter():
            for file in groups:
                file.write_text(str(os.getpid()))
            for name, most in LIMITS.items():
                resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (most, most))

        done = subprocess.run(
            command, env=environ, preexec_fn=enter, capture_output=True, text=True, timeout=300, check=False
        )
    assert done.stdout, done.stderr
    return json.loads(done.stdout)["findings"], done.returncode


@pytest.mark.parametrize("fault", FOUND)
def test_a_real_fault_is_named_with_its_remedy(broken, fault):
    verdict, reason, remedy = FOUND[fault]
    found, code = broken
    assert code == 2
    assert [each for each in found if reason in each["reason"]], found
    (each,) = (each for each in found if reason in each["reason"])
    assert (each["verdict"], remedy in each["remedy"]) == (verdict, True), each


def test_no_other_fault_is_named(broken):
    found, _ = broken
    assert len([each for each in found if each["verdict"] != "ok"]) == len(FOUND), found
