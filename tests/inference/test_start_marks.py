"""The marks of an engine's start, with an executor in the place of vLLM's."""

import pytest

from slipstream.inference.plugin import start_marks

from .fakes import put


@pytest.fixture
def said(monkeypatch):
    """What the heartbeat was told."""
    found = []
    monkeypatch.setattr(start_marks.heartbeat, "doing", found.append)
    monkeypatch.setattr(start_marks.time, "monotonic", lambda: 12.5 + len(found))
    return found


def test_marks_are_read_as_they_were_written_and_the_first_of_each_counts(said, monkeypatch, tmp_path):
    path = tmp_path / "marks"
    assert start_marks.read_marks(path) == []
    monkeypatch.setenv(start_marks.VARIABLE, str(path))
    for name in ("load", "cache", "load", "ready"):
        start_marks.mark(name)
    assert said == ["loading weights", "making the KV cache or capturing graphs", "loading weights", "in service"]
    assert start_marks.read_marks(path) == [("load", 13.5), ("cache", 14.5), ("ready", 16.5)]
    with path.open("ab") as file:
        file.write(b"\xff broken\n7.25 verify\nword import\n8.0")
    assert start_marks.read_marks(path)[3:] == [("verify", 7.25)]


def test_without_a_file_a_mark_is_said_and_no_more(said, monkeypatch, tmp_path):
    monkeypatch.delenv(start_marks.VARIABLE, raising=False)
    start_marks.mark("import")
    monkeypatch.setenv(start_marks.VARIABLE, str(tmp_path / "none" / "marks"))
    start_marks.mark("verify")
    assert said == ["importing vLLM", "looking at the weights"]


def test_every_phase_has_a_name_in_order_and_some_do_other_things_where_nothing_is_compiled():
    eager, compiled = start_marks.phase_names(eager=True), start_marks.phase_names(eager=False)
    assert list(eager) == list(compiled) == ["import", "load", "profile", "cache", "verify"]
    assert (eager["profile"], eager["cache"]) == ("measure memory", "make the KV cache")
    assert (compiled["profile"], compiled["cache"]) == ("compile", "capture graphs")


def test_vllms_executor_marks_what_it_begins_with_once(said, monkeypatch):
    class Executor:
        compile_or_warm_up_model = "no method"

        def __init__(self, number, *, name="", fails=False):
            self.given = number, name
            assert said[-1] == "loading weights"
            if fails:
                raise KeyError(number)

        def determine_available_memory(self):
            """What is free."""
            return 5

        def collective_rpc(self):
            return said[-1]

    monkeypatch.setattr(start_marks, "mark", lambda name: said.append({"load": "loading weights"}.get(name, name)))
    put(monkeypatch, v1__executor__abstract={"Executor": Executor})
    for _ in range(2):
        start_marks.follow_executor()
    made = Executor(1, name="x")
    assert (made.given, said) == ((1, "x"), ["loading weights", ""])
    assert made.determine_available_memory() == 5
    assert said[2:] == ["profile", ""], "and nothing twice"
    assert (made.collective_rpc(), Executor.compile_or_warm_up_model) == ("", "no method")
    assert Executor.determine_available_memory.__doc__ == "What is free."
    with pytest.raises(KeyError):
        Executor(2, fails=True)
    assert said[4:] == ["loading weights", ""]


def test_a_vllm_without_an_executor_makes_no_marks(monkeypatch):
    put(monkeypatch, v1__executor__abstract={})
    start_marks.follow_executor()
    put(monkeypatch, v1={})
    start_marks.follow_executor()
