"""The supervisor in a job of Slurm, `python -m slipstream.service.slurm_job FOLDER NAME`.

Before the time limit Slurm signals it. The run saves a checkpoint and ends, and the job is requeued for the rest. After
the failure of a node, the next start of the job first ends the rest of the earlier one. The token of a start exists in
the environment alone.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import sys
from pathlib import Path

from slipstream.clusters import slurm
from slipstream.clusters.batch_script import srun
from slipstream.clusters.starts import FILE, START_SLACK_S, own_start
from slipstream.errors import ConfigError
from slipstream.nodes.places import OWNER_VARIABLE
from slipstream.nodes.protocol import TOKEN_VARIABLE
from slipstream.processes import exits
from slipstream.processes.files import write_whole
from slipstream.processes.launchers import LOCAL, Child
from slipstream.runlog.files import LOCK_FILE
from slipstream.service.ending import conclude
from slipstream.service.figures import Peaks
from slipstream.service.job import JobSupervisor
from slipstream.service.records import ACTIVE, Record
from slipstream.service.store import OUTPUT, RUN_FILE, record_of

_STEP = "slipstream.service.slurm_step"
_TIME_IS_OVER = "the job's time is over"


class SlurmSupervisor(JobSupervisor):
    """See the module."""

    def __init__(self, folder: Path, name: str) -> None:
        os.environ[OWNER_VARIABLE] = "slurm"
        start = own_start(os.environ)
        if start is None:
            raise ConfigError("this is no job of Slurm: use slipstream submit")
        self._begins = start
        super().__init__(folder, name, str(start.job), (os.environ.get("SLURM_JOB_NODELIST", ""),))
        self._is_stuck = False

    def run(self) -> None:
        """See `JobSupervisor`."""
        self._take_signals(signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
        self._note_start()
        self._end_earlier()
        super().run()
        record = record_of(self._folder)
        if record is None or record.state != "queued" or self._is_over():
            return
        if self._stop == signal.SIGUSR1:
            print(f"the job is requeued: {_TIME_IS_OVER}", flush=True)
            try:
                slurm.requeue(self._number)
                return
            except ConfigError as error:
                print(f"{error}; another job follows", flush=True)
        if self._stop in (0, signal.SIGUSR1):
            self.leave_job()

    def _is_over(self) -> bool:
        """Whether the job starts again elsewhere. After the death of a node's daemon this process lives on."""
        return self._begins.is_over(self._folder) or slurm.has_lost_nodes(self._number, self._begins.number)

    def _note_start(self) -> None:
        write_whole(self._folder / FILE, f"{self._begins.job}.{self._begins.number}\n".encode())

    def _end_earlier(self) -> None:
        """Conclude the attempt of an earlier start of this job: its node was lost."""
        record = record_of(self._folder)
        if not self._begins.number or record is None or record.job is None or record.job.id != self._number:
            return
        self._begins.await_earlier(self._folder, record.grace_s + START_SLACK_S, lambda text: print(text, flush=True))
        record = record_of(self._folder)
        if record is not None and record.state in ACTIVE:
            conclude(self._folder, record.launches, None)

    def _start(self, record: Record) -> Child:
        self._note_start()  # older than the lock of the run, from when the run listens
        python = [sys.executable, "-P", "-m", "slipstream.cli"]
        command = [*python, "train", str(self._folder / RUN_FILE), "--resume=auto", "--plain"]
        environment = {**os.environ, **exits.SAFE_PATH, TOKEN_VARIABLE: secrets.token_urlsafe(32)}
        arguments = [record.cwd, *srun(record.asked.cpus_per_task, command)]
        child = LOCAL.launch(_STEP, arguments, environment, output=self._folder / OUTPUT)
        self._store_worker(child)
        return child

    def _ask_to_stop(self, child: Child) -> bool:
        if self._listens():
            child.send_signal(signal.SIGUSR1)  # srun passes it on
        elif self._stop == signal.SIGUSR1:
            return False  # the signal would be lost, and a start that saves nothing may be the last
        else:
            child.send_signal(signal.SIGTERM)  # srun ends the step
        return True

    def _listens(self) -> bool:
        """Whether the run of this attempt holds its folder, and takes signals."""
        with contextlib.suppress(OSError):
            lock, start = (os.stat(self._folder / name).st_mtime_ns for name in (LOCK_FILE, FILE))
            return lock > start
        return False

    def _conclude(self, code: int | None, peaks: Peaks) -> Record:
        # After SIGKILL of srun its step may hold the nodes: no further step here.
        self._is_stuck = code is not None and code < 0
        if code and self._is_over():
            code = None  # that of srun, without nodes
        how = _TIME_IS_OVER if self._stop == signal.SIGUSR1 else f"Slurm has stopped job {self._number}"
        return conclude(self._folder, self._launch, code, stopped=how if self._stop else "")

    def _has_time(self, record: Record) -> bool:
        return not self._is_stuck and super()._has_time(record) and not self._is_over()


def main() -> None:
    """Supervise the run folder and job name of the arguments."""
    supervisor = SlurmSupervisor(Path(sys.argv[1]), sys.argv[2])
    supervisor.run()
    sys.exit(supervisor.exit_code)


if __name__ == "__main__":
    main()
