"""The two addresses of an engine server beside a run: TLS, taken ports, secrets, and foreign clients."""

import contextlib
import signal
import socket
import subprocess
import threading
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import openai
import psutil
import pytest
import torch

from slipstream.inference.lending import KEY_VARIABLE
from slipstream.records import Sequence
from slipstream.runlog import read_events, read_metrics
from slipstream.trainer.learner import score
from slipstream.trainer.model.policy import PolicyModel
from tests.certificates import certificate
from tests.waiting import until

from .servers import TOKEN, ended, server, setting_of
from .test_node_runs import finish
from .test_real_runs import check_run
from .test_server_runs import train

pytestmark = [pytest.mark.real_start, pytest.mark.servers]
KEY = "the key of these clients"


@contextlib.contextmanager
def taken_port():
    with socket.socket() as own:
        own.bind(("127.0.0.1", 0))
        own.listen()
        yield own.getsockname()[1]


def command_lines():
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            found.append(" ".join(process.cmdline()))
    return found


def test_tls_taken_ports_and_secrets(model, run_file, tmp_path, monkeypatch):
    path, _ = certificate(tmp_path, "127.0.0.1")
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    folder, seen = tmp_path / "run", []
    tls = {"tls_cert": path, "tls_key": tmp_path / "key.pem"}
    with contextlib.ExitStack() as stack:
        control, other = stack.enter_context(taken_port()), stack.enter_context(taken_port())
        where = {"host": "127.0.0.1", "port": control, "inference_port": other}
        engine = stack.enter_context(server(model, **where, **tls))
        assert engine.url.startswith("https://127.0.0.1:")
        assert control < int(engine.url.rpartition(":")[2]) < control + 100
        assert engine.lines[0].endswith(f"(port {other} is taken); the lines of a run file:")
        assert "cannot be trusted" in finish(train((), run_file, folder, *setting_of(engine)), code=2)
        assert not folder.exists()
        run = train((), run_file, folder, *setting_of(engine), SSL_CERT_FILE=str(path))
        while run.poll() is None:
            seen += command_lines()
            with contextlib.suppress(subprocess.TimeoutExpired):
                run.wait(0.5)
        finish(run)
        own = {"base_url": engine.inference, "max_retries": 0}
        with pytest.raises(openai.AuthenticationError), openai.OpenAI(api_key=TOKEN, **own) as wrong:
            wrong.models.list()
        with openai.OpenAI(api_key=KEY, **own) as right:
            assert [each.id for each in right.models.list()] == [model.name]
        engine.process.send_signal(signal.SIGINT)
        ended(engine.process)
        assert engine.process.returncode == 0
    check_run(folder, steps=3)
    texts = [*seen, *engine.lines, *engine.log]
    texts += [file.read_bytes().decode("latin-1") for file in folder.rglob("*") if file.is_file()]
    assert any("slipstream.inference.plugin.main" in text for text in texts)
    assert not [text for text in texts if TOKEN in text or KEY in text]


class Guest:
    """A foreign client, with one request after another until its end."""

    def __init__(self, url, name, length):
        self.answers, self._over = [], threading.Event()
        self._asked = {"model": name, "max_tokens": length, "logprobs": 0, "extra_body": {"return_token_ids": True}}
        self._asked["extra_body"] |= {"ignore_eos": True}
        self._url, self._pool = url, ThreadPoolExecutor(1)
        self._work = self._pool.submit(self._ask)

    def _ask(self):
        with openai.OpenAI(base_url=self._url, api_key="none", max_retries=0, timeout=120) as client:
            while not self._over.is_set():
                prompt = [len(self.answers) % 90 + 1, 2, 3, 4]
                self.answers.append((prompt, client.completions.create(prompt=prompt, **self._asked)))

    def end(self):
        """All answers. Raises the error of a request."""
        self._over.set()
        self._work.result(150)
        self._pool.shutdown()
        return self.answers


def test_tokens_of_foreign_clients_have_their_version_with_every_third_published(model, run_file, tmp_path):
    folder, every = tmp_path / "run", ("--weights.every", 3, "--training.staleness", 2, "--training.order", "data")
    kept = ("--run.checkpoint_every", 3, "--run.keep_checkpoints", 9, "--run.keep_weights", 9)
    steps = ("--training.steps", 12, "--training.learning_rate", "1e-2")
    with server(model, socket=tmp_path / "engine.sock") as engine:
        until(lambda: is_up(engine.inference), 200)
        guests = [Guest(engine.inference, model.name, length=50) for _ in range(2)]
        finish(train((), run_file, folder, *every, *kept, *steps, *setting_of(engine)))
        answers = [answer for guest in guests for answer in guest.end()]
    events = read_events(folder)
    published, applied = ([(e["version"], e["digest"]) for e in events if e["kind"] == k] for k in ("publish", "apply"))
    assert applied == published
    digests = dict(published)
    assert [*digests] == ["0.0", "0.3", "0.6", "0.9", "0.12"]
    assert [row["staleness/max"] for row in read_metrics(folder) if "staleness/max" in row] == [0, 1, 2] * 4
    pieces = [piece for prompt, answer in answers for piece in pieces_of(prompt, answer, digests)]
    checkpoints = [folder / "checkpoints" / f"step-{step:06d}" / "weights" for step in (3, 6, 9, 12)]
    assert {name for name, *_ in pieces} >= {"0.0", "0.3", "0.6", "0.9"}
    largest = {}
    for name, own in zip(digests, [model, *checkpoints], strict=True):
        mine = [piece for piece in pieces if piece[0] == name]
        largest[name] = [gap(weights, mine) for weights in (own, checkpoints[-1])]
    print(f"{len(answers)} answers in {len(pieces)} pieces: {largest}")
    assert max(right for right, _ in largest.values()) < 1e-3
    assert min(largest[name][1] for name in ("0.0", "0.3", "0.6", "0.9")) > 1e-2, "by other weights"


def pieces_of(prompt, answer, digests):
    """Version, tokens and log-probabilities of each span."""
    (choice,), (spans,) = answer.choices, answer.versions
    assert answer.digests == {name: digests[name] for _, name in spans}
    ids, starts = choice.token_ids, [start for start, _ in spans]
    row = Sequence([*prompt, *ids], [False] * len(prompt) + [True] * len(ids))
    for (start, name), end in zip(spans, [*starts[1:], len(ids)], strict=True):
        yield name, row, slice(start, end), torch.tensor(choice.logprobs.token_logprobs[start:end])


def gap(weights, pieces):
    """The largest difference from the log-probabilities by these weights."""
    if not pieces:
        return 0.0
    policy = PolicyModel.load(str(weights), "float32")
    found = score(policy, [row for _, row, *_ in pieces], micro_batch_tokens=8192).logprobs
    every = [(ours[where] - theirs).abs() for ours, (*_, where, theirs) in zip(found, pieces, strict=True)]
    return torch.cat(every).max().item()


def is_up(url):
    """Whether a server answers clients at this address, with `/v1`."""
    with (
        contextlib.suppress(OSError),
        urllib.request.urlopen(f"{url.removesuffix('/v1')}/health", timeout=60) as answer,
    ):
        return answer.status == 200
    return False
