"""`provenance.json` of the run folder: what each attempt of a run was made with.

It holds names, sizes and digests, and neither settings nor values of environment variables. Two attempts are compared
by the digests of each setting, so that a folder may be moved and files renamed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import msgspec

from slipstream.config.schema import SourceKind
from slipstream.errors import DataError
from slipstream.processes.files import UNDECODABLE, write_whole
from slipstream.regular_files import read_regular

FILE = "provenance.json"
_FORMAT = 1
_SHOWN, _NAMED = 12, 3


class Source(msgspec.Struct, frozen=True, omit_defaults=True):
    """A file, data set, package or Python object that a run is made with."""

    kind: SourceKind
    setting: str
    """The setting that names it, or what imports it."""
    name: str
    """Relative to what the setting names."""
    digest: str = ""
    """sha256 of a file; revision of a data set on the hub; the digest of a Python object."""
    version: str = ""
    """Of a package, which has no digest."""
    path: str = ""
    size_bytes: int | None = None
    split: str = ""
    num_rows: int | None = None

    @property
    def group(self) -> tuple[SourceKind, str, str]:
        """What is compared together."""
        return self.kind, self.setting, self.split

    @property
    def identity(self) -> str:
        """What is compared."""
        return self.digest or f"{self.name} {self.version}".strip()

    @property
    def shown(self) -> str:
        """The beginning of the digest, or the version."""
        return self.digest[:_SHOWN] or self.version or self.name


class Attempt(msgspec.Struct, frozen=True):
    """One start of a run."""

    lineage: int
    time: float
    sources: tuple[Source, ...]
    versions: dict[str, str]
    """Of packages that run in it, but do not provide the environment."""
    changed: tuple[str, ...] = ()
    """How it differs from what it resumes."""


class _Provenance(msgspec.Struct, frozen=True):
    format: int
    attempts: tuple[Attempt, ...]


class Change(msgspec.Struct, frozen=True):
    """A difference between two attempts."""

    kind: SourceKind
    sentence: str


def read_attempts(folder: Path) -> tuple[Attempt, ...]:
    """All recorded attempts of the run in `folder`; none for a run of an earlier Slipstream. Raises DataError."""
    path = folder / FILE
    try:
        found = msgspec.json.decode(read_regular(path), type=_Provenance)
    except FileNotFoundError:
        return ()
    except (*UNDECODABLE, OSError) as error:
        raise DataError(f"{path} cannot be read ({error}): remove it to resume without comparing") from error
    if found.format != _FORMAT:
        raise DataError(
            f"{path} has format {found.format}, and this Slipstream reads {_FORMAT}: remove it to resume without "
            "comparing"
        )
    return found.attempts


def write_attempts(folder: Path, attempts: Sequence[Attempt]) -> None:
    """Replace the record. Raises `SlipstreamError` if the disk is full."""
    data = msgspec.json.encode(_Provenance(_FORMAT, tuple(attempts)))
    write_whole(folder / FILE, msgspec.json.format(data, indent=1) + b"\n")


def changes_between(before: Collection[Source], after: Collection[Source]) -> list[Change]:
    """What differs. Data that only one of them reads is a matter of other settings, which a resume tells anyway."""
    found: list[Change] = []
    for group in dict.fromkeys(source.group for source in (*before, *after)):
        old, new = ([source for source in sources if source.group == group] for sources in (before, after))
        if group[0] == "data" and not (old and new):
            continue
        if Counter(source.identity for source in old) != Counter(source.identity for source in new):
            found += [Change(group[0], sentence) for sentence in _differences(old, new)]
    return found


def _differences(old: Sequence[Source], new: Sequence[Source]) -> Iterator[str]:
    """The sources of one setting that differ, by name."""
    if len(old) == len(new) == 1 and old[0].name != new[0].name:
        yield f"{old[0].setting} was {_label(old[0])} ({old[0].shown}) and is {_label(new[0])} ({new[0].shown})"
        return
    was, now = ({source.name: source for source in sources} for sources in (old, new))
    for name in {**was, **now}:
        if name not in now:
            yield f"{_label(was[name])} ({was[name].shown}) is no longer used"
        elif name not in was:
            yield f"{_label(now[name])} ({now[name].shown}) is new"
        elif was[name].identity != now[name].identity:
            yield f"{_label(now[name])} was {was[name].shown} and is {now[name].shown}"


def _label(source: Source) -> str:
    return source.path or source.name


def told(changes: Sequence[Change]) -> str:
    """The first changes as part of a sentence, and how many more there are."""
    more = f"; and {len(changes) - _NAMED} more" if len(changes) > _NAMED else ""
    return "; ".join(change.sentence for change in changes[:_NAMED]) + more
