"""The supervisor of a run inside a job of a cluster. It makes all attempts of the job.

Guarantees: as in `supervisor.py`. A job starts the run only if the record names this job: the first of two jobs with
one name runs. Retries need nobody outside the job.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import msgspec

from slipstream.plan.machine import IN_USE
from slipstream.processes import exits
from slipstream.processes.launchers import LOCAL, Child
from slipstream.service.records import Attempt, Record
from slipstream.service.store import OUTPUT, RUN_FILE, record_of, update
from slipstream.service.supervisor import Supervisor

_POLL_S = 0.25


class JobSupervisor(Supervisor):
    """Supervises the run in `folder` for its job `name`, which the cluster calls `number`, on the nodes `places`."""

    def __init__(self, folder: Path, name: str, number: str, places: tuple[str, ...]) -> None:
        super().__init__(folder, 0)
        self._name, self._number, self._places = name, number, places

    def run(self) -> None:
        """Make attempts until the run or the job is over."""
        while (record := self.claim()) is not None:
            record = self._attempt(record)
            if record.state != "queued" or not self._has_time(record):
                break

    def claim(self) -> Record | None:
        """Begin the next attempt, if the record names this job."""

        def change(record: Record) -> Record:
            job = record.job
            is_ours = job is not None and job.name == self._name and job.id in ("", self._number) and not job.is_over
            if job is None or not is_ours or record.state != "queued" or self._stop:
                return record
            return msgspec.structs.replace(
                record,
                state="preparing",
                reason="",
                launches=record.launches + 1,
                handle=self._own,
                not_before=0.0,
                job=msgspec.structs.replace(job, id=self._number),
                attempts=(*record.attempts, Attempt(len(record.attempts) + 1, time.time(), self._places)),
            )

        record = update(self._folder, change)
        self._launch = record.launches
        return record if record.handle == self._own else None

    def _has_time(self, record: Record) -> bool:
        """Wait before a retry; whether it can be made here."""
        while (wait_s := record.not_before - time.time()) > 0 and not self._has_to_stop():
            time.sleep(min(wait_s, _POLL_S))
        return not self._stop

    def _start(self, record: Record) -> Child:
        environment = {**os.environ, **exits.SAFE_PATH}
        environment.pop(IN_USE, None)
        arguments = [record.cwd, "train", str(self._folder / RUN_FILE), "--resume=auto", "--plain"]
        child = LOCAL.launch("slipstream.service.worker", arguments, environment, output=self._folder / OUTPUT)
        self._store_worker(child)
        return child

    def leave_job(self) -> None:
        """Note the end of this job. Another one makes a retry."""

        def change(record: Record) -> Record:
            job = record.job
            if job is None or job.name != self._name or record.state != "queued":
                return record
            return msgspec.structs.replace(record, job=msgspec.structs.replace(job, is_over=True))

        update(self._folder, change)

    @property
    def exit_code(self) -> int:
        """The job's."""
        record = record_of(self._folder)
        if record is None or not record.attempts or record.state == "done":
            return 0
        return record.attempts[-1].exit_code or 1


def main() -> None:
    """Supervise the run folder, job name and number of the arguments, and end with the process at the other end of the
    standard input."""
    from slipstream.processes import lifeline

    lifeline.Parent()
    folder, name, number, *places = sys.argv[1:]
    supervisor = JobSupervisor(Path(folder), name, number, tuple(places))
    supervisor.run()
    supervisor.leave_job()


if __name__ == "__main__":
    main()
