"""Faults of GPUs by a scripted driver: an nvidia-smi in PATH, and a torch in PYTHONPATH."""

import json
import os
import sys

import pytest

from slipstream.doctor import gpus
from slipstream.doctor.gpus import TorchView
from slipstream.plan.machine import IN_USE

STATE = "GPU-a, 81920, 10, 580.1, 40, NVIDIA H100"
LOST = "Unable to determine the device handle for GPU0000:3B:00.0: GPU is lost. Reboot the system"
SMI = """#!{python}
import json, sys
asked = " ".join(sys.argv[1:])
text, code = next((answer for part, answer in json.loads({answers!r}).items() if part in asked), ("", 0))
print(text)
sys.exit(code)
"""
TORCH = """
from pathlib import Path
from types import SimpleNamespace
version = SimpleNamespace(cuda="13.0", hip=None)
def zeros(*shape, device):
    number = len(list(Path({folder!r}).glob("asked-*")))
    (Path({folder!r}) / f"asked-{{number}}").touch()
    if number < {ready_after}:
        raise RuntimeError("CUDA error: system not yet initialized")
    return SimpleNamespace(add_=lambda _: SimpleNamespace(item=lambda: 1))
facts = SimpleNamespace(name="H100", major=9, total_memory=80 << 30, uuid="a")
cuda = SimpleNamespace(device_count=lambda: 1, get_device_properties=lambda _: facts)
"""


@pytest.fixture
def smi(tmp_path, monkeypatch):
    """Puts an nvidia-smi in PATH. It has an answer and exit code for a part of its command line."""
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def write(**answers):
        program = tmp_path / "nvidia-smi"
        program.write_text(SMI.format(python=sys.executable, answers=json.dumps(answers)))
        program.chmod(0o755)
        monkeypatch.delenv(IN_USE, raising=False)

    yield write
    os.environ.pop(IN_USE, None)


def no_gpus():
    return TorchView(cuda="13.0")


def test_slices_are_on_and_there_are_none(smi):
    smi(**{"query-gpu=mig": ("Enabled", 0), "query-gpu=uuid": (STATE, 0), "-L": ("GPU 0: H100 (UUID: GPU-a)", 0)})
    (found,) = gpus.check_gpus(torch_view=no_gpus)
    assert (found.verdict, "no slices" in found.reason) == ("fault", True), found
    assert "nvidia-smi mig -cgi" in found.remedy


def test_a_chosen_slice_is_not_there(smi):
    slices = "GPU 0: H100 (UUID: GPU-a)\n  MIG 1g.10gb Device 0: (UUID: MIG-b)"
    smi(**{"query-gpu=uuid": (STATE, 0), "-L": (slices, 0)})
    (found,) = gpus.check_visible({"CUDA_VISIBLE_DEVICES": "MIG-c"})
    assert (found.verdict, "'MIG-c', not a GPU of the 1 here" in found.reason) == ("fault", True), found
    assert found.remedy == "name some of 0, MIG-b"
    assert [*gpus.check_visible({"CUDA_VISIBLE_DEVICES": "MIG-b"})] == []


def test_a_gpu_is_lost(smi):
    smi(**{"": (LOST, 15)})
    (found,) = gpus.check_gpus(torch_view=no_gpus)
    assert (found.verdict, LOST in found.reason, "restart the machine" in found.remedy) == ("fault", True, True), found


def test_nvidia_smi_fails_beside_a_gpu_that_computes(smi):
    smi(**{"": (LOST, 15)})
    (found,) = gpus.check_gpus(torch_view=lambda: TorchView("13.0", gpus=[("H100", 9, 80 << 30, "GPU-a")]))
    assert (found.verdict, LOST in found.reason, "memory held by others" in found.remedy) == ("warning", True, True)


@pytest.mark.real_start
@pytest.mark.parametrize("ready_after", [2, 1000])
def test_a_gpu_that_is_not_ready_is_awaited_for_a_time(ready_after, smi, tmp_path, monkeypatch):
    smi(**{"query-gpu=uuid": (STATE, 0)})
    (folder := tmp_path / "packages" / "torch").mkdir(parents=True)
    (folder / "__init__.py").write_text(TORCH.format(folder=str(tmp_path), ready_after=ready_after))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder.parent), os.environ["PYTHONPATH"]]))
    within_s = 60.0 if ready_after == 2 else 5.0
    (found,) = gpus.check_gpus(torch_view=lambda: gpus.ask_torch(timeout_s=within_s, pause_s=0.1))
    assert len([*tmp_path.glob("asked-*")]) >= 2
    if ready_after == 2:
        assert found.verdict == "ok"
        return
    assert (found.verdict, "not ready" in found.reason) == ("fault", True), found
    assert "nvidia-fabricmanager" in found.remedy
