import pytest

from slipstream.cli import main


@pytest.fixture
def slipstream(capsys, tmp_path, monkeypatch):
    """Runs a command in this process; returns exit code, output and error output."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        with pytest.raises(SystemExit) as ended:
            main([str(argument) for argument in arguments])
        return (ended.value.code, *capsys.readouterr())

    return run
