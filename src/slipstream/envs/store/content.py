"""The content of an environment's folder: its files, their digest, and their archive.

The digest is of names, sizes and contents alone. An archive is a plain tar file of regular files. Reading one executes
nothing; links, special files, paths out of the folder and repeated names are refused.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tarfile
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from slipstream.errors import ConfigError, DataError
from slipstream.regular_files import open_regular

MAX_FILES, MAX_BYTES = 10_000, 1 << 30
MAX_DEPTH = 32
"""Folders of a file, one in the other."""
MAX_ARCHIVE_BYTES = MAX_BYTES + MAX_FILES * (8 << 10)
"""With a tar file's other bytes: long names, and partly filled blocks."""
_HEADER = b"slipstream environment 1\n"
_CACHES = ("__pycache__",)
_LEFT_OUT = ("runs", "models")
_READ_ONLY = 0o400


def files_in(folder: Path, *, is_working: bool = False) -> tuple[dict[str, Path], int]:
    """The files of an environment's folder by relative name, and how many were left out. Compiled Python is left out;
    of a working folder also hidden files, and the folders `runs` and `models`. Raises ConfigError for a link or a
    special file, and for too many or too large files."""
    found: dict[str, Path] = {}
    num_left_out = size_bytes = 0
    waiting = [folder]
    while waiting:
        here = waiting.pop()
        for entry in sorted(os.scandir(here), key=lambda entry: entry.name):
            path = Path(entry.path)
            name = path.relative_to(folder).as_posix()
            if _is_left_out(name, is_working=is_working):
                num_left_out += 1
            elif entry.is_dir(follow_symlinks=False):
                waiting.append(path)
            elif not entry.is_file(follow_symlinks=False):
                kind = "link" if entry.is_symlink() else "special file"
                raise ConfigError(f"{path} is a {kind}, which no environment may hold: put the file itself there")
            else:
                if problem := why_no_name(name):
                    raise ConfigError(f"{path} {problem}: rename it")
                found[name] = path
                size_bytes += entry.stat(follow_symlinks=False).st_size
    if len(found) > MAX_FILES or size_bytes > MAX_BYTES:
        raise ConfigError(
            f"{folder} holds {len(found)} files of {size_bytes:,} bytes, and an environment at most {MAX_FILES} of "
            f"{MAX_BYTES:,}: keep data elsewhere and name its path in environment.settings"
        )
    return dict(sorted(found.items())), num_left_out


def _is_left_out(name: str, *, is_working: bool) -> bool:
    parts = PurePosixPath(name).parts
    if parts[-1] in _CACHES:
        return True
    return is_working and (parts[-1].startswith(".") or name.endswith(".pyc") or name in _LEFT_OUT)


def digest_of(files: Mapping[str, Path]) -> str:
    """sha256 over name, size and sha256 of every file, in the order of names."""
    found = hashlib.sha256(_HEADER)
    for name, path in sorted(files.items()):
        with open_regular(path) as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            size = os.fstat(file.fileno()).st_size
        found.update(f"{digest} {size} {name}\n".encode())
    return found.hexdigest()


def digest_of_folder(folder: Path) -> str:
    """The digest of a folder with an environment and nothing else. Raises ConfigError for a link in it."""
    return digest_of(files_in(folder)[0])


def why_no_name(name: str) -> str:
    """Why a file of an environment cannot have this name; empty if it can."""
    path = PurePosixPath(name)
    if not name or path.is_absolute() or name != path.as_posix() or not {"..", "."}.isdisjoint(path.parts):
        return "has a name that leads out of the folder"
    if len(path.parts) > MAX_DEPTH:
        return f"lies in more than {MAX_DEPTH} folders"
    if any(character in "\\:" or not character.isprintable() for character in name):
        return "has a name with a character that no file of an environment may have"
    if not {*_CACHES}.isdisjoint(path.parts) or name.endswith(".pyc"):
        return "is compiled Python"
    return ""


def write_archive(archive: Path, files: Mapping[str, Path]) -> None:
    """Write the files, without owners and times."""
    with tarfile.open(archive, "x:", format=tarfile.PAX_FORMAT) as tar:
        for name, path in sorted(files.items()):
            with open_regular(path) as file:
                member = tarfile.TarInfo(name)
                member.size, member.mode = os.fstat(file.fileno()).st_size, 0o644
                tar.addfile(member, file)


def unpack(archive: Path, folder: Path, place: str = "") -> None:
    """Write an archive's files into the new, empty `folder`, readable by their owner alone. Raises DataError for a
    damaged archive, or one with anything but plain files of this folder; `place`: the origin of its copy."""
    names, size_bytes = set[str](), 0
    place = place or str(archive)
    try:
        if archive.stat().st_size > MAX_ARCHIVE_BYTES:
            raise DataError(f"{place} has more than {MAX_ARCHIVE_BYTES:,} bytes: it is no archive of an environment")
        with open_regular(archive) as file, tarfile.open(fileobj=file, mode="r:") as tar:
            for member in tar:
                size_bytes += member.size
                if problem := _why_no_member(member, names, size_bytes):
                    raise DataError(f"{place} cannot be unpacked: {member.name!r:.80} {problem}")
                names.add(member.name)
                source, target = tar.extractfile(member), folder / member.name
                assert source is not None
                target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                with target.open("xb") as new:
                    shutil.copyfileobj(source, new)
                target.chmod(_READ_ONLY)
    # Headers about headers nest without a bound, and numbers in them have any size.
    except (tarfile.TarError, EOFError, ValueError, RecursionError, OverflowError, KeyError) as error:
        raise DataError(f"{place} is no whole archive ({error}): push the environment again") from error
    except OSError as error:
        raise DataError(f"{place} cannot be unpacked into {folder} ({error.strerror or error})") from error


def _why_no_member(member: tarfile.TarInfo, names: set[str], size_bytes: int) -> str:
    if member.type not in (tarfile.REGTYPE, tarfile.AREGTYPE) or member.issparse():
        return "is a link, a folder or a special file, where only plain files may be"
    if problem := why_no_name(member.name):
        return problem
    if member.name in names:
        return "is there twice"
    if len(names) >= MAX_FILES or size_bytes > MAX_BYTES:
        return f"goes beyond {MAX_FILES} files or {MAX_BYTES:,} bytes"
    return ""
