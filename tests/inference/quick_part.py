"""A part of a run that does next to nothing."""

import os
import signal
import sys
import time

from slipstream.processes import child_process

if sys.argv[1] == "say":
    print(os.environ.get("VLLM_PLUGINS"), os.environ.get("SECRET", ""), flush=True)
    sys.exit(3)
if sys.argv[1] == "deaf":
    signal.signal(child_process.END, signal.SIG_IGN)
    print("deaf", flush=True)
time.sleep(600)
