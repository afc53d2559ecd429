"""The service's index of runs, in SQLite or Postgres by SQLAlchemy: a copy of the folders' records, for lists.

Guarantees: an empty database is filled from the folders, so deleting it loses nothing. A record is read again whenever
its file has changed.
"""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path

import msgspec
import sqlalchemy as sa
from sqlalchemy.exc import SQLAlchemyError

from slipstream.errors import ConfigError, SlipstreamError
from slipstream.runlog.files import SERVICE_FOLDER
from slipstream.runlog.redaction import hide_userinfo
from slipstream.service.records import Record
from slipstream.service.store import Store, record_of

DATABASE = "SLIPSTREAM_DATABASE"
"""Environment variable: SQLAlchemy's URL of the database; it may hold a password, so there is no option for it."""
_TABLES = sa.MetaData()
_RUNS = sa.Table(
    "slipstream_runs",
    _TABLES,
    sa.Column("host", sa.String(255), primary_key=True),
    sa.Column("id", sa.String(100), primary_key=True),
    sa.Column("owner", sa.String(255), nullable=False, index=True),
    sa.Column("state", sa.String(20), nullable=False, index=True),
    sa.Column("submitted", sa.Float, nullable=False),
    sa.Column("folder", sa.Text, nullable=False),
    sa.Column("changed_ns", sa.BigInteger, nullable=False),
    sa.Column("record", sa.Text, nullable=False),
)


class Index:
    """The index of a store."""

    def __init__(self, store: Store, url: str = "") -> None:
        """By default a SQLite file in the store's folder. Raises ConfigError."""
        self._store, self._host = store, socket.gethostname()
        try:
            self._engine = sa.create_engine(url or f"sqlite:///{store.root / 'index.sqlite'}", pool_pre_ping=True)
            _TABLES.create_all(self._engine)
        except (SQLAlchemyError, ImportError) as error:
            reason = hide_userinfo(str(error).partition("\n")[0])
            named = f"the database {hide_userinfo(url)}" if url else f"the service's database in {store.root}"
            remedy = DATABASE if url else "the disk and the rights of this folder"
            raise ConfigError(f"{named} cannot be used ({reason}): look at {remedy}") from None

    def refresh(self) -> None:
        """Bring the index up to the folders."""
        with self._engine.begin() as connection:
            mine = _RUNS.c.host == self._host
            rows = connection.execute(sa.select(_RUNS.c.id, _RUNS.c.folder, _RUNS.c.changed_ns).where(mine)).all()
            known = {str(row.id): (str(row.folder), int(row.changed_ns)) for row in rows}
            there = self._store.all()
            for name in known.keys() - there.keys():
                connection.execute(sa.delete(_RUNS).where(mine, _RUNS.c.id == name))
            for name, folder in there.items():
                found = (str(folder), _changed_ns(folder))
                if known.get(name) == found:
                    continue
                connection.execute(sa.delete(_RUNS).where(mine, _RUNS.c.id == name))
                with contextlib.suppress(SlipstreamError, OSError):
                    record = record_of(folder)
                    if record is None or record.id != name:
                        continue
                    values = {"host": self._host, "id": name, "owner": record.owner, "state": record.state}
                    values |= {"submitted": record.submitted, "folder": found[0], "changed_ns": found[1]}
                    text = msgspec.json.encode(record).decode()
                    connection.execute(sa.insert(_RUNS).values(**values, record=text))

    def records(self) -> list[tuple[Path, Record]]:
        """All runs of this host, in the order of submission."""
        self.refresh()
        query = sa.select(_RUNS.c.folder, _RUNS.c.record).where(_RUNS.c.host == self._host)
        with self._engine.connect() as connection:
            rows = connection.execute(query.order_by(_RUNS.c.submitted, _RUNS.c.id)).all()
        return [(Path(row.folder), msgspec.json.decode(row.record, type=Record)) for row in rows]

    def close(self) -> None:
        """Close all connections."""
        self._engine.dispose()


def _changed_ns(folder: Path) -> int:
    """When the record was replaced last; a replaced file has a new inode, and clocks are coarse."""
    try:
        state = os.stat(folder / SERVICE_FOLDER / "record.json")
    except OSError:
        return 0
    return state.st_mtime_ns ^ (state.st_ino & 0xFFFFFFFF)
