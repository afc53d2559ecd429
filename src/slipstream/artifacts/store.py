"""A run in a store: uploaded in order, and restored to another folder."""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import shutil
import socket
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TypeVar

import msgspec

from slipstream.artifacts.facts import Facts, StepFacts, read_facts, write_facts
from slipstream.artifacts.outgoing import (
    Outgoing,
    checkpoints_in,
    has_state,
    identity_of,
    is_adapter,
    newest_resumable,
    step_name,
    step_of,
)
from slipstream.errors import ConfigError, DataError, SlipstreamError
from slipstream.processes.files import disk_errors, write_whole
from slipstream.regular_files import open_regular, read_regular
from slipstream.remote_files import Digest, RemoteFolder, Unavailable
from slipstream.runlog import holds_run
from slipstream.runlog.files import SERVICE_FOLDER, whole_lines
from slipstream.trainer.checkpoints.manifest import (
    HASHED_BYTES,
    MANIFEST,
    FileFacts,
    Manifest,
    difference,
    is_state,
    read_manifest,
)

T = TypeVar("T")
DONE, OWNER = "DONE", "owner.json"
TRIES, FIRST_WAIT_S = 3, 1.0
_CHECKPOINTS, _BEST = "checkpoints", "checkpoints/best"
_LINES, _WHOLE = ("metrics.jsonl", "events.jsonl"), ("resolved.toml", "provenance.json")
_AT_END = ("samples.jsonl", "ledger.sqlite", "exit.json")
_INCOMING = f"{SERVICE_FOLDER}/incoming"
_RIGHTS = "s3:ListBucket, s3:GetObject, s3:PutObject, s3:DeleteObject and s3:AbortMultipartUpload"


class TakenOver(ConfigError):
    """Another run folder continues the run."""


class _Owner(msgspec.Struct, frozen=True):
    token: str
    host: str
    time: float


class Done(msgspec.Struct, frozen=True):
    """The content of `DONE`: the last step, and all files with their digests; those of a checkpoint are named in its
    manifest."""

    run: str
    step: int
    time: float
    files: dict[str, Digest]
    best: int | None = None
    """The step with the best evaluation."""


def open_store(address: str) -> RemoteFolder:
    """A store by its address. Raises ConfigError."""
    return RemoteFolder(address, "--store", _RIGHTS)


