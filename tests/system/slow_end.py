"""`python -m tests.system.slow_end WHAT MARK ...`: the command `slipstream ...`, with a second optimizer step that
takes some minutes (`step`), or a second checkpoint whose write does (`write`). The file MARK is made when that begins.

The minutes are one call of C code, as a backward pass is: no signal handler of Python runs meanwhile. What the end says
may take long, on a busy machine; when it begins is as ever."""

import ctypes
import sys
import time
from pathlib import Path

from slipstream.cli.app import main
from slipstream.launch.recovery import grace
from slipstream.trainer.batch_trainer import BatchTrainer
from slipstream.trainer.learner import Learner

LONG_S = 200


def second_time(function, mark):
    """`function`, which is stuck in its second call before it returns."""
    count = 0

    def slow(*arguments, **options):
        nonlocal count
        result = function(*arguments, **options)
        count += 1
        if count == 2:
            mark.touch()
            end = time.monotonic() + LONG_S
            while time.monotonic() < end:  # a signal ends the C library's sleep early
                ctypes.CDLL(None).sleep(LONG_S)
        return result

    return slow


if __name__ == "__main__":
    what, mark = sys.argv[1], Path(sys.argv[2])
    grace.END_S = 30.0
    if what == "step":
        BatchTrainer.train = second_time(BatchTrainer.train, mark)
    elif what == "write":
        Learner.save = second_time(Learner.save, mark)
    sys.argv[1:] = sys.argv[3:]
    main()
