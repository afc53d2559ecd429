"""What a process may find itself in: no current folder, no docstrings, a temporary folder with a long name, another
locale."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from slipstream.processes import exits
from slipstream.processes.temporary import remove_temporary
from tests.config.conftest import MINIMAL

ROOT = Path(__file__).parents[2]


def slipstream(*arguments, program="import sys; from slipstream.cli.app import main; main()", cwd=ROOT, **environment):
    """The command as people start it, but for what imports torch."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), **environment}
    command = [sys.executable, "-P", "-c", program, *arguments]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300, check=False)


def said(done, code):
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    return done.stderr


def test_a_current_folder_that_was_removed(tmp_path):
    gone = tmp_path / "gone"
    gone.mkdir()
    program = f"import os; os.rmdir({str(gone)!r}); from slipstream.cli.app import main; main(['runs'])"
    done = slipstream(program=program, cwd=gone)
    assert "error: the current folder has been removed: change to one" in said(done, 2)


def test_docstrings_that_were_removed():
    assert "error: PYTHONOPTIMIZE=2 removes docstrings" in said(slipstream("runs", PYTHONOPTIMIZE="2"), 2)


def test_ctrl_c_while_the_command_is_imported():
    program = (
        "import sys\n"
        "class CtrlC:\n"
        "    def find_spec(self, name, *rest):\n"
        "        if name == 'cyclopts':\n"
        "            raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, CtrlC())\n"
        "import slipstream.__main__\n"
    )
    assert said(slipstream(program=program), 130) == ""


def test_arguments_are_utf8_in_any_locale(tmp_path):
    (tmp_path / "run.toml").write_text(MINIMAL)
    program = (
        "import sys; from slipstream.config import load_config; "
        "print(ascii(load_config('run.toml', sys.argv[1:]).config.environment.system_prompt))"
    )
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = slipstream("--environment.system-prompt", "é".encode(), program=program, cwd=tmp_path, **ascii_only)
    assert done.stdout.strip() == r"'\xe9'", done.stderr


class TestSockets:
    def test_a_long_temporary_folder_is_gone_round(self, tmp_path, monkeypatch):
        long = tmp_path / ("x" * 150)
        long.mkdir()
        monkeypatch.setattr("tempfile.tempdir", str(long))
        folder = exits.private_folder("engine")
        try:
            assert not folder.is_relative_to(long)
            assert folder.stat().st_mode & 0o77 == 0
            assert len(os.fsencode(folder / "engine.sock")) < 108
        finally:
            remove_temporary(folder)

    def test_a_short_one_is_used(self, tmp_path, monkeypatch):
        monkeypatch.setattr("tempfile.tempdir", "/tmp")
        folder = exits.private_folder("engine")
        remove_temporary(folder)
        assert folder.parent == Path("/tmp")


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        ("starting\nTraceback (most recent call last):\n  File x\nOSError: path too long\n", "OSError: path too long"),
        (
            "(EngineCore pid=7) ERROR 11-22 10:00:00 [core.py:1] ValueError: no room\nTraceback\n"
            "RuntimeError: Engine core initialization failed. See root cause above.\n",
            "ValueError: no room Traceback",
        ),
        (
            "RuntimeError: no scheduler: set it to false\nException ignored in: <function AsyncLLM.__del__ at 0x7>\n"
            "Traceback (most recent call last):\n  File x\nTypeError: 'NoneType' object is not callable\n"
            "leaked objects\n",
            "RuntimeError: no scheduler: set it to false leaked objects",
        ),
        (
            "[rank0]: Traceback (most recent call last):\n[rank0]:   File x\n[rank0]: ValueError: no parameter a\n"
            "Loading shards:   0% Completed\n",
            "ValueError: no parameter a Loading shards",
        ),
        (
            "(MainProcess pid=7) ERROR 11-27 10:00:00 [registry.py:1] ModuleNotFoundError: No module named 'eyes'\n"
            "(MainProcess pid=7) WARNING 11-27 10:00:00 [model.py:1] running in text-only mode\n"
            "[rank0]: ValueError: Model architectures ['Eyes'] failed to be inspected. Please check the logs.\n",
            "ModuleNotFoundError: No module named 'eyes' ValueError: Model architectures",
        ),
        ("killed\n", "killed"),
        ("", ""),
    ],
)
def test_the_last_error_of_a_log(tmp_path, log, expected):
    (tmp_path / "log").write_text(log)
    assert exits.last_error(tmp_path / "log").startswith(expected)
    ending = exits.ending(1, tmp_path / "log")
    assert "ended with code 1" in ending
    assert str(tmp_path / "log") in ending
    assert "\n" not in ending
