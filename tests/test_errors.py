"""The short forms of an error's message, and what kind of failure each class is."""

from typing import get_args

import pytest

from slipstream import errors
from slipstream.config.schema import RunConfig
from slipstream.errors import SECTIONS, ConfigError, FailureClass, first_line, one_line


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


@pytest.mark.parametrize(
    ("message", "setting"),
    [
        ("training.ranks = 3 does not divide 8: use 4 (run.toml:3)", "training.ranks"),
        ("the run needs 3 GiB: set model.fp32_head = false, or lora.rank = 8", "model.fp32_head"),
        ("model.path 'x' has sinks: set training.packing = false", "training.packing"),
        ("environment.mixture.sums.name is missing: set it", "environment.mixture.sums.name"),
        ("sampling.stop[1] = 5 is a whole number: use a text", "sampling.stop"),
        ("run.toml cannot be read: No such file", ""),
        ("/runs/model.path = 5 is no folder, and model.layers.1 has no weights", ""),
    ],
)
def test_an_error_has_the_setting_that_it_names_first(message, setting):
    assert ConfigError(message).setting == setting


def test_sections_of_errors_are_those_of_a_run_file():
    assert set(SECTIONS) == RunConfig.model_fields.keys()
