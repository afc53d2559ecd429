"""Verifies the weights in a run's folder, and in its live engine, against the fingerprints of the trained weights.

Guarantees: nothing is changed. Every parameter is compared with the fingerprint of the trainer's own memory, taken as
the checkpoint was written or the version published: a single flipped bit is found, and its parameter named. The resume
state is compared with the checksums of its files. A live engine is asked again if it applies a new version meanwhile.
Every wait has a deadline.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import Tensor

from slipstream.errors import ConfigError, DataError, DeadlineError, EngineError, WeightsError
from slipstream.inference.client import EngineClient
from slipstream.records import ParameterSpec, Ticket
from slipstream.runlog import checkpoints_of, holds_run, is_running, read_events, read_settings, read_tickets
from slipstream.trainer.checkpoints.checkpoint import CheckpointStore, damage
from slipstream.weights.adapter_folder import is_adapter_folder
from slipstream.weights.bridges.broadcast import num_bytes
from slipstream.weights.fingerprint import as_hex
from slipstream.weights.fingerprint_torch import fingerprint
from slipstream.weights.model_files import read_model_folder

LIVE = "live engine"
_POLL_S = 0.2


@dataclass(frozen=True)
class Verdict:
    """The result for one checkpoint, published version or engine."""

    what: str
    version: str
    """Name of the version; empty where there is none."""
    digest: str
    num_parameters: int
    num_bytes: int
    seconds: float
    problems: tuple[str, ...]
    """Differences, each with its parameter's name; empty when everything matches."""
    note: str = ""
    """Why nothing could be compared."""

    @property
    def gb_per_s(self) -> float | None:
        """Speed of the comparison; None where nothing was compared."""
        return self.num_bytes / 1e9 / self.seconds if self.num_bytes and self.seconds > 0 else None


def verify(path: Path, engine: Path | None = None, *, timeout_s: float = 120.0) -> list[Verdict]:
    """Verify the run in `path`, or one checkpoint or published version; with a run also its engine while it runs, or
    the one that answers at the socket `engine`."""
    if holds_run(path):
        return _verify_run(path, engine, timeout_s)
    if engine is not None:
        raise ConfigError(f"{path} is no run, and --engine needs its run's tickets: name the run's folder")
    if (path / "manifest.json").is_file():
        return [_checkpoint(path.resolve(), _digests(path.resolve().parent.parent))]
    run = path.resolve().parent.parent
    for ticket in read_tickets(run) if path.is_dir() else []:
        if run / "weights" / ticket.version.name == path.resolve():
            return [_published(path, ticket)]
    if not path.is_dir():
        problem = "is a file" if path.exists() else "does not exist"
        raise ConfigError(f"{path} {problem}: name the folder of a run or of one of its checkpoints")
    raise ConfigError(
        f"{path} holds no fingerprints to compare with: name the folder of a run or of one of its checkpoints"
    )


def _verify_run(run: Path, engine: Path | None, timeout_s: float) -> list[Verdict]:
    digests, tickets = _digests(run), read_tickets(run)
    jobs: list[tuple[Path, Callable[[], Verdict]]] = []
    for path in checkpoints_of(run):
        jobs.append((path, lambda path=path: _checkpoint(path, digests)))
    for ticket in tickets:
        folder = run / "weights" / ticket.version.name
        if folder.is_dir():
            jobs.append((folder, lambda folder=folder, ticket=ticket: _published(folder, ticket)))
    found: list[Verdict] = []
    for path, job in jobs:
        verdict = job()
        # A run that is still going removes old files.
        if path.exists():
            found.append(verdict)
    base = next((ticket.base for ticket in tickets if ticket.base), ())
    if base:
        settings = read_settings(run)
        found.append(_base(_downloaded(str(settings.get("model.path", "")), settings.get("model.revision")), base))
    if engine is not None or (is_running(run) and tickets):
        try:
            sockets = [engine] if engine is not None else _sockets(run)
            found += asyncio.run(_live(run, sockets, timeout_s))
        except EngineError:
            raise_unless_right(found)  # a difference matters more than an engine that does not answer
            raise
    if not found:
        raise ConfigError(f"{run} has no checkpoint and no published version yet: wait for its first if it still runs")
    return found


