"""A part of a run that does next to nothing."""

import os
import sys
import time

if sys.argv[1] == "say":
    print(os.environ.get("OURS"), os.environ.get("SECRET", ""), flush=True)
    sys.exit(3)
time.sleep(600)
