"""Another user of this machine, for tests of what such a user can do. They need root, and are skipped without it."""

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

NOBODY = 65534
needs_root = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("setpriv") is None, reason="only root can act as another user"
)


def as_other_user(script: str, folder: Path) -> None:
    """Run a shell script as another user in `folder`."""
    user = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
    subprocess.run([*user, "sh", "-ec", script], cwd=folder, check=True, timeout=60, env={"PATH": os.environ["PATH"]})


@pytest.fixture
def shared_folder():
    """A folder as /tmp is: everybody may write, and remove only what is theirs."""
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    folder.chmod(0o1777)
    yield folder
    shutil.rmtree(folder)
