"""Checks the subject of a commit message: `area: what changed`, at most 72 characters.

python dev/subject.py MESSAGE_FILE
"""

import re
import sys
from pathlib import Path

MOST = 72


def complaint(subject: str) -> str:
    """Why a subject is refused; empty if it is not."""
    if len(subject) > MOST:
        return f"the subject has {len(subject)} characters: use at most {MOST}"
    if not re.match(r"[\w./-]+: \S|Merge |Revert ", subject):
        return f"the subject {subject!r} names no area: write `area: what changed`"
    return ""


if __name__ == "__main__":
    sys.exit(complaint(Path(sys.argv[1]).read_text(encoding="utf-8").split("\n", 1)[0]))
