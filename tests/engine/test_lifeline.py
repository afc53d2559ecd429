"""Children that end with their parent: by their standard input, taking their files along, or by the parent's pid."""

import signal
import subprocess
import sys
import time
from pathlib import Path

CHILD = """
import sys, time
from slipstream.inference.plugin import lifeline
lifeline.remove_at_end(sys.argv[1])
lifeline.remove_at_end(sys.argv[1] + "-never-there")
lifeline.follow_stdin()
print("up", flush=True)
time.sleep(60)
"""


def test_a_child_whose_supervisor_is_gone(tmp_path):
    file = tmp_path / "counters"
    file.touch()
    command = [sys.executable, "-c", CHILD, str(file)]
    # A session of its own: it kills its whole group.
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True) as child:
        assert child.stdout is not None
        assert child.stdin is not None
        assert child.stdout.readline() == b"up\n"
        child.stdin.close()
        assert child.wait(10) == -signal.SIGKILL
    assert not file.exists()


PARENT = """
import subprocess, sys
child = "import time; from slipstream.inference.plugin import lifeline; lifeline.follow_parent(); "
child += "print('up', flush=True); time.sleep(60)"
process = subprocess.Popen([sys.executable, "-c", child], stdout=subprocess.PIPE)
assert process.stdout.readline() == b"up\\n"
print(process.pid)
"""


def test_a_child_that_follows_its_parent():
    # Its standard output is a pipe of its own, so that `run` does not wait for it.
    result = subprocess.run([sys.executable, "-c", PARENT], capture_output=True, text=True, check=True, timeout=60)
    state, until = Path(f"/proc/{int(result.stdout)}/stat"), time.monotonic() + 20
    while state.exists() and state.read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < until, "it outlives its parent"
        time.sleep(0.05)
