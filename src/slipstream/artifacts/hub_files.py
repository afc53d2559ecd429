"""Models and adapters of the Hugging Face hub at a revision, compared with their digests.

The hub's cache names each file by its digest: sha256 of large files, git's own of small ones.
"""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path

from slipstream.config.addresses import HubReference
from slipstream.errors import ConfigError
from slipstream.regular_files import open_regular

_SHA256, _GIT = re.compile(r"[0-9a-f]{64}"), re.compile(r"[0-9a-f]{40}")


def located_on_hub(reference: HubReference) -> Path:
    """The folder of the files, verified. Raises ConfigError."""
    from slipstream.trainer.model.loading import resolve_folder

    try:
        folder = resolve_folder(reference.repo, reference.revision)
    except ConfigError as error:
        raise ConfigError(f"{reference.text} cannot be used: {error}") from error
    verify_snapshot(folder)
    return folder


def verify_snapshot(folder: Path) -> None:
    """Compare all files of a snapshot with the digests in their names. Raises ConfigError for a changed file."""
    for path in sorted(folder.rglob("*")):
        if path.is_dir():
            continue
        expected = Path(os.readlink(path)).name if path.is_symlink() else ""
        if not _SHA256.fullmatch(expected) and not _GIT.fullmatch(expected):
            raise ConfigError(
                f"{path} has no digest in the hub's cache: unset HF_HUB_DISABLE_SYMLINKS, and download it again"
            )
        if (found := _digest(path, is_git=len(expected) == 40)) != expected:
            raise ConfigError(
                f"{path} has other contents than on the hub (digest {found:.12}, not {expected:.12}): remove "
                f"{folder.parents[1]}, and download it again"
            )


def _digest(path: Path, *, is_git: bool) -> str:
    with open_regular(path) as file:
        if not is_git:
            return hashlib.file_digest(file, "sha256").hexdigest()
        data = file.read()
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()
