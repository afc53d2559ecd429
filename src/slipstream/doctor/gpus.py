"""Checks of the GPUs: driver, torch's view of them, memory held by others, slices, variables to hide them."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slipstream.config.bounds import GIB
from slipstream.doctor.findings import Finding
from slipstream.plan.machine import gpus_at_start, list_gpus, query_gpus
from slipstream.plan.memory.cards import HAS_BFLOAT16, SAFE_HELD
from slipstream.processes.exits import last_error
from slipstream.processes.launchers import LOCAL
from slipstream.processes.temporary import temporary

_VISIBLE = "CUDA_VISIBLE_DEVICES"
_DRIVER = "/dev/nvidiactl"
_OTHERS = ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL")
_HIDDEN = ("", "-1")
_READY_S = 120.0
"""A GPU may take so long after a boot or a reset, and importing torch from a network's disk as well."""
_NOT_YET = ("not yet initialized", "busy or unavailable")
"""CUDA's errors 802, until the fabric manager of NVSwitches has started, and 46."""
_PAUSE_S = 5.0


@dataclass(frozen=True)
class TorchView:
    """The GPUs as torch sees and uses them."""

    cuda: str = ""
    hip: str = ""
    gpus: Sequence[tuple[str, int, int, str]] = ()
    """Name, major compute capability, bytes, UUID."""
    error: str = ""


def ask_torch(timeout_s: float = _READY_S, pause_s: float = _PAUSE_S) -> TorchView:
    """Use each visible GPU, and await those that are not ready."""
    deadline = time.monotonic() + timeout_s
    while True:
        found = _ask_once(timeout_s)
        if not any(text in found.error for text in _NOT_YET) or time.monotonic() + pause_s > deadline:
            return found
        time.sleep(pause_s)


def _ask_once(timeout_s: float) -> TorchView:
    """Use each visible GPU in another process, with a deadline."""
    with temporary("doctor") as folder:
        log = folder / "log"
        process = LOCAL.launch("slipstream.doctor.torch_trial", output=log)
        try:
            code = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return TorchView(error=f"no answer within {timeout_s:.0f} s")
        finally:
            process.end(0.0)
        if code:
            return TorchView(error=last_error(log) or f"exit code {code}")
        found: dict[str, Any] = json.loads(log.read_text().splitlines()[-1])
    return TorchView(found["cuda"], found["hip"], [tuple(each) for each in found["gpus"]], found["error"])


def check_gpus(
    driver: Callable[[], list[dict[str, Any]]] = gpus_at_start,
    torch_view: Callable[[], TorchView] = ask_torch,
    listed: Callable[[], tuple[str, str]] = list_gpus,
) -> Iterator[Finding]:
    """The GPUs of the driver are torch's, compute, and are free."""
    if os.environ.get(_VISIBLE) in _HIDDEN:
        yield Finding("GPUs", "ok", f"{_VISIBLE} hides them: runs use the CPU")
        return
    cards = driver()
    seen = torch_view()
    if not cards and not seen.gpus:
        if seen.error and "No CUDA GPUs" not in seen.error:
            yield Finding(
                "GPUs", "fault", f"torch cannot be asked: {seen.error}", "python -c 'import torch' shows all of it"
            )
        elif error := listed()[1]:
            remedy = "look at dmesg, and reset the GPU or restart the machine; start a container with --gpus all"
            yield Finding("GPUs", "fault", f"nvidia-smi fails, and torch sees no GPU: {error}", remedy)
        else:
            yield Finding("GPUs", "ok", "none: runs use the CPU")
        return
    if seen.error or not seen.gpus:
        yield _unusable(cards, seen, listed)
        return
    is_fine = bool(cards or seen.hip)
    if not is_fine:
        reason = f"torch computes, and nvidia-smi does not answer: {listed()[1] or 'it is not in PATH'}"
        remedy = "install the driver's tools; without them memory held by others is not seen"
        yield Finding("GPUs", "warning", reason, remedy)
    states = {card["uuid"]: card for card in cards}
    for number, (name, major, size, uuid) in enumerate(seen.gpus):
        if major < HAS_BFLOAT16:
            is_fine = False
            reason = f"GPU {number} ({name}) has no bfloat16: runs use float16"
            yield Finding("GPUs", "warning", reason, "use a GPU of compute capability 8 or higher for bfloat16")
        # A slice has the UUID of the whole GPU, whose memory says nothing of it.
        if "MIG" in name:
            is_fine = False
            reason = f"GPU {number} ({name}) is a slice of {size / GIB:.0f} GiB; NCCL cannot connect two slices"
            yield Finding("GPUs", "warning", reason, "use one slice a run, with weights.bridge other than broadcast")
        elif isinstance(used := states.get(uuid, {}).get("used_mib"), int) and used << 20 >= SAFE_HELD:
            is_fine = False
            by = ", ".join(states[uuid]["processes"]) or "processes of other users or containers"
            reason = f"GPU {number} ({name}) has {(size - (used << 20)) / GIB:.0f} of {size / GIB:.0f} GiB free"
            yield Finding("GPUs", "warning", f"{reason}; held by {by}", f"end them, or choose other GPUs by {_VISIBLE}")
    if is_fine:
        names = ", ".join(f"{name} ({size / GIB:.0f} GiB)" for name, _, size, _ in seen.gpus)
        yield Finding("GPUs", "ok", f"{names}; torch for CUDA {seen.cuda or seen.hip}")


