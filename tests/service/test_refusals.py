"""Refusals of the queue's commands: one sentence, in JSON too, and nothing is left behind."""

import json

import pytest

from slipstream.cli import main


@pytest.fixture
def ask(place, capsys):
    """Runs a command with JSON; (exit code, answer)."""

    def run(*arguments):
        with pytest.raises(SystemExit) as ended:
            main([*map(str, arguments), "--json"])
        return ended.value.code, json.loads(capsys.readouterr().out.splitlines()[-1])

    return run


@pytest.mark.parametrize("port", [99999, -1])
def test_a_service_with_a_number_that_is_no_port(ask, port):
    code, answer = ask("serve", "--port", port)
    assert (code, answer["message"]) == (2, f"--port {port} is no port: use 1 to 65535, or 0 for a free one")
