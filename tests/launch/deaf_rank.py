"""A rank whose thread that listens to rank 0 ends with an error; `python -m tests.launch.deaf_rank SETTINGS`."""

import queue
import sys
import threading
import time
from pathlib import Path

from slipstream.launch.ranks.child import _listen


class Broken:
    def receive(self, timeout_s):
        raise MemoryError


if __name__ == "__main__":
    threading.Thread(target=_listen, args=(Broken(), queue.SimpleQueue(), Path(sys.argv[1]))).start()
    time.sleep(60)
