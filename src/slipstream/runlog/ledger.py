"""The ledger of a run's groups of rollouts: `ledger.sqlite` in the run folder, written by the orchestrator.

Every group ends exactly once: `trained` at a step, `dropped` for a reason (`failed`: all of its rollouts did), or
`cancelled` for one. In a run without resumes the sums equal the sums in `metrics.jsonl`. An open group is `running`,
`ready` (finished) or `batched`. Finished groups are stored whole until no crash can need them. After a crash the next
attempt uses the fresh ones again (`kept`), if its checkpoint descends from their weights.

Groups begin and finish often, and a transaction costs more than its statements. With `later`, both events are written
within `_SOON_S`, or with an earlier change of another kind; a crash may lose the events of this time.

One thread at a time writes. `balance` reads a ledger from any process.
"""

from __future__ import annotations

import contextlib
import os
import re
import sqlite3
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from slipstream.errors import ConfigError, DataError, SlipstreamError
from slipstream.processes.files import UNDECODABLE, cannot_write, disk_errors, open_own
from slipstream.records import TRAINABLE_OUTCOMES, Rollout, encode_rollouts
from slipstream.runlog.reader import read_metrics

FILE = "ledger.sqlite"
"""Name for the only orchestrator, or the first; the second has `ledger-1.sqlite`."""
_OTHERS = re.compile(r"ledger-([0-9]+)\.sqlite")
_FORMAT = 1
_SOON_S = 0.02
_ENDED = ("cancelled", "run ended")
_OPEN = ("running", "ready", "batched", "kept")
_SCHEMA = """
CREATE TABLE attempts (lineage INTEGER PRIMARY KEY, first_step INTEGER NOT NULL, shape TEXT NOT NULL);
CREATE TABLE groups (
    id TEXT NOT NULL, lineage INTEGER NOT NULL, state TEXT NOT NULL, reason TEXT NOT NULL DEFAULT '',
    step INTEGER, oldest INTEGER, newest INTEGER, tokens INTEGER NOT NULL DEFAULT 0, PRIMARY KEY (id, lineage)
) WITHOUT ROWID;
CREATE INDEX of_state ON groups (state, step);
CREATE TABLE rollouts (id TEXT NOT NULL, lineage INTEGER NOT NULL, data BLOB NOT NULL, PRIMARY KEY (id, lineage));
"""
_ENDS = "CREATE TABLE IF NOT EXISTS ends (lineage INTEGER PRIMARY KEY, step INTEGER NOT NULL, reason TEXT NOT NULL)"
"""A ledger of format 1 gets this table when an attempt first closes it."""
_OF_THE_DISK = {
    *(sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN),
    *(sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_PERM, sqlite3.SQLITE_NOLFS),
}
_FAILED = """CREATE TABLE IF NOT EXISTS failed (
    id TEXT NOT NULL, lineage INTEGER NOT NULL, reason TEXT NOT NULL, tokens INTEGER NOT NULL,
    PRIMARY KEY (id, lineage, reason)
) WITHOUT ROWID"""
"""Tokens of failed rollouts in finished groups, by outcome. In older ledgers a group's own tokens include them."""
_decoder = msgspec.msgpack.Decoder(list[Rollout])


@dataclass(frozen=True)
class Entry:
    """Groups in one state, for one reason."""

    state: str
    reason: str
    num_groups: int
    num_tokens: int
    """Sampled tokens; an unfinished group counts none. The tokens of failed rollouts are `dropped` for their outcome,
    in a separate entry without groups."""


@dataclass(frozen=True)
class Balance:
    """All groups of a run, by state and reason."""

    entries: tuple[Entry, ...]
    ended: str = ""
    """Step and reason of the last attempt's end; empty while it goes on, and after a kill."""

    def num(self, *states: str) -> int:
        """Number of groups in these states."""
        return sum(entry.num_groups for entry in self.entries if entry.state in states)

    @property
    def num_begun(self) -> int:
        """All groups."""
        return sum(entry.num_groups for entry in self.entries)

    @property
    def num_open(self) -> int:
        """Groups without an end; 0 after a run has made all its steps."""
        return self.num(*_OPEN)


