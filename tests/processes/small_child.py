"""A child that does one small thing; `python -m tests.processes.small_child WHAT`."""

import os
import signal
import sys
import time

from slipstream.processes.channel import Channel
from slipstream.processes.child import END
from slipstream.processes.lifeline import Parent


def main(what, *rest):
    if what == "say":
        print(os.environ.get("SECRET"), os.environ.get("OMP_NUM_THREADS"), os.environ.get("CUDA_VISIBLE_DEVICES"))
        print(rest, file=sys.stderr)
    elif what == "exit":
        sys.exit(int(rest[0]))
    elif what == "echo":
        channel = Channel.of_parent()
        while True:
            channel.send(channel.receive())
    elif what in ("live", "deaf", "polite"):
        parent = Parent()
        if what == "deaf":
            signal.signal(END, signal.SIG_IGN)
        if what == "polite":
            signal.signal(END, lambda *_: os._exit(7))
        parent.send(str(os.getpid()).encode())
        time.sleep(600)
    elif what == "alone":  # it does not notice its parent's end
        time.sleep(600)
    elif what == "quiet":
        Parent()
        time.sleep(600)
    elif what == "family":  # a child of its own in the same session
        parent = Parent()
        grandchild = os.fork()
        if grandchild:
            parent.send(str(grandchild).encode())
        time.sleep(600)


if __name__ == "__main__":
    main(*sys.argv[1:])
