"""The two short forms of an error's message."""

import pytest

from slipstream.errors import first_line, one_line


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
