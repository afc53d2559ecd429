"""The checkpoints of a run, here and in its store."""

from __future__ import annotations

import contextlib
from pathlib import Path

import msgspec

from slipstream.artifacts.outgoing import checkpoints_in, has_state, is_adapter
from slipstream.errors import DataError
from slipstream.trainer.checkpoints.manifest import Manifest, read_manifest


class ShownCheckpoint(msgspec.Struct, frozen=True):
    """A whole checkpoint."""

    step: int
    name: str
    """In place of a model's path."""
    weights: str
    """`adapter` or `model`: what can be deployed."""
    size_bytes: int
    can_resume: bool
    is_best: bool
    places: tuple[str, ...]
    """Path and address."""


def list_checkpoints(folder: Path | None, store: str, run: str) -> list[ShownCheckpoint]:
    """The checkpoints of the run in `folder`, and in the store at an address, if any. Raises ConfigError."""
    found: dict[int, tuple[Manifest, tuple[str, ...], bool]] = {}
    if folder is not None:
        link = folder / "checkpoints/best"
        best = link.resolve() if link.is_symlink() else None
        for step, path in checkpoints_in(folder / "checkpoints").items():
            with contextlib.suppress(DataError):  # it is not whole
                found[step] = (read_manifest(path), (str(path),), path.resolve() == best)
    if store:
        from slipstream.artifacts.store import RunStore

        there = RunStore(store, run)
        done = there.done()
        for step, manifest in there.steps().items():
            here, places, is_best = found.get(step, (manifest, (), done is not None and done.best == step))
            whole = here if has_state(here) else manifest
            found[step] = (whole, (*places, there.place(step)), is_best)
    return [
        ShownCheckpoint(
            step=step,
            name=f"run:{run}/step-{step}",
            weights="adapter" if is_adapter(manifest) else "model",
            size_bytes=sum(each.size_bytes for name, each in manifest.files.items() if name.startswith("weights/")),
            can_resume=has_state(manifest),
            is_best=is_best,
            places=places,
        )
        for step, (manifest, places, is_best) in sorted(found.items())
    ]
