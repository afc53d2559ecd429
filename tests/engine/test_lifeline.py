"""A child that follows its standard input: it ends with its supervisor and takes its files along."""

import signal
import subprocess
import sys

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