class Ledger:
    """The ledger, as the orchestrator writes it."""

    def __init__(
        self,
        folder: Path,
        lineage: int,
        first_step: int,
        *,
        staleness: int,
        shape: Mapping[str, object],
        keeps: bool = True,
        saved_step: Callable[[], int] = lambda: 0,
        orchestrator: int = 0,
        later: Callable[[float, Callable[[], None]], object] | None = None,
        keep_bytes: bool = False,
        on_drop: Callable[[str, Mapping[str, int]], None] = lambda reason, tokens: None,
    ) -> None:
        """Opens or creates the ledger of the run in `folder` for attempt `lineage`, from `first_step` on. `shape`: all
        settings behind a group; a group of an earlier attempt is used again only under an equal `shape`, and never
        without `keeps`. `saved_step`: the step of the newest whole checkpoint. `orchestrator`: the number of the
        ledger's orchestrator. `later` calls a function after so many seconds, in the writing thread; without it
        everything is written at once. `keep_bytes`: finished rollouts keep their bytes, encoded here, for the transport
        of their batch. `on_drop` is called for each dropped group of an earlier attempt, with its reason and its
        sampled tokens by reason. Raises ConfigError for another format."""
        self._on_drop = on_drop
        self._lineage, self._first, self._staleness, self._saved_step = lineage, first_step, staleness, saved_step
        self._later, self._keep_bytes, self._keeps = later, keep_bytes, keeps
        self._unwritten: list[tuple[str, tuple[object, ...]]] = []
        """Statements with their values, for the next transaction."""
        self._path = path = _path_of(folder, orchestrator)
        with disk_errors(path):
            os.close(open_own(path, os.O_RDWR))
        self._data = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
        with self._reported():
            _check_tables(self._data)
            self._data.execute("PRAGMA journal_mode = WAL")
            self._data.execute("PRAGMA synchronous = NORMAL")
            self._data.execute("PRAGMA secure_delete = OFF")  # deleted rollouts need not be overwritten
        with self._writing():
            found = self._data.execute("PRAGMA user_version").fetchone()[0]
            if found == 0:  # new
                for statement in _SCHEMA.split(";"):
                    self._data.execute(statement)
                self._data.execute(f"PRAGMA user_version = {_FORMAT}")
            elif found != _FORMAT:
                raise ConfigError(f"{path} has format {found}, and this Slipstream reads {_FORMAT}: start a new run")
            self._data.execute(_FAILED)
            self.survivors = self._survivors()
            self._take_over(repr(sorted(shape.items())))

    def kept(
        self, group: str, step: int, is_in_time: Callable[[int], bool] = lambda oldest: True
    ) -> tuple[int, list[Rollout]] | None:
        """Makes a group finished by an earlier attempt ready: the step of its oldest version, and its rollouts. None if
        there is no such group. None also for one with damaged rollouts, too stale at `step`, or late because
        `is_in_time` refuses its oldest version; this one is dropped."""
        query = "SELECT lineage, oldest, tokens, data FROM groups JOIN rollouts USING (id, lineage)"
        with self._reported():
            row = self._data.execute(f"{query} WHERE id = ? AND state = ?", (group, "kept")).fetchone()
        if row is None:
            return None
        lineage, oldest, tokens, data = row
        rollouts = _decoded(data) if isinstance(oldest, int) else None
        reason = "damaged" if rollouts is None else ""
        if rollouts is not None and (oldest + self._staleness < step or not is_in_time(oldest)):
            reason = "stale"
        if rollouts is None or reason:
            self._set(group, "dropped", reason, lineage=lineage)
            self._tell_drop(reason, group, lineage, tokens)
            return None
        self._set(group, "ready", lineage=lineage)
        return oldest, rollouts

    def begin(self, group: str) -> None:
        """A group begins."""
        self._write_soon(
            ("INSERT INTO groups (id, lineage, state) VALUES (?, ?, 'running')", (group, self._lineage)),
        )

    def finish(self, group: str, rollouts: Sequence[Rollout]) -> None:
        """All rollouts of a group have ended."""
        steps = [_step_of(s.version) for rollout in rollouts for q in rollout.sequences for s in q.versions]
        tokens = sum(rollout.num_sampled for rollout in rollouts if rollout.outcome in TRAINABLE_OUTCOMES)
        failed = Counter[str]()
        for rollout in rollouts:
            if rollout.outcome not in TRAINABLE_OUTCOMES:
                failed[rollout.outcome] += rollout.num_sampled
        data = encode_rollouts(rollouts, keep=self._keep_bytes)
        oldest, newest = min(steps, default=self._first), max(steps, default=self._first)
        self._write_soon(
            (
                "UPDATE groups SET state = 'ready', oldest = ?, newest = ?, tokens = ? WHERE id = ? AND lineage = ?",
                (oldest, newest, tokens, group, self._lineage),
            ),
            ("INSERT INTO rollouts VALUES (?, ?, ?)", (group, self._lineage, data)),
            *(("INSERT INTO failed VALUES (?, ?, ?, ?)", (group, self._lineage, *each)) for each in failed.items()),
        )

    def drop(self, group: str, reason: str) -> None:
        """A finished group will not be trained on."""
        self._set(group, "dropped", reason)

    def cancel(self, group: str, reason: str) -> None:
        """A running group is given up."""
        self._set(group, "cancelled", reason)

    def batch(self, step: int, groups: Iterable[str]) -> None:
        """These groups are the batch of `step`."""
        with self._writing():
            for group in groups:
                self._data.execute(
                    "UPDATE groups SET state = 'batched', step = ? WHERE id = ? AND state = 'ready'", (step, group)
                )

    def trained(self, step: int) -> None:
        """All batches of steps before `step` were trained on. Their rollouts are deleted once no crash can need them:
        the newest checkpoint includes their step, or does not descend from their weights."""
        saved = self._saved_step()
        with self._writing():
            self._data.execute("UPDATE groups SET state = 'trained' WHERE state = 'batched' AND step < ?", (step,))
            self._data.execute(  # CROSS JOIN: over the few rollouts, not over all groups ever trained on
                "DELETE FROM rollouts WHERE (id, lineage) IN (SELECT id, lineage FROM rollouts CROSS JOIN groups "
                "USING (id, lineage) WHERE state = 'trained' AND (step < ? OR newest > ?))",
                (saved, saved),
            )

    def close(self, step: int, *, is_whole: bool = False, reason: str = "", unused: str = "") -> None:
        """Ends the attempt, with the batches of steps before `step` trained on: running groups are cancelled, finished
        ones wait for the next attempt. If the run `is_whole`, groups still kept from earlier attempts are dropped as
        `surplus`: no batch had room for them any more. `reason`: why the attempt ends. `unused`: the reason to drop
        finished groups of this attempt, too."""
        try:
            self.trained(step)
            with self._writing():
                self._data.execute(_ENDS)
                self._data.execute("INSERT OR REPLACE INTO ends VALUES (?, ?, ?)", (self._lineage, step, reason))
                self._data.execute(
                    "UPDATE groups SET state = 'cancelled', reason = 'run ended' WHERE state = 'running'"
                )
                if unused:
                    ready = "state = 'ready' AND lineage = ?"
                    ids = f"SELECT id, lineage FROM groups WHERE {ready}"
                    self._data.execute(f"DELETE FROM rollouts WHERE (id, lineage) IN ({ids})", (self._lineage,))
                    drop = f"UPDATE groups SET state = 'dropped', reason = ? WHERE {ready}"
                    self._data.execute(drop, (unused, self._lineage))
                if is_whole:
                    kept = "SELECT id, lineage FROM groups WHERE state = 'kept'"
                    self._data.execute(f"DELETE FROM rollouts WHERE (id, lineage) IN ({kept})")
                    self._data.execute("UPDATE groups SET state = 'dropped', reason = 'surplus' WHERE state = 'kept'")
        finally:
            self._data.close()

    def _take_over(self, shape: str) -> None:
        """Decide on the groups left by earlier attempts."""
        last = self._data.execute("SELECT shape FROM attempts ORDER BY lineage DESC LIMIT 1").fetchone()
        self._data.execute("INSERT INTO attempts VALUES (?, ?, ?)", (self._lineage, self._first, shape))
        self._data.execute("UPDATE groups SET state = 'cancelled', reason = 'process died' WHERE state = 'running'")
        self._data.execute("UPDATE groups SET state = 'trained' WHERE state = 'batched' AND step < ?", (self._first,))
        left = self._data.execute(
            "SELECT id, lineage, tokens, data FROM groups LEFT JOIN rollouts USING (id, lineage) "
            "WHERE state IN ('ready', 'batched', 'kept') OR (state = 'trained' AND step >= ?)",
            (self._first,),
        ).fetchall()
        for group, lineage, tokens, data in left:
            reason = self._why_dropped(data, last is not None and last[0] != shape)
            state = "dropped" if reason else "kept"
            if reason:
                self._tell_drop(reason, group, lineage, tokens)
            self._data.execute(
                "UPDATE groups SET state = ?, reason = ?, step = NULL WHERE id = ? AND lineage = ?",
                (state, reason, group, lineage),
            )

    def _why_dropped(self, data: bytes | None, is_other: bool) -> str:
        """Why a group left by an earlier attempt is of no use; empty if it is of use."""
        if is_other:
            return "other settings"
        if data is None or not self._keeps:
            return "undone by a resume"
        rollouts = _decoded(data)
        if rollouts is None:
            return "damaged"
        return "" if self._descends(rollouts) else "undone by a resume"

    def _tell_drop(self, reason: str, group: str, lineage: int, tokens: int) -> None:
        query = "SELECT reason, tokens FROM failed WHERE id = ? AND lineage = ?"
        self._on_drop(reason, {reason: tokens, **dict(self._data.execute(query, (group, lineage)).fetchall())})

    def _survivors(self) -> dict[int, int]:
        """For each earlier lineage, the step of its newest version among the ancestors of this attempt's weights."""
        starts = dict(self._data.execute("SELECT lineage, first_step FROM attempts").fetchall())
        starts[self._lineage] = self._first
        earlier = (lineage for lineage in starts if lineage < self._lineage)
        return {lineage: min(step for other, step in starts.items() if other > lineage) for lineage in earlier}

    def _descends(self, rollouts: Sequence[Rollout]) -> bool:
        """Whether all tokens were sampled by ancestors of this attempt's weights."""
        names = {span.version for rollout in rollouts for q in rollout.sequences for span in q.versions}
        return all(_step_of(name) <= self.survivors.get(int(name.partition(".")[0]), -1) for name in names)

    def _set(self, group: str, state: str, reason: str = "", lineage: int | None = None) -> None:
        """Set the group's row of `lineage`, by default its only open one; delete its rollouts unless it is ready."""
        with self._writing():
            if lineage is None:
                query = "SELECT lineage FROM groups WHERE id = ? AND state IN ('running', 'ready', 'kept')"
                (lineage,) = self._data.execute(query, (group,)).fetchone()
            where = "WHERE id = ? AND lineage = ?"
            self._data.execute(f"UPDATE groups SET state = ?, reason = ? {where}", (state, reason, group, lineage))
            if state != "ready":
                self._data.execute(f"DELETE FROM rollouts {where}", (group, lineage))

    @contextlib.contextmanager
    def _reported(self) -> Generator[None]:
        """Raises `SlipstreamError` if the file cannot be written or is no ledger."""
        try:
            yield
        except sqlite3.Error as error:
            if getattr(error, "sqlite_errorcode", 0) & 0xFF in _OF_THE_DISK:  # the last byte is the kind
                raise cannot_write(self._path, str(error)) from error
            raise DataError(
                f"{self._path} is damaged ({error}): remove it and what else begins with its name, and resume; groups "
                "that it holds are generated again"
            ) from error

    @contextlib.contextmanager
    def _writing(self) -> Generator[None]:
        """One transaction."""
        with self._reported(), self._data:
            self._data.execute("BEGIN IMMEDIATE")
            for statement, values in self._unwritten:
                self._data.execute(statement, values)
            yield
        self._unwritten.clear()

    def _write_soon(self, *statements: tuple[str, tuple[object, ...]]) -> None:
        is_first = not self._unwritten
        self._unwritten += statements
        if self._later is None:
            self._write()
        elif is_first:
            self._later(_SOON_S, self._write_quietly)

    def _write(self) -> None:
        if self._unwritten:
            with self._writing():
                pass

    def _write_quietly(self) -> None:
        with contextlib.suppress(SlipstreamError):  # the next call meets the same error and raises it
            self._write()