def _digests(run: Path) -> dict[str, str]:
    """Digests of the published versions, by version name."""
    return {str(event["version"]): str(event["digest"]) for event in read_events(run, kinds=("publish",))}


def _checkpoint(path: Path, digests: dict[str, str]) -> Verdict:
    began, proof = time.perf_counter(), CheckpointStore.read_fingerprints(path)
    problems = list(filter(None, [damage(path, whole="state/")]))
    version = ""
    try:
        extra = CheckpointStore.read_loop_state(path)
        version = f"{extra['lineage']}.{extra['step']}"
    except DataError as error:
        problems = problems or [str(error)]
    problems += _differences(path / "weights", proof.parameters)
    published = digests.get(version)
    # An adapter is published scaled or merged, not as it is stored in the checkpoint.
    if published is not None and published != proof.digest and not is_adapter_folder(path / "weights"):
        problems.append(f"its digest is {proof.digest}, and version {version} was published with {published}")
    return _verdict(f"checkpoint {path.name}", version, proof.digest, proof.parameters, began, problems)


def _published(folder: Path, ticket: Ticket) -> Verdict:
    began, version = time.perf_counter(), ticket.version
    if ticket.delta is not None:
        note = f"holds only what changed since {ticket.delta.base.name}: the engine that took it compared the whole"
        return Verdict("published files", version.name, version.digest, 0, 0, 0.0, (), note)
    problems = _differences(folder, ticket.parameters)
    return _verdict("published files", version.name, version.digest, ticket.parameters, began, problems)


def _base(folder: Path, base: tuple[ParameterSpec, ...]) -> Verdict:
    """Verify the frozen base model of an adapter, in the dtype in which it was loaded."""
    what = f"base model {folder}"
    if not folder.is_dir():
        return Verdict(what, "", "", 0, 0, 0.0, (), "is not a folder here: not looked at")
    began, dtypes = time.perf_counter(), {spec.name: spec.dtype for spec in base}

    def loaded() -> Iterator[tuple[str, Tensor]]:
        import torch

        for name, tensor in read_model_folder(folder):
            if name in dtypes:
                yield name, tensor.to(getattr(torch, dtypes[name]))

    problems = _differences(folder, base, loaded)
    return _verdict(what, "", "", base, began, problems)


def _downloaded(path: str, revision: str | None) -> Path:
    """The snapshot of a hub id in this machine's cache, in the commit that a run began with; any other path itself."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    if not Path(path).is_dir() and path.count("/") == 1:
        with contextlib.suppress(HFValidationError):
            file = try_to_load_from_cache(path, "config.json", revision=revision)
            return Path(file).parent if isinstance(file, str) else Path(path)
    return Path(path)


def _verdict(
    what: str,
    version: str,
    digest: str,
    parameters: Sequence[ParameterSpec],
    began: float,
    problems: Iterable[str],
) -> Verdict:
    """The verdict of a finished comparison; `began` is a time of `perf_counter`."""
    size, seconds = sum(map(num_bytes, parameters)), time.perf_counter() - began
    return Verdict(what, version, digest, len(parameters), size, seconds, tuple(problems))


def _differences(
    folder: Path,
    parameters: Sequence[ParameterSpec],
    read: Callable[[], Iterator[tuple[str, Tensor]]] | None = None,
) -> list[str]:
    """Compare the safetensors files of `folder` with `parameters`, and list what differs."""
    missing = {spec.name: spec for spec in parameters}
    problems: list[str] = []
    try:
        for name, tensor in read() if read is not None else read_model_folder(folder):
            spec = missing.pop(name, None)
            dtype = str(tensor.dtype).removeprefix("torch.")
            if spec is None:
                problems.append(f"{name} should not be there")
            elif (tuple(tensor.shape), dtype) != (spec.shape, spec.dtype):
                problems.append(f"{name} is {dtype} {list(tensor.shape)}, not {spec.dtype} {list(spec.shape)}")
            elif as_hex(fingerprint(tensor)) != spec.fingerprint:
                problems.append(f"{name} differs")
    except (SafetensorError, OSError) as error:
        return [*problems, f"the files cannot be read ({error})"]
    return problems + [f"{name} is missing" for name in missing]


def _sockets(run: Path) -> list[Path]:
    """The sockets of a run's engines, from its last start."""
    found = [event for event in read_events(run, kinds=("engine_socket",)) if event.get("path")]
    last = max((int(event["lineage"]) for event in found), default=0)
    by_number = {int(event.get("replica") or 0): event["path"] for event in found if event["lineage"] == last}
    paths = [Path(str(by_number[number])) for number in sorted(by_number)]
    if not paths:
        raise ConfigError(f"{run} does not say where its engine answers: name its socket with --engine")
    return paths


