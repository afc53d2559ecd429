"""Provoked faults: each is named with its remedy, and a healthy set-up has no finding."""

import importlib.metadata
import json
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from slipstream import doctor
from slipstream.commands.run_checks import check_run
from slipstream.doctor import gpus, host, packages
from slipstream.doctor.findings import Finding, exit_code
from slipstream.doctor.gpus import TorchView
from slipstream.errors import ConfigError
from slipstream.plan.facts import EngineFacts

GIB = 1 << 30
CARD = {"uuid": "GPU-a", "total_mib": 80_000, "used_mib": 10, "driver": 580, "name": "H100", "processes": []}
BUSY = CARD | {"used_mib": 60_000, "processes": ["python (process 7, 58 GiB)"]}
H100 = ("H100", 9, 80 * GIB, "GPU-a")


def versions(**other):
    def version_of(name):
        if name in other and other[name] is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return other.get(name) or "9"

    return version_of


def refused():
    raise ConfigError("torchvision 1 cannot be loaded beside torch 2+cpu")


def view(**facts):
    return lambda: TorchView(**({"cuda": "12.9", "gpus": [H100]} | facts))


def disk(free, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free, total=100 * GIB))


NO_LIMITS = dict.fromkeys(("NOFILE", "NPROC", "AS", "FSIZE"), resource.RLIM_INFINITY)
NEEDS = ("numpy>=1", "pyarrow>=2; extra == 'data'", "pywin32>=1; sys_platform == 'win32'")
FAULTS = {
    "windows": (lambda: host.check_system("win32"), "fault", "win32", "Linux"),
    "power": (lambda: host.check_system(machine="ppc64le"), "warning", "ppc64le", "x86-64"),
    "one core": (lambda: host.check_cpus(1, 64), "warning", "1 of 64 cores", "--cpus"),
    "memory of a group": (lambda: host.check_memory(2 * GIB), "fault", "smallest run takes 4 GiB", "--mem"),
    "open files": (lambda: host.check_limits(NO_LIMITS | {"NOFILE": 256}),
        "warning", "256 open files", "ulimit -n 4096"),
    "processes": (lambda: host.check_limits(NO_LIMITS | {"NPROC": 100}), "warning", "100 processes", "ulimit -u 1024"),
    "address space": (lambda: host.check_limits(NO_LIMITS | {"AS": GIB}),
        "fault", "address space", "ulimit -v unlimited"),
    "size of files": (lambda: host.check_limits(NO_LIMITS | {"FSIZE": 9}),
        "fault", "9 bytes a file", "ulimit -f unlimited"),
    "no shared memory": (lambda: host.check_shared_memory(Path("/nowhere")), "fault", "/nowhere is missing", "tmpfs"),
    "no temporary folder": (lambda: host.check_temporary_folder(Path("/proc")),
        "fault", "nothing can be written", "TMPDIR"),
    "no loopback": (lambda: host.check_network("192.0.2.1"),
        "fault", "no connection over 192.0.2.1", "ip link set lo up"),
    "no name": (lambda: host.check_network(name="no.such.name.invalid"), "warning", "no.such.name", "/etc/hosts"),
    "proxy": (lambda: host.check_proxies({"http_proxy": "http://p", "no_proxy": "a"}),
        "warning", "http_proxy", "NO_PROXY="),
    "clock": (lambda: host.check_clock(0.0), "fault", "1970-01-01", "timedatectl"),
    "missing package": (lambda: packages.check_packages(NEEDS, versions(numpy=None)),
        "fault", "numpy is missing", "pip install 'numpy>=1'"),
    "old package": (lambda: packages.check_packages(NEEDS, versions(numpy="0.9")),
        "fault", "numpy is 0.9", "pip install 'numpy>=1'"),
    "old extra": (lambda: packages.check_packages(NEEDS, versions(pyarrow="1.0")),
        "warning", "pyarrow is 1.0", "pyarrow>=2"),
    "no vLLM": (lambda: packages.check_vllm(lambda: None), "fault", "not installed", "install.py"),
    "other vLLM": (lambda: packages.check_vllm(lambda: EngineFacts("0.99", unchecked=("plain_steps",))),
        "warning", "vLLM 0.99 differs", "docs/vllm.md"),
    "builds of torch": (lambda: packages.check_torch(check_builds=refused), "fault", "torchvision", "one build"),
    "torch for the CPU beside a GPU": (lambda: gpus.check_gpus(lambda: [CARD], view(cuda="", gpus=[])),
        "fault", "built for the CPU", "--gpu"),
    "old driver": (lambda: gpus.check_gpus(lambda: [CARD], view(gpus=[], error="driver is too old")),
        "fault", "too old", "driver"),
    "GPU that is not ready": (lambda: gpus.check_gpus(lambda: [CARD], view(gpus=[], error="no answer within 120 s")),
        "fault", "not ready", "dmesg"),
    "busy GPU": (lambda: gpus.check_gpus(lambda: [BUSY], view()), "warning", "process 7", "CUDA_VISIBLE_DEVICES"),
    "slice": (lambda: gpus.check_gpus(lambda: [CARD], view(gpus=[("H100 MIG 1g.10gb", 9, 10 * GIB, "GPU-a")])),
        "warning", "slice", "one slice"),
    "no bfloat16": (lambda: gpus.check_gpus(lambda: [CARD], view(gpus=[("T4", 7, 15 * GIB, "GPU-a")])),
        "warning", "no bfloat16", "capability"),
    "torch that cannot be imported": (lambda: gpus.check_gpus(list, view(cuda="", gpus=[], error="OSError: libcudart")),
        "fault", "libcudart", "import torch"),
    "two variables": (
        lambda: gpus.check_visible({"CUDA_VISIBLE_DEVICES": "0", "ROCR_VISIBLE_DEVICES": "0"}, lambda: [CARD]),
        "warning", "ROCR_VISIBLE_DEVICES", "unset ROCR"),
    "no such GPU": (
        lambda: gpus.check_visible({"CUDA_VISIBLE_DEVICES": "0,4"}, lambda: [CARD, CARD | {"uuid": "GPU-b"}]),
        "fault", "'4'", "0, 1"),
    "a GPU twice": (
        lambda: gpus.check_visible({"CUDA_VISIBLE_DEVICES": "1,1"}, lambda: [CARD, CARD | {"uuid": "GPU-b"}]),
        "fault", "twice", "0, 1"),
    "no compiler": (lambda: gpus.check_compiler(lambda: True, lambda _: None),
        "fault", "no C compiler", "apt install gcc"),
    "no run file": (lambda: check_run(Path("nowhere.toml")), "fault", "nowhere.toml", ""),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named_with_its_remedy(name):
    provoke, verdict, reason, remedy = FAULTS[name]
    (found,) = provoke()
    assert (found.verdict, reason in found.reason, remedy in found.remedy) == (verdict, True, True), found


def test_faults_of_folders_and_memory(tmp_path, monkeypatch):
    (found,) = host.check_memory(8 * GIB, GIB)
    assert (found.verdict, "1.0 GiB of 8.0 GiB" in found.reason) == ("warning", True)
    long = tmp_path / ("x" * 60)
    long.mkdir()
    (found,) = host.check_temporary_folder(long)
    assert (found.verdict, "Unix sockets" in found.reason) == ("fault", True)
    disk(0, monkeypatch)
    assert [each.verdict for each in host.check_temporary_folder(Path("/tmp"))] == ["warning"]
    assert [each.verdict for each in host.check_shared_memory(tmp_path)] == ["fault"]


def test_healthy_facts_have_no_finding():
    healthy = [
        *packages.check_packages(NEEDS, versions(pyarrow=None)),
        *packages.check_vllm(lambda: EngineFacts("0.32.0")),
        *gpus.check_gpus(lambda: [CARD, BUSY | {"uuid": "GPU-hidden"}], view()),
        *gpus.check_gpus(lambda: [CARD | {"used_mib": "[N/A]"}], view()),
        *gpus.check_visible({"CUDA_VISIBLE_DEVICES": "-1"}, lambda: [CARD]),
        *gpus.check_visible({"CUDA_VISIBLE_DEVICES": "GPU-a"}, lambda: [CARD]),
        *gpus.check_compiler(lambda: True, lambda name: name),
        *host.check_cpus(2, 2),
        *host.check_memory(8 * GIB, 6 * GIB),
        *host.check_limits(NO_LIMITS),
        *host.check_proxies({"http_proxy": "http://p", "NO_PROXY": "localhost"}),
    ]
    assert {each.verdict for each in healthy} == {"ok"}


def test_gpus_that_a_variable_hides_are_no_fault(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    (found,) = gpus.check_gpus(lambda: [CARD], view(gpus=[]))
    assert (found.verdict, "hides them" in found.reason) == ("ok", True)


def test_each_wrong_setting_is_a_finding(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text('[model]\npath = "m"\n[algorithm]\nkind = "sft"\n[data]\npath = "d"\n')
    found = list(check_run(file, ["--training.steps", "0", "--training.learning_rate", "-1"]))
    assert [(each.verdict, each.reason.partition(" ")[0]) for each in found] == [
        ("fault", "training.steps"),
        ("fault", "training.learning_rate"),
    ]


def test_a_check_that_fails_is_a_finding_and_the_others_go_on():
    def check_something():
        yield Finding("first", "ok", "")
        raise KeyError("apple")

    found = list(doctor.examine([check_something, lambda: [Finding("last", "warning", "")]]))
    assert [(each.check, each.verdict) for each in found] == [
        ("first", "ok"),
        ("something", "fault"),
        ("last", "warning"),
    ]
    assert "apple" in found[1].reason
    assert exit_code(found) == 2


def test_a_gpu_that_does_not_answer_is_awaited_for_a_time():
    assert "no answer" in gpus.ask_torch(timeout_s=0.01).error


def test_a_real_machine_whose_process_has_few_files_and_a_proxy():
    environ = os.environ | {"http_proxy": "http://127.0.0.1:9", "no_proxy": "", "NO_PROXY": ""}

    def limit():
        resource.setrlimit(resource.RLIMIT_NOFILE, (512, 512))

    command = [sys.executable, "-m", "slipstream.cli", "doctor", "--json"]
    done = subprocess.run(command, env=environ, preexec_fn=limit, capture_output=True, text=True, timeout=300)
    found = json.loads(done.stdout)
    assert (done.returncode, found["exit_code"]) == (1, 1), done.stdout + done.stderr
    assert {each["check"] for each in found["findings"] if each["verdict"] != "ok"} == {"limits", "proxies"}


@pytest.mark.full
def test_a_run_file_is_planned(tmp_path):
    for arguments in (["init", "first"], ["model", "new", "first/models/new"]):
        command = [sys.executable, "-m", "slipstream.cli", *arguments]
        subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, timeout=300)
    file = tmp_path / "first" / "sft.toml"
    found = [(each.check, each.verdict) for each in check_run(file)]
    assert found == [("run sft.toml", "ok"), ("rewards", "ok")]
    (found,) = check_run(file, ["--training.learning_rate", "-1"])
    assert (found.verdict, "learning_rate" in found.reason) == ("fault", True)
