"""Who blocks the event loop: what is watched, which frame is blamed, and what is said."""

import json
from traceback import FrameSummary

import pytest

from slipstream.orchestrator import concurrency
from slipstream.orchestrator.event_loop_watch import blame

from .test_orchestrator import Odd

OURS, LIBRARY, THEIRS = concurrency.__file__, json.__file__, "/home/me/their_code.py"


def stack_of(*files):
    return [FrameSummary(file, 10 + place, f"f{place}", lookup_line=False) for place, file in enumerate(files)]


@pytest.mark.parametrize(
    ("files", "blamed"),
    [
        ([OURS, THEIRS, LIBRARY, LIBRARY], 1),  # a library that their code calls
        ([OURS, THEIRS, THEIRS], 2),
        ([THEIRS, OURS, LIBRARY], None),  # ours, that their code calls
        ([LIBRARY, LIBRARY], None),
    ],
)
def test_the_innermost_frame_of_an_environments_code_is_blamed(files, blamed):
    where, warning = blame(stack_of(*files), 2.34, Odd())
    place = len(files) - 1 if blamed is None else blamed
    assert where == f"f{place}, line {10 + place} of {files[place]}"
    if blamed is None:
        assert warning is None
    else:
        assert warning.startswith(f"environment Odd blocks all rollouts: a synchronous call ({where}) has held")
        assert "for 2.3 s" in warning
