"""The short forms of an error's message, and what kind of failure each class is."""

from typing import get_args

import pytest

from slipstream import errors
from slipstream.errors import FailureClass, first_line, one_line


@pytest.mark.parametrize(
    ("error", "first", "one"),
    [
        (ValueError("a b\n  c"), "a b", "ValueError: a b c"),
        (ValueError("\n a"), "a", "ValueError: a"),
        (ValueError(), "ValueError", "ValueError"),
        (OSError("x" * 400), "x" * 300, "OSError: " + "x" * 300),
    ],
)
def test_an_error_on_one_line(error, first, one):
    assert first_line(error) == first
    assert one_line(error) == one


def test_every_error_is_of_a_known_class_and_those_that_a_restart_may_mend_say_so():
    kinds = {
        name: kind
        for name, kind in vars(errors).items()
        if isinstance(kind, type) and issubclass(kind, errors.SlipstreamError)
    }
    assert {kind.failure_class for kind in kinds.values()} <= set(get_args(FailureClass))
    retriable = {name for name, kind in kinds.items() if kind.is_retriable}
    assert retriable == {
        *("EngineError", "DeadlineError", "RankError", "RankDeadlineError", "OrchestratorError", "TrainerLost"),
        *("OutOfMemory", "Interrupted"),
    }
