"""`chat` and `serve-model` through the real command and a real vLLM, on a run's LoRA adapter and on a model."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import select
import signal
import socket
import subprocess
import sys
import termios
import time
import urllib.error
import urllib.request

import psutil
import pytest

from .conftest import Command


@pytest.fixture(scope="module")
def adapter_run(model, tmp_path_factory):
    """A run of one step of SFT with LoRA; no engine was needed."""
    folder = tmp_path_factory.mktemp("talk")
    (folder / "rows.jsonl").write_text('{"prompt": "a", "completion": "b"}\n' * 4)
    (folder / "sft.toml").write_text(
        f'[model]\npath = "{model}"\n[data]\npath = "rows.jsonl"\n[algorithm]\nkind = "sft"\n'
        "[training]\nsteps = 1\nprompts_per_batch = 2\n[lora]\nrank = 4\n[run]\nthreads = 1\n"
    )
    done = Command("sft", folder / "sft.toml", "--run.folder", folder / "run", cwd=folder)
    done.ok()
    return folder / "run"


@pytest.mark.full
@pytest.mark.engine
def test_every_line_of_a_pipe_is_answered_by_the_adapter(adapter_run):
    """The answers alone are on standard output; the conversation is remembered, and begun anew where asked for."""
    asked = "a\nb\n\n/new\na\n"
    arguments = ["chat", str(adapter_run), "--temperature", "0", "--max-tokens", "3", "--json"]
    chatting = subprocess.Popen(
        [sys.executable, "-m", "slipstream.cli", *arguments],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=dict(os.environ, OMP_NUM_THREADS="1"),
    )  # fmt: skip
    out, err = chatting.communicate(asked, timeout=500)
    assert chatting.returncode == 0, err
    lines = [json.loads(line) for line in out.splitlines()]
    assert [line["message"] for line in lines] == ["a", "b", "a"]
    assert all(line["finish_reason"] in ("stop", "length") for line in lines)
    assert lines[0]["answer"] == lines[2]["answer"]


@pytest.mark.real_start
@pytest.mark.full
@pytest.mark.engine
def test_ctrl_c_ends_a_chat_and_its_engine(model, command):
    chatting = command("chat", model, "--message", "a")
    chatting.until(lambda: chatting.running("slipstream.inference.openai_server"))
    chatting.process.send_signal(signal.SIGINT)
    code, out, err = chatting.wait(200)
    assert (code, out) == (130, "")
    assert "Traceback" not in err
    assert chatting.left_behind() == []


@pytest.mark.full
@pytest.mark.engine
def test_a_terminal(model):
    """Asked, answered, begun anew, and left with Ctrl-C at the prompt."""
    ours, theirs = pty.openpty()
    chatting = subprocess.Popen(
        [sys.executable, "-m", "slipstream.cli", "chat", str(model), "--max-tokens", "3"],
        stdin=theirs, stdout=theirs, stderr=subprocess.PIPE, text=True,
        # A terminal of its own, so that Ctrl-C is a key there.
        start_new_session=True, preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )  # fmt: skip
    os.close(theirs)
    seen = ""

    def until(condition, timeout_s=200.0):
        """Read meanwhile: a terminal that nobody reads holds up the program behind it."""
        nonlocal seen
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, seen
            if select.select([ours], [], [], 0.2)[0]:
                with contextlib.suppress(OSError):  # the other end is closed
                    seen += os.read(ours, 4096).decode(errors="replace")

    try:
        until(lambda: "> " in seen, 500)
        engines = psutil.Process(chatting.pid).children(recursive=True)
        os.write(ours, b"a\n")
        until(lambda: "> a\r\n" in seen and seen.endswith("\n> "))
        os.write(ours, b"/new\n")
        greeting = "ends it"
        until(lambda: "a new conversation" in seen.partition(greeting)[2] and seen.endswith("\n> "))
        # Readline overlooks a signal that comes between its prompt and its waiting for keys, until the next one. It
        # gives the terminal back once it has heard one; a further one then would end the process as it ends the engine.
        for _ in range(20):
            os.write(ours, b"\x03")
            with contextlib.suppress(AssertionError):
                until(lambda: termios.tcgetattr(ours)[3] & termios.ICANON or chatting.poll() is not None, 3)
                break
        until(lambda: chatting.poll() is not None, 200)
        assert chatting.returncode == 0, chatting.stderr.read()
        assert engines
        assert psutil.wait_procs(engines, timeout=30)[1] == []
    finally:
        chatting.kill()
        os.close(ours)


def until_healthy(serving, url):
    def is_healthy():
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=5) as answer:
            return answer.status == 200
        return False

    serving.until(is_healthy)


@pytest.mark.full
@pytest.mark.engine
def test_an_adapter_answers_at_an_openai_compatible_address(adapter_run, monkeypatch, command):
    monkeypatch.setenv("SLIPSTREAM_API_KEY", "a-key")
    monkeypatch.setenv("PYTHONUNBUFFERED", "1")
    serving = command("serve-model", adapter_run, "--port", "0", "--json", "--name", "mine")
    address = json.loads(serving.process.stdout.readline())
    assert (address["model"], address["needs_key"]) == ("mine", True)
    until_healthy(serving, address["url"].replace("/v1", "/health"))
    arguments = [psutil.Process(serving.process.pid).cmdline()]
    for each in serving.children().values():
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended meanwhile
            arguments.append(each.cmdline())
    assert "vllm.entrypoints.openai.api_server" in arguments[0]
    assert "a-key" not in str(arguments)

    def post(path, body, key):
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
        request = urllib.request.Request(path, json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=120) as response:
            return json.load(response)

    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 3, "temperature": 0}
    answers = {}
    for name in ("mine", "mine-base"):
        answer = post(f"{address['url']}/chat/completions", body | {"model": name}, "a-key")
        assert answer["model"] == name
        assert answer["usage"]["completion_tokens"] in (1, 2, 3)
        answers[name] = answer["choices"][0]["message"]["content"]
    for path in (f"{address['url']}/chat/completions", address["url"].replace("/v1", "/invocations")):
        with pytest.raises(urllib.error.HTTPError, match="401"):
            post(path, body | {"model": "mine"}, "another")
    serving.process.send_signal(signal.SIGINT)
    serving.ok(200)
    assert serving.left_behind() == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["serve-model", "MODEL", "--host", "0.0.0.0"], "no API key: put one into the environment variable"),
        (["serve-model", "MODEL", "--port", "TAKEN"], "use --port 0 for a free one"),
        (["serve-model", "MODEL", "--port", "70000"], "use 1 to 65535"),
        (["serve-model", "MODEL", "--thinking"], "its thinking cannot be switched"),
        (["chat", "MODEL", "--max-tokens", "0"], "use 1 or more"),
        (["chat", "MODEL", "--temperature=-1"], "use 0 for greedy answers"),
        (["chat", "none"], "none does not exist: name the folder of a model"),
    ],
)
def test_what_cannot_be_served_is_refused_before_anything_starts(model, arguments, said, monkeypatch, capsys):
    from slipstream.cli import main

    monkeypatch.delenv("SLIPSTREAM_API_KEY", raising=False)
    before = {child.pid for child in psutil.Process(os.getpid()).children()}
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        places = {"MODEL": str(model), "TAKEN": str(taken.getsockname()[1])}
        with pytest.raises(SystemExit) as ended:
            main([places.get(argument, argument) for argument in arguments])
    out, err = capsys.readouterr()
    assert (ended.value.code, out) == (2, "")
    assert said in " ".join(err.split())
    assert {child.pid for child in psutil.Process(os.getpid()).children()} <= before
