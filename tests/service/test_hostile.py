"""Logs of gigabytes, a thousand followers, and paths in the place of names."""

import asyncio
import json
import os
import resource
import subprocess
import sys
import time

import psutil
import pytest

from slipstream.cli import main
from slipstream.config import load_config
from slipstream.errors import SlipstreamError
from slipstream.service.access import new_token
from slipstream.service.client import RemoteRuns
from slipstream.service.dotenv_file import secrets_of
from slipstream.service.preflight import Preflight
from slipstream.service.runs import MAX_CHUNK
from slipstream.service.store import OUTPUT
from slipstream.service.submission import submit

from .test_api import paused

pytestmark = pytest.mark.real_start
HUGE = 2 << 30
NUM_FOLLOWERS = 1000


def huge_log(place, name):
    output = place.folder_of(name) / OUTPUT
    with output.open("wb") as file:
        file.write(b"the beginning\n")
        file.truncate(HUGE)
        file.seek(0, os.SEEK_END)
        file.write(b"the end")
    return output


@pytest.mark.full
def test_the_command_prints_a_huge_log_as_it_reads_it(place):
    name = paused(place, "run", owner="")
    huge_log(place, name)
    command = [sys.executable, "-P", "-m", "slipstream.cli", "logs", name]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        assert child.stdout.read(13) == b"the beginning"
        for _ in range(200):
            child.stdout.read(MAX_CHUNK)
        assert psutil.Process(child.pid).memory_info().rss < 300 << 20
        child.stdout.close()
        assert child.wait(60) == 141, child.stderr.read()


async def follow(port, name, offset=0):
    """A follower's first request on its own connection, which stays open; (status, connection)."""
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(f"GET /v1/runs/{name}/logs?offset={offset} HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n".encode())
        line = await reader.readline()
    except OSError:
        return 0, None
    return int(line.split()[1]) if line else 0, writer


@pytest.mark.service
@pytest.mark.parametrize("files", [0, 600])
def test_a_thousand_followers_have_bounded_descriptors(place, files):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))
    name = paused(place, "run", owner="")
    huge_log(place, name)

    async def all_of_them(port, folder):
        found = await asyncio.gather(*(follow(port, name) for _ in range(NUM_FOLLOWERS)))
        num_files = len(os.listdir(folder))
        for _, writer in found:
            if writer is not None:
                writer.close()
        return [status for status, _ in found], num_files

    try:
        with place.serve(files=files) as service:
            server = psutil.Process(service.process.pid)
            before = server.memory_info().rss
            answers, num_files = asyncio.run(all_of_them(service.client.base_url.port, f"/proc/{server.pid}/fd"))
            assert {*answers} <= {200, 503, 0}
            if files:
                assert num_files < files
                assert answers.count(200) >= files // 4
                assert answers.count(503) > 0
            else:
                assert answers.count(200) == NUM_FOLLOWERS
            assert server.memory_info().rss - before < 400 << 20
            mine = RemoteRuns(service.url, "")
            until_there(lambda: mine.log(name, -1).data.endswith(b"the end"))
            assert place.record(name).state == "queued"
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def until_there(look, timeout_s=30):
    """Until the service has noticed that its clients have gone."""
    end = time.monotonic() + timeout_s
    while True:
        try:
            assert look()
            return
        except SlipstreamError:
            assert time.monotonic() < end
            time.sleep(0.1)


def test_no_address_leads_out_of_a_run_folder(place):
    name = paused(place, "run", owner="")
    secret = place.folder / "secret.txt"
    secret.write_text("hunter2")
    up = "..%2f" * 8 + str(secret).lstrip("/").replace("/", "%2f")
    with place.serve() as service:
        for path in (
            *(f"/v1/runs/{up}", f"/v1/runs/{name}%2f..%2f..%2fsecret.txt/logs", f"/runs/{up}", f"/v1/runs/{up}/logs"),
            *(f"/v1/runs/{name}/../../secret.txt", "/v1/runs/%00/logs", f"/v1/runs/{'a' * 5000}/checkpoints"),
        ):
            answer = service.client.get(path)
            assert answer.status_code in (404, 405), (path, answer.status_code)
            assert "hunter2" not in answer.text
        for offset in ("-2", "x", str(1 << 70), "1e3"):
            assert service.client.get(f"/v1/runs/{name}/logs", params={"offset": offset}).status_code == 422


