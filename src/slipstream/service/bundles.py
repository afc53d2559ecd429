"""The code of a run file on its way to a service on another machine.

Guarantees: the files are named by the digest of their content. Names lead nowhere else; number and size are bounded.
Nothing is executed. Data goes by path or address.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
import shutil
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from slipstream.config.parse.keys import quoted
from slipstream.envs.store.content import why_no_name
from slipstream.errors import ConfigError
from slipstream.launch.provenance.imports import files_of
from slipstream.processes.temporary import temporary
from slipstream.regular_files import read_regular

MAX_FILES, MAX_BYTES = 200, 1 << 20
FOLDER = "code"
"""Beside the run file, and in the state folder."""
_CODE = re.compile(r"((?:trl:|verifiers/)?)(/.*\.py)((?::[^/:]*)?)")
_DIGEST = re.compile(r"[0-9a-f]{64}")


def pack(settings: str) -> tuple[str, dict[str, bytes]]:
    """Settings whose Python files are below `code/`, and these files with all that they import from their folders.
    Raises ConfigError for too many or too large files."""
    files: dict[str, bytes] = {}
    roots: dict[Path, int] = {}
    for text in dict.fromkeys(_strings(tomllib.loads(settings))):
        found = _CODE.fullmatch(text)
        if found is None or not (path := Path(found[2]).resolve()).is_file():
            continue
        root = f"{FOLDER}/{roots.setdefault(path.parent, len(roots))}"
        for file in files_of(path):
            name = f"{root.removeprefix(f'{FOLDER}/')}/{file.relative_to(path.parent).as_posix()}"
            files[name] = read_regular(file)
            if problem := _why_too_large(files):
                raise ConfigError(f"the code of the run {problem}: install it as a package on the service's machine")
        new = f"{found[1]}{root}/{path.name}{found[3]}"
        settings = settings.replace(quoted(text), quoted(new))
    return settings, files


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _strings(each)


def _why_too_large(files: Mapping[str, bytes]) -> str:
    size = sum(map(len, files.values()))
    if len(files) <= MAX_FILES and size <= MAX_BYTES:
        return ""
    return f"has {len(files)} files of {size:,} bytes, and a bundle at most {MAX_FILES} of {MAX_BYTES:,}"


def digest_of(files: Mapping[str, bytes]) -> str:
    """sha256 over names and contents, in the order of names."""
    lines = [f"{hashlib.sha256(data).hexdigest()} {len(data)} {name}\n" for name, data in sorted(files.items())]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def encoded(files: Mapping[str, bytes]) -> dict[str, str]:
    """The files for JSON."""
    return {name: base64.b64encode(data).decode() for name, data in files.items()}


def unpack(root: Path, digest: str, code: Mapping[str, str]) -> Path:
    """The folder of `encoded` files below `root`, by their digest. Raises ConfigError for a hostile or damaged
    bundle."""
    if not _DIGEST.fullmatch(digest):
        raise ConfigError(f"the digest of the code is {digest!r:.80}: give 64 hexadecimal digits")
    files: dict[str, bytes] = {}
    for name, text in code.items():
        if problem := why_no_name(name) or ("" if name.endswith(".py") else "is no Python file"):
            raise ConfigError(f"the code cannot be unpacked: {name!r:.80} {problem}")
        try:
            files[name] = base64.b64decode(text, validate=True)
        except (binascii.Error, ValueError):
            raise ConfigError(f"the code cannot be unpacked: {name!r:.80} is not in base64") from None
        if problem := _why_too_large(files):
            raise ConfigError(f"the code cannot be unpacked: it {problem}")
    if (found := digest_of(files)) != digest:
        raise ConfigError(f"the code has digest {found:.12}, and {digest:.12} was announced: send it again")
    (root / FOLDER).mkdir(exist_ok=True, mode=0o700)
    target = root / FOLDER / digest
    if _is_whole(target, files):
        return target
    with temporary("code", root / FOLDER) as place:
        try:
            for name, data in files.items():
                path = place / "whole" / name
                path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                path.write_bytes(data)
        except (FileExistsError, NotADirectoryError, IsADirectoryError) as error:
            raise ConfigError(f"the code cannot be unpacked: {error.filename} is a file and a folder") from None
        shutil.rmtree(target, ignore_errors=True)
        (place / "whole").rename(target)
    return target


def _is_whole(folder: Path, files: Mapping[str, bytes]) -> bool:
    """Whether an earlier run has brought the same files, and nobody has changed them."""
    try:
        return all(read_regular(folder / name) == data for name, data in files.items())
    except OSError:
        return False
