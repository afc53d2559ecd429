"""The starts of a job. If the daemon of a node dies, Slurm starts the job again, but processes there survive.

Guarantees: the earlier start's run saves a checkpoint and ends within `_POLL_S` and `run.grace_s`. The later start
waits for that, with a deadline. Both read `FILE` in the run folder, as nothing else connects them.
"""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from slipstream.nodes.places import OWNER_VARIABLE
from slipstream.runlog.files import SERVICE_FOLDER, is_running

FILE = f"{SERVICE_FOLDER}/start"
"""The newest start as `JOB.NUMBER`, below the run folder. The job's supervisor writes it."""
START_SLACK_S = 60.0
"""How long a run may take to end after `run.grace_s`."""
_POLL_S = 2.0


@dataclass(frozen=True)
class Start:
    """A start of a job."""

    job: int
    number: int
    """How often the job was requeued before it."""

    def is_over(self, folder: Path) -> bool:
        """Whether the job has started again since."""
        try:
            text = (folder / FILE).read_text()
        except OSError:  # not there, or the file system is away for a moment
            return False
        found = re.fullmatch(r"(\d+)\.(\d+)\s*", text)
        return found is not None and int(found[1]) == self.job and int(found[2]) > self.number

    def follow(self, folder: Path, tell: Callable[[str], object]) -> None:
        """Stop this process's run, as after a scheduler's warning, once the job has started again."""

        def watch() -> None:
            while not self.is_over(folder):
                time.sleep(_POLL_S)
            tell(f"Slurm has started job {self.job} again: this start of it ends")
            while True:  # the run may have no handler yet
                os.kill(os.getpid(), signal.SIGUSR1)
                time.sleep(_POLL_S)

        threading.Thread(target=watch, name="job-start", daemon=True).start()

    def await_earlier(self, folder: Path, wait_s: float, tell: Callable[[str], object]) -> None:
        """Wait until the run of an earlier start has ended, but no longer than `wait_s`."""
        if not self.number or not is_running(folder):
            return
        tell(f"the job's earlier start still runs in {folder}: waiting up to {wait_s:g} s for its end")
        deadline = time.monotonic() + wait_s
        while is_running(folder) and time.monotonic() < deadline:
            time.sleep(_POLL_S)


def own_start(variables: Mapping[str, str]) -> Start | None:
    """The start of this process's job; None outside a job of `slipstream submit`."""
    job, number = variables.get("SLURM_JOB_ID", ""), variables.get("SLURM_RESTART_COUNT", "") or "0"
    if not variables.get(OWNER_VARIABLE) or not job.isdecimal() or not number.isdecimal():
        return None
    return Start(int(job), int(number))
