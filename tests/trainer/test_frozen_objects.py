"""What a process that trains leaves to the garbage collector."""

import gc
import weakref

from slipstream.trainer import garbage_collection


class Node:
    """Refers to itself."""

    def __init__(self):
        self.own = self


def test_garbage_goes_and_what_lives_is_left_out_until_the_end(freezing):
    gc.disable()
    try:
        reference = weakref.ref(Node())
        garbage_collection.freeze()
        assert reference() is None
        assert gc.get_freeze_count() > 0
    finally:
        garbage_collection.unfreeze()
        gc.enable()
    assert gc.get_freeze_count() == 0
