import os

from slipstream.processes.variables import variables_set


def test_variables_are_as_they_were_afterwards(monkeypatch):
    monkeypatch.setenv("SLIPSTREAM_A", "before")
    with variables_set({"SLIPSTREAM_A": "1", "SLIPSTREAM_B": "2"}):
        assert (os.environ["SLIPSTREAM_A"], os.environ["SLIPSTREAM_B"]) == ("1", "2")
    assert os.environ["SLIPSTREAM_A"] == "before"
    assert "SLIPSTREAM_B" not in os.environ
