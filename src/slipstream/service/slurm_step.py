"""Becomes `srun` in the folder of the first argument: the run's step in a job of Slurm, which ends it with the job."""

from __future__ import annotations

import os
import sys


def main() -> None:
    """Run the command of the other arguments."""
    os.chdir(sys.argv[1])
    os.execvp(sys.argv[2], sys.argv[2:])


if __name__ == "__main__":
    main()
