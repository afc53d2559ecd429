"""Models named by a run: `run:ID`, `run:ID/step-N`. Found in the run's folder on this machine, or else in the store.

Guarantees: all files of the weights are compared with their digests before they are used. An adapter that changes
nothing is refused.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path

from slipstream.artifacts.facts import STORE_VARIABLE
from slipstream.artifacts.outgoing import checkpoints_in, identity_of, is_adapter, step_name
from slipstream.config.addresses import RunReference
from slipstream.errors import ConfigError, DataError
from slipstream.processes.temporary import cache_root, private_folder, temporary
from slipstream.runlog.files import folder_of_run
from slipstream.trainer.checkpoints.manifest import difference, read_manifest


def located(reference: RunReference, folder: Path | None = None) -> Path:
    """The folder of a verified checkpoint, in the run's `folder`, or else copied from the store. Raises ConfigError."""
    run = folder or folder_of_run(reference.run)
    try:
        path = None if run is None else _in_folder(run, reference)
        if path is None:
            path = _from_store(reference)
        _verify(path)
    except DataError as error:
        raise ConfigError(f"{reference.text} cannot be used: {error}") from error
    return path


def _in_folder(run: Path, reference: RunReference) -> Path | None:
    folder = run / "checkpoints"
    if reference.step is not None:
        return checkpoints_in(folder).get(reference.step)
    if (folder / "best").is_symlink():
        return (folder / "best").resolve()
    return next(reversed(checkpoints_in(folder).values()), None)


def _from_store(reference: RunReference) -> Path:
    address = os.environ.get(STORE_VARIABLE, "")
    if not address:
        raise ConfigError(
            f"{reference.text} is not on this machine: slipstream checkpoints {reference.run} lists what there is, and "
            f"{STORE_VARIABLE} names a store"
        )
    from slipstream.artifacts.store import RunStore

    store = RunStore(address, reference.run)
    steps, done = store.steps(), store.done()
    best = done.best if done is not None else None
    step = reference.step if reference.step is not None else best or max(steps, default=0)
    if step not in steps:
        known = ", ".join(map(str, steps)) or "none"
        raise ConfigError(f"{reference.text} is neither on this machine nor in {address} (its steps there: {known})")
    try:
        cache = private_folder(cache_root(os.environ) / "checkpoints")
    except (OSError, RuntimeError) as error:
        raise ConfigError(
            f"{reference.text} cannot be copied ({error}): set XDG_CACHE_HOME to a folder of your own"
        ) from error
    target = cache / f"{reference.run}-{step_name(step)}-{identity_of(steps[step])}"
    if target.is_dir():
        return target
    with temporary("checkpoint", cache) as here:
        store.fetch(step, here / "whole", weights_only=True)
        with contextlib.suppress(OSError):  # another run was faster
            (here / "whole").replace(target)
        shutil.rmtree(here / "whole", ignore_errors=True)
    return target


def _verify(path: Path) -> None:
    """Raises DataError unless all files of the weights are as they were written."""
    manifest = read_manifest(path)
    for name, facts in manifest.files.items():
        if name.startswith("weights/") and (problem := difference(path / name, facts, whole=True)):
            raise DataError(f"{path / name} {problem}")
    if is_adapter(manifest):
        from slipstream.weights.adapter_folder import changes_nothing

        if changes_nothing(path / "weights"):
            raise DataError(f"every B of the adapter in {path} is zero, so it was not trained: name a later step")
