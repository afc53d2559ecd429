"""`slipstream chat` at the address of a small server."""

import io
import json

import pytest

from slipstream.cli import main

from .test_evaluate_address import KEY, Server


@pytest.fixture
def server():
    with Server().running() as running:
        running.answer = lambda body: " ".join(each["content"] for each in body["messages"])
        yield running


@pytest.fixture
def chat(server, capsys, monkeypatch):
    """What a chat prints as its messages are answered, and its exit code."""

    def run(text, *arguments):
        monkeypatch.setattr("sys.stdin", io.StringIO(text))
        with pytest.raises(SystemExit) as ended:
            main(["chat", server.url, *arguments])
        out, err = capsys.readouterr()
        return out.splitlines(), ended.value.code, err

    return run


def test_a_conversation_is_remembered_until_it_is_begun_anew(server, chat):
    assert chat("a\nb\n\n/new\nc\n")[:2] == (["a", "a a b", "c"], 0)
    assert chat("a\nb\n", "--single-turn", "--system", "Be brief.")[0] == ["Be brief. a", "Be brief. b"]
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "b"}]
    assert server.bodies[-1] == {"model": "adder", "messages": messages, "temperature": 0.7}


def test_the_key_and_the_options_reach_the_server(server, chat, monkeypatch):
    monkeypatch.setenv("MY_KEY", KEY)
    arguments = ["--key-variable", "MY_KEY", "--seed", "3", "--max-tokens", "5", "--temperature", "0"]
    assert chat("a\n", *arguments)[1] == 0
    assert server.keys == {f"Bearer {KEY}"}
    wanted = {"seed": 3, "max_tokens": 5, "temperature": 0.0}
    assert {name: server.bodies[0][name] for name in wanted} == wanted


def test_thinking_is_no_part_of_the_answer(server, chat):
    server.answer = lambda body: "<think>\nhm\n</think>\n\nyes"
    lines, code, _ = chat("a\n", "--json")
    answer = {"message": "a", "answer": "yes", "thinking": "hm", "finish_reason": "stop", "num_tokens": 3}
    assert (json.loads(lines[0]), code) == (answer, 0)
    server.answer, server.ended = lambda body: "<think>hm, h", {"finish_reason": "length"}
    lines, _, _ = chat("a\n", "--json")
    found = json.loads(lines[0])
    assert (found["answer"], found["thinking"], found["finish_reason"]) == ("", "hm, h", "length")


def test_what_a_server_refuses_and_what_is_for_another_one(server, chat):
    server.fail = [400]
    lines, code, err = chat("a\n")
    assert (lines, code != 0) == ([], True)
    assert "/new" in err
    for arguments in (["--thinking"], ["--base", "x"], ["--max-model-len", "5"], ["--served-name", "other"]):
        assert chat("a\n", *arguments)[1] == 2
    for heat in ("nan", "inf", "-1"):
        assert chat("a\n", "--temperature", heat)[1] == 2


def test_a_server_that_loses_every_connection_is_soon_given_up(server, chat, monkeypatch):
    monkeypatch.setattr("slipstream.commands.chat._PATIENCE_S", 0.1)
    server.fail = [503] * 9
    lines, code, err = chat("a\n")
    assert (lines, code) == ([], 5)
    assert "status 503" in err