def end_ledgers(folder: Path, number: int, lineage: int, first_step: int) -> None:
    """Drop the groups left by orchestrators from `number` on: an earlier attempt had more of them."""
    for other in _others(folder):
        if other >= number:
            Ledger(folder, lineage, first_step, staleness=0, shape={}, orchestrator=other).close(first_step)


def end_whole(folder: Path, step: int) -> None:
    """End all open groups in the ledgers of a run. It was killed after its end at `step`, before it could close them.
    Raises DataError if a ledger cannot be written."""
    for path in paths_of(folder):
        try:
            with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as data:
                _check_tables(data)
                data.execute("BEGIN IMMEDIATE")
                data.execute("UPDATE groups SET state = 'cancelled', reason = 'run ended' WHERE state = 'running'")
                data.execute("UPDATE groups SET state = 'trained' WHERE state = 'batched' AND step < ?", (step,))
                data.execute(
                    "UPDATE groups SET state = 'dropped', reason = 'surplus' "
                    "WHERE state IN ('ready', 'batched', 'kept')"
                )
                data.execute("DELETE FROM rollouts")
                data.execute("COMMIT")
        except sqlite3.Error as error:
            raise DataError(f"{path} cannot be closed ({error}), so `slipstream ledger` counts open groups") from error


def _others(folder: Path) -> list[int]:
    """The orchestrators with a ledger in the run folder, without the first."""
    names = map(_OTHERS.fullmatch, os.listdir(folder))
    return sorted(int(name[1]) for name in names if name)


