"""Makes a queued run of a run file.

Guarantees: the run folder is written before anything else knows of the run. Its settings are a copy with absolute
paths, so later edits of the run file change nothing. Settings with a secret are refused.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import socket
import time
from collections.abc import Callable
from pathlib import Path

from slipstream.artifacts.facts import OUTGOING
from slipstream.config import Loaded, dump_given, load_config
from slipstream.config.parse.load import DEFAULT, LAUNCHER
from slipstream.errors import ConfigError
from slipstream.names import model_name
from slipstream.plan.times import SHARED_TIMES, Estimate, corrected, first_start_s
from slipstream.processes.files import write_whole
from slipstream.runlog import holds_run, refuse_used
from slipstream.runlog.files import SERVICE_FOLDER
from slipstream.runlog.redaction import refuse_secrets
from slipstream.service.figures import gpu_hour_price
from slipstream.service.preflight import Preflight, implied_by
from slipstream.service.records import NO_OPTIONS, Asked, Record
from slipstream.service.store import RUN_FILE, Store, name_from, record_of


def unix_user() -> str:
    """The name of this process's user."""
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return str(os.geteuid())


def submit(
    store: Store,
    loaded: Loaded,
    name: str,
    plan: Callable[[Path, Loaded, Asked], Preflight],
    *,
    to: str = "local",
    asked: Asked = NO_OPTIONS,
    owner: str = "",
    runs: Path = Path("runs"),
    resume: bool = False,
    address: str = "",
) -> tuple[Path, Record]:
    """Queue a run for the provider `to`, in `run.folder` or in a new folder below `runs`; its folder and record. `plan`
    gets the folder with the settings; `address` is that of the store for artifacts. Raises ConfigError."""
    price = gpu_hour_price()
    name, folder = _new_name(store, loaded, name, runs)
    if not resume or not holds_run(folder):
        refuse_used(folder)
    before = record_of(folder)
    if before is not None and not before.has_ended:
        raise ConfigError(f"{before.id} is {before.state}: wait for its end, or use slipstream cancel")
    if not address:
        shutil.rmtree(folder / OUTGOING, ignore_errors=True)  # of an earlier start with a store
    else:
        address = _checked(address, name, resume=resume or before is not None)
    loaded = loaded.with_values({"run.folder": folder})
    loaded.origins["run.folder"] = "slipstream submit"
    for path in implied_by(to):
        if loaded.origins.get(path) == LAUNCHER:
            loaded.origins[path] = DEFAULT
    text = dump_given(loaded)
    refuse_secrets(text)
    (folder / SERVICE_FOLDER).mkdir(parents=True, exist_ok=True, mode=0o700)
    try:
        write_whole(folder / RUN_FILE, text.encode())
        found = plan(folder, load_config(folder / RUN_FILE, implied=implied_by(to)), asked)
        record = Record(
            id=name,
            owner=owner or unix_user(),
            host=socket.gethostname(),
            submitted=time.time(),
            cwd=os.getcwd(),
            model=model_name(loaded.config.model.path),
            algorithm=loaded.config.algorithm.kind,
            steps=found.steps,
            to=to,
            asked=found.asked,
            store=address,
            price=price,
            grace_s=loaded.config.run.grace_s,
            need=found.need,
            estimate=with_earlier(store, found.estimate),
        )
        store.add(folder, record)
    except BaseException:
        if before is None:
            shutil.rmtree(folder / SERVICE_FOLDER, ignore_errors=True)
            with contextlib.suppress(OSError):
                folder.rmdir()
        raise
    return folder, record


def _checked(address: str, name: str, *, resume: bool) -> str:
    """The address of a store in its full form. Raises ConfigError if it cannot be used, or has another run `name`."""
    from slipstream.artifacts.store import RunStore, open_store

    address = open_store(address).address
    if RunStore(address, name).exists() and not resume:
        raise ConfigError(f"{address} has a run {name} already: continue it with --resume, or name another run.folder")
    return address


def _new_name(store: Store, loaded: Loaded, name: str, runs: Path) -> tuple[str, Path]:
    """A free name, and the run's folder. An earlier run of the folder keeps its name."""
    given = loaded.config.run.folder
    if given is not None and (before := record_of(given)) is not None and store.folder_of(before.id) == given:
        return before.id, given
    base = name_from(given.name if given is not None else f"{name}-{time.strftime('%Y%m%d-%H%M%S')}")
    for number in range(1, 1000):
        found = base if number == 1 else f"{base}-{number}"
        folder = given if given is not None else (runs / found).absolute()
        if not store.has(found) and (given is not None or not folder.exists()):
            return found, folder
    raise ConfigError(f"1000 runs are named {base}: name another folder")


def with_earlier(store: Store, estimate: Estimate) -> Estimate:
    """The estimate with the times of the last run of its shape with one attempt, if it is done."""
    if not estimate.shape:
        return estimate
    records = [record for _, record in reversed(store.records())]
    for record in sorted(records, key=lambda each: each.estimate.is_shared):
        actual, is_whole = record.actual, record.state == "done" and len(record.attempts) == 1
        if is_whole and record.estimate.shape == estimate.shape and actual is not None and actual.step_s is not None:
            # With an engine the fullest GPU holds more than the trainer's peak.
            has_all = "gpu" in actual.peaks_gib or "engine" not in actual.peaks_gib
            memory_gib = actual.memory_gib if has_all else None
            rest_s = max(0.0, (actual.rest_s or 0.0) - first_start_s(actual.start_s))
            times = SHARED_TIMES if record.estimate.is_shared else 1.0
            return corrected(estimate, actual.step_s / times, rest_s / times, record.id, memory_gib)
    return estimate
