"""A process that does what its argument says, for the tests of the supervisor: a fork, with everything imported.
`python -m tests.launch.supervisor_process PROGRAM`."""

import sys

if __name__ == "__main__":
    exec(sys.argv[1], {"__name__": "__main__"})