def paths_of(folder: Path) -> list[Path]:
    """All ledgers in the run folder, in the order of their orchestrators."""
    return [path for path in (_path_of(folder, other) for other in (0, *_others(folder))) if path.is_file()]


def _path_of(folder: Path, orchestrator: int) -> Path:
    return folder / (f"ledger-{orchestrator}.sqlite" if orchestrator else FILE)


def balance(folder: Path) -> Balance | None:
    """How the groups of the run in `folder` ended; None without a ledger. Groups of batches skipped in `metrics.jsonl`
    (`train/skipped`) count as dropped, with the reason `skipped`. Raises DataError if it cannot be read."""
    paths = paths_of(folder)
    if folder / FILE not in paths:
        return None
    found: Counter[tuple[str, str]] = Counter()
    tokens: Counter[tuple[str, str]] = Counter()
    skipped = msgspec.json.encode(_skipped_steps(folder)).decode()
    for path in paths:
        for state, reason, num_groups, num_tokens in _read(path, _OF_GROUPS, skipped):
            found[state, reason] += num_groups
            tokens[state, reason] += num_tokens
        if _has_table(path, "failed"):
            for reason, num_tokens in _read(path, "SELECT reason, SUM(tokens) FROM failed GROUP BY reason"):
                found["dropped", reason] += 0
                tokens["dropped", reason] += num_tokens
    return Balance(tuple(Entry(*key, found[key], tokens[key]) for key in sorted(found)), _end_of(paths[0]))


