"""Python's garbage collector in a process that trains.

When the first step is done there are more than half a million objects that stay: what was imported, modules, graphs of
the compiler. To look through them takes 0.4 s, which the collector does whenever a quarter as many have come since;
over ranks all wait for the one that does.
"""

from __future__ import annotations

import gc


def leave_out() -> None:
    """From now on the collector looks at new objects only, until `take_in`; what nobody needs now is freed first."""
    gc.collect()
    gc.freeze()


def take_in() -> None:
    """The collector looks at all objects again."""
    gc.unfreeze()