SECRETS = {
    name: f"hunter2-{name.lower().replace('_', '-')}"
    for name in ("WANDB_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "JUDGE_API_KEY", "OPENAI_API_KEY")
}


@pytest.mark.service
def test_no_secret_is_in_a_folder_the_database_a_log_or_argv(place):
    token = new_token(place.store, "alice")
    secrets = [*SECRETS.values(), token]
    with place.serve(SLIPSTREAM_STORE=str(place.folder / "store"), WANDB_MODE="offline", **SECRETS) as service:
        mine = RemoteRuns(service.url, token)
        file = place.run_file(300, more="[lora]\nrank = 2\n")
        name = mine.submit(load_config(file), "run").id
        place.until(name, "running", ticks=False)
        for process in psutil.process_iter(["cmdline"]):
            assert not any(secret in part for part in process.info["cmdline"] or () for secret in secrets)
        refused = (
            file.read_text() + f'[environment]\nname = "x"\nsettings = {{api_key = "{SECRETS["JUDGE_API_KEY"]}"}}\n'
        )
        body = {"name": "refused", "settings": refused}
        answer = service.client.post("/v1/runs", json=body, headers={"Authorization": f"Bearer {token}"})
        assert answer.status_code == 400
        assert "hunter2" not in answer.text
        place.until(name, "done", ticks=False)
        assert [run.id for run in mine.all()] == [name]
    files = [path for path in place.folder.rglob("*") if path.is_file() and not path.is_symlink()]
    assert {"index.sqlite", "output.log", "record.json", "tokens.json", "DONE"} <= {path.name for path in files}
    for path in files:
        data = path.read_bytes()
        assert not any(secret.encode() in data for secret in secrets), path


SECRET_TASK = """
import os

def tasks(split, num_tasks, seed):
    return [{"prompt": f"{i}", "answer": os.environ["JUDGE_API_KEY"][-1]} for i in range(num_tasks)]

def reward(task, completion):
    return 1.0
"""


@pytest.mark.service
def test_a_run_reads_the_secrets_that_it_names_from_a_file(place, monkeypatch, capsys):
    """Also if another process starts it; nothing but the file has them."""
    for name in SECRETS:
        monkeypatch.delenv(name, raising=False)
    (place.folder / ".env").write_text("".join(f'export {name}="{value}"\n' for name, value in SECRETS.items()))
    (place.folder / "env.py").write_text(SECRET_TASK)
    file = place.run_file(2)
    data = f'[data]\npath = "{place.folder / "data.jsonl"}"'
    task = '[environment]\nname = "env.py"\nvariables = ["JUDGE_API_KEY"]'
    file.write_text(file.read_text().replace(data, task))
    config = load_config(file).config
    assert {*secrets_of(config, place.folder)} == {"JUDGE_API_KEY", "HF_TOKEN", "WANDB_API_KEY"}
    monkeypatch.setenv("HF_TOKEN", "another")
    assert {*secrets_of(config, place.folder)} == {"JUDGE_API_KEY", "WANDB_API_KEY"}
    assert secrets_of(config, place.folder / "nowhere") == {}
    before = dict(os.environ)
    with pytest.raises(SystemExit) as ended:
        main(["submit", str(file), "--to", "local", "--json"])
    assert ended.value.code == 0
    name = json.loads(capsys.readouterr().out)["id"]
    for added in os.environ.keys() - before.keys():
        del os.environ[added]
    place.until(name, "done")
    other, found = place.folder / "other.toml", place.record(name)
    other.write_text(file.read_text())
    _, record = submit(place.store, load_config(other), "other", lambda *_: Preflight(found.need, found.estimate, 2),
                       runs=(place.folder / "runs").absolute())  # fmt: skip
    place.runs.keep_going()
    place.until(record.id, "done")
    for path in place.folder.rglob("*"):
        if path.is_file() and not path.is_symlink() and path.name != ".env":
            assert not any(value.encode() in path.read_bytes() for value in SECRETS.values()), path
