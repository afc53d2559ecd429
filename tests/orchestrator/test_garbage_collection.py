"""The garbage collector's settings in a process that makes rollouts."""

import gc
import weakref

import pytest

from slipstream.orchestrator.garbage_collection import fewer_collections, freeze


def test_garbage_is_looked_for_less_often_inside_alone():
    def fail():
        with fewer_collections():
            inside.append(gc.get_threshold())
            raise KeyError

    before, inside = gc.get_threshold(), []
    with pytest.raises(KeyError):
        fail()
    assert gc.get_threshold() == before
    assert inside[0][0] > before[0]


def test_what_is_frozen_is_left_alone_and_holds_no_garbage():
    class Cyclic:
        pass

    made = Cyclic()
    made.itself, gone = made, weakref.ref(made)
    gc.disable()
    try:
        del made
        assert gone() is not None
        freeze()
        assert gone() is None
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()
        gc.enable()