_OF_GROUPS = """
WITH ended AS (SELECT *, state = 'trained' AND step IN (SELECT value FROM json_each(?)) AS taught_nothing FROM groups)
SELECT iif(taught_nothing, 'dropped', state), iif(taught_nothing, 'skipped', reason), COUNT(*), SUM(tokens)
FROM ended GROUP BY 1, 2 ORDER BY 1, 2
"""


def _skipped_steps(folder: Path) -> list[int]:
    """The batches without an optimizer step; a row has the step after its batch."""
    if not (folder / "metrics.jsonl").is_file():
        return []
    return [row["step"] - 1 for row in read_metrics(folder) if row.get("train/skipped")]


def _has_table(path: Path, name: str) -> bool:
    return bool(_read(path, "SELECT name FROM sqlite_master WHERE name = ?", name))


def _end_of(path: Path) -> str:
    if not _has_table(path, "ends"):
        return ""
    query = "SELECT ends.step, reason FROM ends WHERE lineage = (SELECT MAX(lineage) FROM attempts)"
    return "".join(f"at step {step}: {reason or 'no reason was given'}" for step, reason in _read(path, query))


def _check_tables(data: sqlite3.Connection) -> None:
    """Raise DatabaseError for a file with views or triggers: no ledger has any, and one may compute for ever."""
    if others := data.execute("SELECT name FROM sqlite_master WHERE type IN ('view', 'trigger')").fetchall():
        raise sqlite3.DatabaseError(f"it has the view or trigger {others[0][0]!r}")


def _read(path: Path, query: str, *values: object) -> list[tuple[Any, ...]]:
    # Without a place for its WAL, SQLite opens only an immutable file: one with nothing left in a WAL.
    waits = path.with_name(f"{path.name}-wal").exists() or os.access(path.parent, os.W_OK)
    try:
        mode = "mode=ro" if waits else "mode=ro&immutable=1"
        with contextlib.closing(sqlite3.connect(f"{path.absolute().as_uri()}?{mode}", uri=True)) as data:
            _check_tables(data)
            return data.execute(query, values).fetchall()
    except sqlite3.Error as error:
        raise DataError(f"{path} cannot be read ({error}): it is no ledger, or was not begun") from error


def _decoded(data: Any) -> list[Rollout] | None:
    """The rollouts of a group; None if the file was damaged."""
    try:
        rollouts = _decoder.decode(data)
        for name in {span.version for rollout in rollouts for q in rollout.sequences for span in q.versions}:
            _ = int(name.partition(".")[0]), _step_of(name)
    except (*UNDECODABLE, ValueError, TypeError):
        return None
    return rollouts


def _step_of(version: str) -> int:
    return int(version.partition(".")[2])