def _unusable(cards: Sequence[Mapping[str, Any]], seen: TorchView, listed: Callable[[], tuple[str, str]]) -> Finding:
    """The driver has GPUs, and torch does not use them."""
    driver = cards[0]["driver"] if cards else "unknown"
    if not (seen.cuda or seen.hip) and not seen.error:
        reason = f"the driver ({driver}) has {len(cards)} GPUs, and this torch is built for the CPU"
        return Finding("GPUs", "fault", reason, "python3 scripts/install.py --gpu, in a new environment")
    if "no answer" in seen.error:
        remedy = "wait, look at nvidia-smi and dmesg, and reset the GPU or restart the machine"
        return Finding("GPUs", "fault", f"a GPU is not ready: {seen.error}", remedy)
    if any(text in seen.error for text in _NOT_YET):
        remedy = "systemctl start nvidia-fabricmanager, or end the process that has the GPU to itself (nvidia-smi)"
        return Finding("GPUs", "fault", f"a GPU is not ready, and was awaited: {seen.error}", remedy)
    if not seen.error and _has_mig() and "MIG-" not in listed()[0]:
        remedy = "make slices (nvidia-smi mig -cgi ... -C), or turn it off (nvidia-smi -mig 0)"
        return Finding("GPUs", "fault", "MIG is on and the GPUs have no slices, so torch sees none", remedy)
    if not seen.error and os.environ.get(_VISIBLE) is not None:
        reason = f"torch sees no GPU of {len(cards)}: {_VISIBLE} is '{os.environ[_VISIBLE]}'"
        return Finding("GPUs", "fault", reason, f"unset {_VISIBLE}, or name GPUs in it")
    reason = (
        f"torch for CUDA {seen.cuda or '?'} cannot use the GPUs with driver {driver}: {seen.error or 'it sees none'}"
    )
    return Finding("GPUs", "fault", reason, "install a driver for that CUDA version, or a torch for the driver's")


def _has_mig() -> bool:
    return any("Enabled" in rows for rows in query_gpus("gpu=mig.mode.current"))


def check_visible(
    environ: Mapping[str, str] = os.environ,
    driver: Callable[[], list[dict[str, Any]]] = gpus_at_start,
    listed: Callable[[], tuple[str, str]] = list_gpus,
) -> Iterator[Finding]:
    """Variables to choose GPUs name GPUs of this machine, and do not contradict each other."""
    chosen = environ.get(_VISIBLE)
    others = [name for name in _OTHERS if environ.get(name)]
    if chosen is not None and others:
        reason = f"{_VISIBLE} and {others[0]} are both set, and Ray and vLLM refuse that"
        yield Finding("visible GPUs", "warning", reason, f"unset {others[0]}")
    if chosen is None or chosen in _HIDDEN:
        return
    found = [str(card["uuid"]) for card in driver()]
    parts = [part.strip() for part in chosen.split(",")]
    numbers = [str(number) for number in range(len(found))]
    if any(part.startswith("MIG-") for part in parts):
        found += re.findall(r"UUID: (MIG-[^)]+)", listed()[0])
    wrong = [part for part in parts if part not in numbers and not any(each.startswith(part) for each in found)]
    if found and (wrong or len(set(parts)) < len(parts)):
        what = f"{wrong[0]!r}, not a GPU of the {len(numbers)} here" if wrong else "a GPU twice"
        reason = f"{_VISIBLE} = {chosen} names {what}: CUDA ignores it and all after it"
        slices = [each for each in found if each.startswith("MIG-")]
        yield Finding("visible GPUs", "fault", reason, f"name some of {', '.join([*numbers, *slices])}")


def check_compiler(
    has_gpu: Callable[[], bool] = lambda: bool(gpus_at_start()) or os.path.exists(_DRIVER),
    which: Callable[[str], str | None] = shutil.which,
) -> Iterator[Finding]:
    """Triton builds its launchers with a C compiler."""
    if not has_gpu():
        return
    names = [os.environ["CC"]] if os.environ.get("CC") else ["gcc", "clang", "cc"]
    if not any(map(which, names)):
        reason = f"there is no C compiler ({', '.join(names)}), and Triton needs one on a GPU"
        yield Finding("compiler", "fault", reason, "install gcc (apt install gcc), or set CC")
