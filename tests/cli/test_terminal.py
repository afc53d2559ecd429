"""Text of a model, a server or a file cannot write to the terminal as it likes."""

import re
import unicodedata
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.cli.app import main
from slipstream.progress import printable
from slipstream.runlog import RunLog

TITLE = "\x1b]0;owned\x07\x1b[2J\x9b2J\u202e"
CLI = Path(__file__).parents[2] / "src/slipstream/cli"


@given(st.text())
def test_no_control_character_is_left(text):
    found = printable(text)
    assert not [each for each in found if unicodedata.category(each) in ("Cc", "Cs") and each not in "\n\t"]
    assert printable(found) == found


def test_ordinary_text_stays():
    text = "é 日本 👩\u200d🚀 \u0301\tend\n"
    assert printable(text) == text


def run_with(tmp_path, **sample):
    with RunLog.create(tmp_path / "run") as log:
        log.metrics(1, {"reward/mean": 0.5})
        log.sample({"step": 0, "id": f"0.0.{TITLE}", "task": TITLE, "outcome": TITLE, "version": "0.0", **sample})
        log.exit(ValueError(TITLE))
    return tmp_path / "run"


@pytest.mark.parametrize(
    "command", [["trace", "RUN", "none"], ["trace", "RUN", f"0.0.{TITLE}"], ["runs", "ROOT"], ["runs", TITLE]]
)
def test_commands_show_no_escape_sequence(command, tmp_path, capsys):
    names = {"RUN": str(run_with(tmp_path)), "ROOT": str(tmp_path)}
    with pytest.raises(SystemExit):
        main([names.get(word, word) for word in command])
    shown = capsys.readouterr()
    assert shown.out + shown.err
    assert not re.search("[\x1b\x07\x9b\u202e]", shown.out + shown.err)


def test_commands_print_through_one_function():
    for path in CLI.glob("*.py"):
        if path.name != "output.py":
            assert not re.search(r"(?<![\w.])print\(", path.read_text(encoding="utf-8")), path