async def _live(run: Path, sockets: Sequence[Path], timeout_s: float) -> list[Verdict]:
    """Verify the weights in each engine's memory against the ticket of the version that it reports."""
    names = [LIVE] if len(sockets) == 1 else [f"{LIVE} {number}" for number in range(len(sockets))]
    return await asyncio.gather(*(_live_one(run, *each, timeout_s) for each in zip(sockets, names, strict=True)))


async def _live_one(run: Path, socket: Path, what: str, timeout_s: float) -> Verdict:
    if not socket.is_socket():
        raise EngineError(f"{socket} is no socket of an engine: is the run still going on, on this machine?")
    client = EngineClient(str(socket), is_alive=socket.exists, describe=lambda: f"asked at {socket}")
    try:
        return replace(await _ask(run, client, timeout_s), what=what)
    finally:
        await client.close()


async def _ask(run: Path, client: EngineClient, timeout_s: float) -> Verdict:
    deadline = time.monotonic() + timeout_s
    while True:
        health = await client.health()
        if health is None and not is_running(run):
            raise EngineError(f"no engine answers at {client.socket}: is the run still going on?")
        tickets = {ticket.version: ticket for ticket in read_tickets(run)}
        version = health.version if health is not None else None
        ticket = tickets.get(version) if version is not None else None
        why = f"{run} keeps no ticket of the version {_name(version)} that it holds"
        if health is None or health.status != "ready":
            why = health.reason if health is not None else "it is being started again"
        elif ticket is not None:
            began = time.perf_counter()
            try:
                report = await client.verify(ticket, timeout_s)
            except DeadlineError:
                raise
            except EngineError as error:
                # It may be asleep, applying another version, or restarting: ask again until the deadline.
                if time.monotonic() > deadline or not is_running(run):
                    raise
                why = str(error)
                await asyncio.sleep(_POLL_S)
                continue
            problems = [f"{name} differs" for name in report.mismatched]
            problems += [f"{name} cannot be verified" for name in report.unverified]
            held = ticket.version
            verdict = _verdict(LIVE, held.name, held.digest, (*ticket.parameters, *ticket.base), began, problems)
            after = await client.health() if problems else health
            # A difference after an update in between is no fault.
            if not problems or (after is not None and (after.status, after.version) == ("ready", health.version)):
                return verdict
            why = "it took new versions all the time"
        if time.monotonic() > deadline:
            raise DeadlineError(f"the engine at {client.socket} could not be verified within {timeout_s:g} s: {why}")
        await asyncio.sleep(_POLL_S)


def _name(version: Any) -> str:
    return version.name if version is not None else "none"


def raise_unless_right(verdicts: Sequence[Verdict]) -> None:
    """Raise `WeightsError`, with the first differences, unless everything matches."""
    wrong = [verdict for verdict in verdicts if verdict.problems]
    if wrong:
        first = wrong[0]
        shown = ", ".join(first.problems[:3]) + (f" and {len(first.problems) - 3} more" * (len(first.problems) > 3))
        others = f"; {len(wrong) - 1} more of {len(verdicts)} differ" if len(wrong) > 1 else ""
        remedy = "restart the run with --resume" if first.what.startswith(LIVE) else "use another one, or make it again"
        raise WeightsError(
            f"{first.what} {first.version}".rstrip() + f" is not what was recorded ({shown}){others}: {remedy}"
        )