class RunStore:
    """The run `run` in the store at `address`."""

    def __init__(self, address: str, run: str, pause: Callable[[float], None] = time.sleep) -> None:
        self._files, self.run, self._pause = open_store(address), run, pause
        self._manifests: dict[int, Manifest] = {}

    def exists(self) -> bool:
        """Whether the store has anything of the run."""
        return bool(self._files.entries(self.run))

    def done(self) -> Done | None:
        """`DONE`, if the run is complete."""
        data = self._files.read(f"{self.run}/{DONE}")
        return None if data is None else self._decoded(data, DONE, Done)

    def steps(self) -> dict[int, Manifest]:
        """The whole checkpoints, in the order of steps."""
        steps = {step: self._manifest(step) for step in sorted(self._listed())}
        return {step: manifest for step, manifest in steps.items() if manifest is not None}

    def place(self, step: int) -> str:
        """The address of a checkpoint."""
        return self._files.place(self._base(step))

    def _listed(self) -> list[int]:
        names = self._try(lambda: self._files.entries(f"{self.run}/{_CHECKPOINTS}"))
        return [step for each in names if (step := step_of(each.name)) is not None]

    def _base(self, step: int) -> str:
        return f"{self.run}/{_CHECKPOINTS}/{step_name(step)}"

    def claim(self, folder: Path) -> None:
        """From here on the run in `folder` writes, and no other one."""
        facts = read_facts(folder)
        Outgoing(folder).make()
        token = facts.token or secrets.token_hex(8)
        write_facts(folder, Facts(token, facts.steps))
        owner = msgspec.json.encode(_Owner(token, socket.gethostname(), time.time()))
        self._try(lambda: self._files.write(f"{self.run}/{OWNER}", owner))

    def check_owner(self, folder: Path) -> None:
        """Raises TakenOver if another run folder has claimed the run since."""
        data = self._try(lambda: self._files.read(f"{self.run}/{OWNER}"))
        owner = None if data is None else self._decoded(data, OWNER, _Owner)
        if owner is None:
            raise Unavailable(f"{self._files} has lost {self.run}/{OWNER}: bring it back, or submit the run again")
        if owner.token != read_facts(folder).token:
            raise TakenOver(f"{self.run} continues in another run folder on {owner.host}: follow it there")

    # Upload

    def upload(self, folder: Path) -> None:
        """Upload the waiting checkpoints in order. After an interruption nothing incomplete looks whole."""
        outgoing = Outgoing(folder)
        outgoing.drop_old()  # a run that is lost meanwhile has the newest state sooner
        waiting = outgoing.waiting()
        if not waiting:
            return
        self.check_owner(folder)
        self._try(lambda: self._files.remove(f"{self.run}/{DONE}"))
        for step, path in waiting.items():
            manifest = read_manifest(path)
            is_newest = step == max(waiting)
            if is_newest:
                self._upload_records(folder)
            self._upload_checkpoint(folder, step, path, manifest, with_state=is_newest)
            new = StepFacts(identity_of(manifest), time.time(), is_adapter(manifest))
            facts = read_facts(folder)
            write_facts(folder, msgspec.structs.replace(facts, steps={**facts.steps, step: new}))
            if is_newest:
                self._remove_old(folder, step)
            outgoing.release(step)

    def finish(self, folder: Path, step: int) -> None:
        """Upload the end of a complete run, and then `DONE`. An earlier one stays."""
        if not Outgoing(folder).waiting() and (done := self.done()) is not None and done.step == step:
            write_facts(folder, msgspec.structs.replace(read_facts(folder), is_done=True))
            return
        self.upload(folder)
        self.check_owner(folder)
        files = self._upload_records(folder) | self._upload_rest(folder)
        there = self._try(lambda: self._files.sizes(f"{self.run}/{_CHECKPOINTS}"))
        for number, manifest in self.steps().items():
            for name, facts in manifest.files.items():
                if there.get(f"{step_name(number)}/{name}") != facts.size_bytes:
                    raise DataError(f"{self.place(number)}/{name} is missing: it was removed by somebody else")
            data = _encoded(manifest)
            name = f"{_CHECKPOINTS}/{step_name(number)}/{MANIFEST}"
            files[name] = Digest(len(data), hashlib.sha256(data).hexdigest())
        done = Done(self.run, step, time.time(), files, best=_best_in(folder))
        self.check_owner(folder)
        data = msgspec.json.format(msgspec.json.encode(done), indent=1)
        self._try(lambda: self._files.write(f"{self.run}/{DONE}", data))
        write_facts(folder, msgspec.structs.replace(read_facts(folder), is_done=True))

    def close(self, folder: Path) -> None:
        """Upload the end of a failed or cancelled attempt."""
        self.upload(folder)
        self.check_owner(folder)
        self._upload_records(folder)
        self._upload_rest(folder)

    def _upload_checkpoint(self, folder: Path, step: int, path: Path, manifest: Manifest, *, with_state: bool) -> None:
        base = self._base(step)
        state = [name for name in manifest.files if is_state(name)]
        if not with_state or not all((path / name).is_file() for name in state):
            state = []
        names = [*(name for name in manifest.files if not is_state(name)), *state]
        if self._manifest(step) is not None:  # of the same step before, with other contents
            self._try(lambda: self._files.remove(f"{base}/{MANIFEST}"))
            del self._manifests[step]
        files: dict[str, FileFacts] = {}
        for name in names:
            facts = manifest.files[name]
            if problem := difference(path / name, facts, whole=True):
                raise DataError(f"checkpoint {path} is damaged: {name} {problem}")
            digest = self._try(lambda name=name: self._files.put(path / name, f"{base}/{name}"))
            files[name] = FileFacts(digest.size_bytes, digest.sha256, facts.checksum)
        self.check_owner(folder)
        self._write_manifest(step, Manifest(files, manifest.step, manifest.format))

    def _upload_records(self, folder: Path) -> dict[str, Digest]:
        found: dict[str, Digest] = {}
        for name in (*_WHOLE, *_LINES):
            file = folder / name
            if file.is_file():
                data = b"".join(line for _, line in whole_lines(file)) if name in _LINES else read_regular(file)
                found[name] = self._try(lambda name=name, data=data: self._files.write(f"{self.run}/{name}", data))
        return found

    def _upload_rest(self, folder: Path) -> dict[str, Digest]:
        there = [name for name in _AT_END if (folder / name).is_file()]
        return {
            name: self._try(lambda name=name: self._files.put(folder / name, f"{self.run}/{name}")) for name in there
        }

    def _remove_old(self, folder: Path, newest: int) -> None:
        """Remove from the store the states before the newest, and whole models after their removal from this folder."""
        states: dict[int, list[str]] = {}
        for path in self._try(lambda: self._files.sizes(f"{self.run}/{_CHECKPOINTS}")):
            folder_name, _, name = path.partition("/")
            step = step_of(folder_name)
            if step is not None and step < newest and is_state(name):
                states.setdefault(step, []).append(name)
        for step, names in states.items():
            if (manifest := self._manifest(step)) is not None and has_state(manifest):
                kept = {name: facts for name, facts in manifest.files.items() if not is_state(name)}
                self._write_manifest(step, msgspec.structs.replace(manifest, files=kept))
            self._remove_files(step, names)
        facts, here = read_facts(folder), checkpoints_in(folder / _CHECKPOINTS)
        models = [step for step, each in facts.steps.items() if not each.is_adapter]
        gone = [step for step in models if step < newest and step not in here]
        for step in gone:
            if (manifest := self._manifest(step)) is not None:
                self._remove_files(step, [MANIFEST])
                del self._manifests[step]
                self._remove_files(step, manifest.files)
        if gone:
            steps = {step: each for step, each in facts.steps.items() if step not in gone}
            write_facts(folder, msgspec.structs.replace(facts, steps=steps))

    def _remove_files(self, step: int, names: Iterable[str]) -> None:
        for name in names:
            self._try(lambda name=name: self._files.remove(f"{self._base(step)}/{name}"))

    # Download

    def restore(self, folder: Path) -> int:
        """Bring the run's newest checkpoint with state and its records to `folder`, if it has none as new; its step, or
        0. With `DONE` the records of its end come, too. Raises DataError for a damaged file."""
        steps, done = self.steps(), self.done()
        newest = max((step for step, manifest in steps.items() if has_state(manifest)), default=0)
        if not newest or (holds_run(folder) and newest_resumable(folder) >= newest):
            return 0
        incoming = folder / _INCOMING
        shutil.rmtree(incoming, ignore_errors=True)
        with disk_errors(folder):
            incoming.mkdir(parents=True, mode=0o700)
            best = done.best if done is not None and done.best in steps else newest
            for step in {newest, best}:
                self.fetch(step, incoming / step_name(step))
            known = done.files if done is not None else dict[str, Digest]()
            for name in (*_WHOLE, *_LINES, *(_AT_END if done is not None else ())):
                self._fetch_record(name, incoming / name, known.get(name))
            (folder / _CHECKPOINTS).mkdir(mode=0o700, exist_ok=True)
            Outgoing(folder).clear()
            last = StepFacts(identity_of(steps[newest]), time.time(), is_adapter(steps[newest]))
            write_facts(folder, msgspec.structs.replace(read_facts(folder), steps={newest: last}))
            for step, path in checkpoints_in(incoming).items():
                final = folder / _CHECKPOINTS / step_name(step)
                shutil.rmtree(final, ignore_errors=True)
                path.rename(final)
            names = sorted(os.listdir(incoming), key=lambda name: name == "events.jsonl")  # by it a run is known
            for name in names:
                (incoming / name).replace(folder / name)
            incoming.rmdir()
            if done is not None and done.best == best:
                (folder / _BEST).unlink(missing_ok=True)
                (folder / _BEST).symlink_to(step_name(best))
        return newest

    def _fetch_record(self, name: str, file: Path, known: Digest | None) -> None:
        place = f"{self.run}/{name}"
        size = self._try(lambda: self._files.size_of(place))
        if size is None:
            return
        self._try(lambda: self._files.get(place, file, size))
        with open_regular(file) as opened:
            found = hashlib.file_digest(opened, "sha256").hexdigest()
        if known is not None and found != known.sha256:
            raise DataError(
                f"{self._files.place(place)} has digest {found:.12} and {DONE} names {known.sha256:.12}: it was changed"
            )

    def fetch(self, step: int, folder: Path, *, weights_only: bool = False) -> None:
        """Copy a checkpoint to the new `folder`, verified. Raises ConfigError for a missing step, and
        DataError."""
        manifest = self.steps().get(step)
        if manifest is None:
            raise ConfigError(f"{self._files}/{self.run} has no whole checkpoint of step {step}")
        base = self._base(step)
        files: dict[str, FileFacts] = {}
        for name, facts in manifest.files.items():
            if weights_only and is_state(name):
                continue
            (folder / name).parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            size = facts.size_bytes
            self._try(lambda name=name, size=size: self._files.get(f"{base}/{name}", folder / name, size))
            if problem := difference(folder / name, facts, whole=True):
                raise DataError(f"{self._files.place(f'{base}/{name}')} {problem}: use another checkpoint")
            files[name] = facts if size <= HASHED_BYTES else FileFacts(size, checksum=facts.checksum)
        write_whole(folder / MANIFEST, _encoded(Manifest(files, manifest.step, manifest.format)))

    def _manifest(self, step: int) -> Manifest | None:
        if step not in self._manifests:
            name = f"{self._base(step)}/{MANIFEST}"
            data = self._try(lambda: self._files.read(name))
            if data is None:
                return None
            self._manifests[step] = self._decoded(data, name, Manifest)
        return self._manifests[step]

    def _write_manifest(self, step: int, manifest: Manifest) -> None:
        name = f"{self._base(step)}/{MANIFEST}"
        self._try(lambda: self._files.write(name, _encoded(manifest)))
        self._manifests[step] = manifest

    def _decoded(self, data: bytes, name: str, kind: type[T]) -> T:
        try:
            return msgspec.json.decode(data, type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise DataError(f"{self._files.place(name)} is damaged ({error}): remove it") from None

    def _try(self, call: Callable[[], T]) -> T:
        """The call's result, after `TRIES` tries at most. Raises the last error."""
        for number in range(TRIES - 1):
            try:
                return call()
            except (Unavailable, DataError):
                self._pause(FIRST_WAIT_S * 2**number)
        return call()


def _encoded(manifest: Manifest) -> bytes:
    return msgspec.json.format(msgspec.json.encode(manifest), indent=1)


def _best_in(folder: Path) -> int | None:
    try:
        return step_of(os.readlink(folder / _BEST))
    except OSError:
        return None


def noted(folder: Path, work: Callable[[], object]) -> str:
    """Do a part of the uploads, and store how it ended; the error or an empty text."""
    error, is_taken_over = "", False
    try:
        work()
    except SlipstreamError as caught:
        error, is_taken_over = str(caught), isinstance(caught, TakenOver)
    except OSError as caught:
        error = f"{caught.filename or folder}: {caught.strerror or caught}"
    with contextlib.suppress(SlipstreamError):  # a full disk here: the exit code tells
        facts = read_facts(folder)
        since = (facts.failed_since or time.time()) if error else 0.0
        changes: Mapping[str, object] = {"error": error, "failed_since": since, "is_taken_over": is_taken_over}
        write_facts(folder, msgspec.structs.replace(facts, **changes))
    return error
