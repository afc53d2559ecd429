"""The parent of one attempt of a run: a small separate process, so the run outlives every service and command.

Guarantees: it claims its attempt, with its handle, before it starts anything; a second supervisor of the attempt ends
at once. All processes of the run end with it. At its end it stores the next state, and starts waiting runs.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from slipstream.errors import SlipstreamError
from slipstream.plan.machine import IN_USE
from slipstream.processes import exits
from slipstream.processes.guard import adopt, children_of, descendants, end_descendants
from slipstream.processes.identity import handle_of, own_handle
from slipstream.processes.launchers import LOCAL, Child, Resources
from slipstream.runlog import is_running
from slipstream.service import dispatch
from slipstream.service.allocation import CPU, Gpu
from slipstream.service.ending import conclude, confirmed, exit_since
from slipstream.service.figures import Peaks
from slipstream.service.gpus import held_bytes, read_gpus
from slipstream.service.providers import all_providers
from slipstream.service.records import Record
from slipstream.service.store import OUTPUT, RUN_FILE, Store, record_of, update
from slipstream.service.uploads import Uploads

_POLL_S = 0.25
_MARGIN_S = 30.0
"""After `run.grace_s`, before the end by SIGKILL."""
_ORPHANS_S = 30.0
_LOOK_S = 5.0
"""Between two looks at the memory of the run's GPUs."""


class Supervisor:
    """Supervises attempt number `launch` of the run in `folder`."""

    def __init__(self, folder: Path, launch: int) -> None:
        self._folder, self._launch = folder, launch
        self._own = own_handle()
        self._stop = 0
        self._gpu_bytes = 0
        self._has_ended = threading.Event()

    def claim(self) -> Record | None:
        """Store this process's handle as the attempt's; None if the attempt is another's, or is over."""

        def change(record: Record) -> Record:
            is_ours = record.launches == self._launch and record.state == "preparing" and record.handle is None
            return msgspec.structs.replace(record, handle=self._own) if is_ours else record

        record = update(self._folder, change)
        return record if record.handle == self._own else None

    def run(self) -> None:
        """Run the attempt to its end, and store the next state."""
        self._take_signals(signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
        record = self.claim()
        if record is not None:
            self._start_waiting(self._attempt(record))

    def _take_signals(self, *numbers: int) -> None:
        for number in numbers:
            signal.signal(number, self._on_stop)

    def _attempt(self, record: Record) -> Record:
        """Run a claimed attempt; the record after it."""
        adopt()
        code: int | None = None
        uploads = Uploads(self._folder) if record.store else None
        try:
            if uploads is None or uploads.begin(self._has_to_stop):
                child = self._start(record)
                try:
                    code = confirmed(self._folder, self._watch(child, record.grace_s, uploads))
                finally:
                    child.kill()
                    self._has_ended.set()
                if uploads is not None:
                    update(self._folder, _finalising)
                    is_finished = _has_finished(self._folder, record, code)
                    uploads.finish(self._has_to_stop, is_finished=is_finished, limit_s=record.grace_s + _MARGIN_S)
        finally:
            end_descendants(_ORPHANS_S)
        # Linux counts in KiB, over all processes of the run with an end.
        host_bytes = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss << 10
        return self._conclude(code, Peaks(host_bytes, self._gpu_bytes))

    def _conclude(self, code: int | None, peaks: Peaks) -> Record:
        return conclude(self._folder, self._launch, code, peaks)

    def _on_stop(self, number: int, frame: object) -> None:
        self._stop = number

    def _start(self, record: Record) -> Child:
        arguments = [record.cwd, "train", str(self._folder / RUN_FILE), "--resume=auto", "--plain"]
        environment = {**os.environ, **exits.SAFE_PATH}
        environment.pop(IN_USE, None)
        gpus = tuple(lease.place for lease in record.leases if lease.place != CPU)
        if gpus:
            environment[IN_USE] = json.dumps(granted(read_gpus(), record))
        resources = Resources(gpus=gpus)
        child = LOCAL.launch("slipstream.service.worker", arguments, environment, resources, output=self._output)
        self._store_worker(child)
        if gpus:
            threading.Thread(target=self._look_at_gpus, name="gpu-memory", daemon=True).start()
        return child

    def _store_worker(self, child: Child) -> None:
        worker = handle_of(child.pid)
        update(self._folder, lambda record: msgspec.structs.replace(record, worker=worker))

    def _ask_to_stop(self, child: Child) -> bool:
        """Ask the training process to end; False to ask again later."""
        child.send_signal(signal.SIGTERM)
        return True

    @property
    def _output(self) -> Path:
        return self._folder / OUTPUT

    def _has_to_stop(self) -> bool:
        record = record_of(self._folder)
        return bool(self._stop or (record is not None and record.cancel_requested))

    def _watch(self, child: Child, grace_s: float, uploads: Uploads | None) -> int | None:
        """Wait for the end of the training process, and end it on request."""
        deadline, seen = float("inf"), False
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return child.wait(_POLL_S)
            _reap(child.pid, uploads.pid if uploads is not None else None)
            if uploads is not None:
                uploads.look()
            is_over = uploads is not None and uploads.is_taken_over
            if deadline == float("inf") and (is_over or self._has_to_stop()) and self._ask_to_stop(child):
                deadline = time.monotonic() + grace_s + _MARGIN_S
            if time.monotonic() > deadline:
                child.kill()
            if not seen and is_running(self._folder):
                seen = True
                update(self._folder, _running)

    def _look_at_gpus(self) -> None:
        """Follow the memory of the run's GPUs, in a thread: a driver may answer late, or never."""
        while not self._has_ended.wait(_LOOK_S):
            self._gpu_bytes = max(self._gpu_bytes, held_bytes(descendants()))

    def _start_waiting(self, record: Record) -> None:
        """Pass over the queue: another run may have the place, or this one may be due again after its wait."""
        providers = all_providers()
        with contextlib.suppress(SlipstreamError):
            store = Store()
            dispatch.tick(store, providers)
            if record.state == "queued" and record.not_before:
                while (wait_s := record.not_before - time.time()) > 0 and not self._stop:
                    time.sleep(min(wait_s, _POLL_S))
                dispatch.tick(store, providers)


def granted(gpus: Sequence[Gpu], record: Record) -> list[str]:
    """An answer of nvidia-smi in the form of `plan.machine`: others hold all memory without a grant."""
    leases = {lease.place: lease for lease in record.leases}
    rows = [
        f"{gpu.uuid}, {gpu.total >> 20}, {max(0, gpu.total - leases[gpu.uuid].granted_bytes) >> 20}, -, -, {gpu.name}"
        for gpu in gpus
        if gpu.uuid in leases
    ]
    return ["\n".join(rows), ""]


def _running(record: Record) -> Record:
    return msgspec.structs.replace(record, state="running") if record.state == "preparing" else record


def _finalising(record: Record) -> Record:
    return msgspec.structs.replace(record, state="finalising", reason=f"uploads to {record.store}")


def _has_finished(folder: Path, record: Record, code: int | None) -> bool:
    with contextlib.suppress(SlipstreamError):  # a damaged file says nothing
        report = exit_since(folder, record.attempts[-1].started)
        return code == 0 or (report is not None and report.status == "finished")
    return False


def _reap(*own: int | None) -> None:
    """Take note of the end of orphans of the run."""
    for pid in children_of(os.getpid()):
        if pid not in own:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)


def main() -> None:
    """Supervise the run folder and launch of the arguments."""
    Supervisor(Path(sys.argv[1]), int(sys.argv[2])).run()


if __name__ == "__main__":
    main()
