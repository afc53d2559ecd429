"""Real deployments: adapters of real runs on real vLLM, asked by OpenAI's own client."""

import contextlib
import io
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import msgspec
import openai
import pytest

from slipstream.cli import main
from slipstream.commands.small_models.tiny_qwen3 import new_model
from slipstream.errors import ConfigError
from slipstream.inference.plugin.named_adapters import adapter_digest, adapter_named
from slipstream.processes import launchers
from slipstream.processes.identity import is_alive
from slipstream.service.deployments.deployments import LocalDeployments, wait_ready
from slipstream.service.deployments.making import Asked, make
from slipstream.service.deployments.records import Options
from slipstream.service.deployments.registry import Registry
from slipstream.service.store import Store
from slipstream.service.submission import unix_user
from tests.report.browser import TEXT, browser, find, needs_browser
from tests.report.conftest import write  # noqa: F401 (fixture)
from tests.report.test_browser import OVERFLOWING
from tests.system.conftest import Command
from tests.waiting import until

from .asking import Expected, Load
from .conftest import Served
from .made import record

pytestmark = pytest.mark.real_start
RUN = """
evaluation = false
[model]
path = "{model}"
[data]
path = "rows.jsonl"
[algorithm]
kind = "sft"
[training]
steps = 3
prompts_per_batch = 4
learning_rate = 0.02
[run]
threads = 1
checkpoint_every = 1
keep_weights = 3
"""
LORA = "[lora]\nrank = {rank}\n"


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return new_model(tmp_path_factory.mktemp("models") / "tiny", hidden_size=32, num_layers=2, context_length=128)


@pytest.fixture(scope="module")
def trained(tmp_path_factory, base):
    """Makes runs with a checkpoint of each step: `trained("name", rank=2)`."""
    folder = tmp_path_factory.mktemp("runs")
    rows = [{"prompt": f"{number}", "completion": f"{number * 7}"} for number in range(32)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def train(name, rank=0):
        if not (folder / name).exists():
            (folder / "run.toml").write_text(RUN.format(model=base) + (LORA.format(rank=rank) if rank else ""))
            Command("sft", "run.toml", "--run.folder", name, "--plain", cwd=folder).ok()
        return folder / name

    train("adapters", rank=2)
    return train


@pytest.fixture(scope="module")
def shared(tmp_path_factory, trained):
    """A state folder and its host: a server stays up between tests."""
    folder = tmp_path_factory.mktemp("state")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launchers, "popen", subprocess.Popen)
        found = LocalDeployments(Store(folder))
        found.listen("127.0.0.1", 0)
        yield found
    end_host(Registry(Store(folder)))


@pytest.fixture
def there(shared, monkeypatch):
    """The deployments of the state folder; none is left afterwards."""
    monkeypatch.setenv("SLIPSTREAM_STATE", str(shared.key_file.parents[1]))
    for name in ("SLIPSTREAM_SERVICE", "SLIPSTREAM_STORE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    yield shared
    for each in shared.all():
        shared.undeploy(each.name)
    until(lambda: shared.all() == [])


def end_host(registry):
    handle = registry.listening().handle
    if handle is not None and is_alive(handle):
        os.kill(handle.pid, signal.SIGTERM)
        until(lambda: not is_alive(handle))


@pytest.mark.parametrize("cycles", [4, pytest.param(50, marks=pytest.mark.service)])
def test_three_adapters_come_and_go_under_load_with_room_for_two(there, base, trained, cycles):
    run = trained("adapters", rank=2)
    made = [there.deploy(str(run), step, Options(room=2)) for step in (1, 2, 3)]
    steps = {each.name: each.step for each in made}
    assert list(steps) == [f"adapters-step-{step}" for step in (1, 2, 3)]
    expected = Expected(base, run)
    other = [expected.logprobs(step, [5, 6], [7, 8]) for step in (0, 1, 2, 3)]
    assert all(abs(a[0] - b[0]) > 1e-2 for a, b in itertools.combinations(other, 2)), "the adapters differ"
    for name in steps:
        found = wait_ready(there, name)
        assert (found.state, found.reason) == ("ready", "")
    assert_commands_agree(there)
    load = Load(found.url, there.key(), steps, expected)
    try:
        for number in range(cycles):
            name = made[number % 3].name
            load.withdrawn.add(name)
            there.undeploy(name)
            there.deploy(str(run), steps[name])
            assert wait_ready(there, name).state == "ready"
            load.withdrawn.discard(name)
        until(lambda: load.failures or all(load.answers[name] >= 5 for name in steps), 120)
    finally:
        load.end()
    print(f"{load.answers} answers, {load.late} to names withdrawn, largest difference {load.largest:.2g}")
    assert load.failures == []
    assert_no_path_is_a_name(found.url, run, made[0])


def assert_commands_agree(there):
    with pytest.raises(SystemExit), contextlib.redirect_stdout(io.StringIO()) as output:
        main(["deployments", "--json"])
    assert json.loads(output.getvalue()) == msgspec.to_builtins(there.all())


def assert_no_path_is_a_name(url, run, deployment):
    names = (
        "../x",
        "..",
        str(run),
        f"{deployment.name}@{deployment.digest}",
        "nothing",
        "",
        None,
        5,
        "a/b",
        "x" * 4000,
    )
    for name in names:
        answer = httpx.post(f"{url}/completions", json={"model": name, "prompt": "a"})
        assert answer.status_code == 404, name
    for path in ("/load_lora_adapter", "/../health", "/unload_lora_adapter"):
        assert httpx.post(f"{url}{path}", json={"lora_name": "a", "lora_path": str(run)}).status_code == 404
    assert httpx.post(f"{url}/completions", content=b"[").status_code == 400
    assert httpx.get(f"{url}/models", headers={"Host": "evil.example"}).status_code == 421


@needs_browser
async def test_a_browser_submits_follows_compares_and_cancels(place, write):  # noqa: F811
    add_ended(place.store, write)
    settings = RUN.format(model=place.model).replace("rows.jsonl", str(place.folder / "data.jsonl"))
    with place.serve() as service:
        async with browser(find()) as page:
            await follows_and_compares(page, service.url, settings)
            await cancels(page, service.url, settings)
            assert_clean(page)


@needs_browser
@pytest.mark.service
async def test_a_browser_from_submission_to_a_chat(there, base, trained, write, tmp_path, monkeypatch):  # noqa: F811
    """Submit, follow, look at rollouts, compare, deploy, chat, cancel."""
    monkeypatch.chdir(tmp_path)
    add_ended(Store(), write)
    settings = RUN.format(model=base).replace("rows.jsonl", str(trained("adapters", rank=2).parent / "rows.jsonl"))
    there.deploy(str(trained("adapters", rank=2)), 1)  # its server stays up
    with Served(tmp_path, {}) as service:
        async with browser(find()) as page:
            mine = await follows_and_compares(page, service.url, settings)
            name = await deploys_and_chats(page, service.url, mine)
            assert_answers_by_command(name, service.url)
            await cancels(page, service.url, settings)
            assert_clean(page)
        service.kill()
        talk = {"model": name, "messages": [{"role": "user", "content": "7"}], "max_tokens": 2}
        assert httpx.post(f"{there.near_address()}/chat/completions", json=talk, timeout=60).status_code == 200


def add_ended(store, write):  # noqa: F811
    """Two ended runs with rollouts."""
    for number, folder in enumerate((write("crafted"), write("second", steps=300, total=400))):
        (folder / "service").mkdir()
        store.add(folder, record(folder.name, owner=unix_user(), host="elsewhere", state="done", submitted=number))


def assert_clean(page):
    """Nothing failed but the form that was wrong, and nothing was asked of elsewhere."""
    assert [each for each in page.errors if "400 (Bad Request)" not in each] == []
    assert {url.partition(":")[0] for url in page.requests} <= {"http", "data", "about"}


async def follows_and_compares(page, url, settings):
    """The path of the page of a run, which is done."""
    await submits(page, url, "mine", settings + LORA.format(rank=2))
    mine = await page.ask("location.pathname")
    assert mine.startswith("/runs/mine-"), await page.ask(TEXT)
    await page.until("document.querySelector('.fact').innerText.includes('done')", 200)
    await looked_at(page, url + mine, "run")
    await looked_at(page, f"{url}/runs/crafted/rollouts", "rollouts")
    assert await page.ask("document.querySelectorAll('.pair').length > 1")
    await looked_at(page, f"{url}/compare?run=crafted&run=second", "compare")
    assert await page.ask(f"{TEXT}.includes('Settings that differ')")
    assert await page.ask("document.querySelectorAll('figure.plot').length > 2")
    return mine


async def deploys_and_chats(page, url, mine):
    """The name of the deployment."""
    await page.open(url + mine, 1280)
    await page.act("document.querySelector('form[action$=deploy]').requestSubmit()")
    await page.until("document.querySelectorAll('.state.finished').length == 2", 200)
    await looked_at(page, f"{url}/deployments", "deployments")
    await page.act("document.querySelector('tbody tr:last-child a').click()")
    for number, text in enumerate(("4+5=", "<b>7</b>"), 1):
        await page.ask(f"document.querySelector('textarea').value = {text!r}")
        await page.act("document.querySelector('form').requestSubmit()")
        assert await page.ask("document.querySelectorAll('.attempt').length") == 2 * number
        assert text in await page.ask(TEXT)
    await pictured(page, "chat-1280")
    name = await page.ask("document.querySelector('h1').innerText")
    assert name.startswith("mine-")
    return name


async def cancels(page, url, settings):
    await submits(page, url, "long", settings.replace("steps = 3", "steps = 100000"))
    await page.until("document.querySelector('.fact').innerText.includes('running')", 200)
    await page.act("document.querySelector('form[action$=cancel]').requestSubmit()")
    await page.until("document.querySelector('.fact').innerText.includes('cancelled')", 200)
    await submits(page, url, "wrong", "[model]\npath = 5")
    assert "model.path" in await page.ask("document.querySelector('.alert').innerText")
    await looked_at(page, url, "runs")
    await looked_at(page, f"{url}/submit", "submit")


async def submits(page, url, name, settings):
    await page.open(f"{url}/submit", 1280)
    await page.ask(f"document.querySelector('input').value = {name!r}")
    await page.ask(f"document.querySelector('textarea').value = {settings!r}")
    await page.act("document.querySelector('form').requestSubmit()")


async def looked_at(page, url, name):
    """Nothing sticks out, on a wide and on a narrow screen."""
    for width in (400, 1280):
        await page.open(url, width)
        beyond, sticking_out = await page.ask(OVERFLOWING)
        assert (beyond, sticking_out) == (0, []), (name, width)
        await pictured(page, f"{name}-{width}")


async def pictured(page, name):
    if folder := os.environ.get("SLIPSTREAM_SCREENSHOTS"):
        await page.picture(f"{folder}/service-{name}.png")


def assert_answers_by_command(name, url):
    """`slipstream chat NAME` here, and through the service."""
    for service in ("", url):
        command = [
            sys.executable,
            "-m",
            "slipstream.cli",
            "chat",
            name,
            "--message",
            "a",
            "--max-tokens",
            "2",
            "--json",
        ]
        done = subprocess.run(
            command, env={**os.environ, "SLIPSTREAM_SERVICE": service}, capture_output=True, check=True
        )
        assert json.loads(done.stdout)["num_tokens"] <= 2


@pytest.mark.service
def test_faults_beside_a_whole_model(there, base, trained):
    """A killed server, a killed host, a server that hangs, a broken adapter, other ranks: each is named, and harms no
    other."""
    run, whole = trained("adapters", rank=2), trained("whole")
    names = [there.deploy(str(run), step, Options(room=2)).name for step in (1, 2)]
    names.append(there.deploy(str(whole), 3).name)
    registry = Registry(Store())
    urls = {wait_ready(there, name).url for name in names}
    assert len(urls) == 1
    url = urls.pop()
    assert [each.state for each in there.all()] == ["ready"] * 3
    keys = {registry.one(name).server for name in names}
    assert len(keys) == 2
    client = openai.OpenAI(base_url=url, api_key="any", max_retries=0)
    assert sorted(each.id for each in client.models.list()) == sorted(names)
    for name in names:
        said = client.chat.completions.create(model=name, messages=[{"role": "user", "content": "7"}], max_tokens=3)
        assert said.model.startswith(f"{name}@")
    expected = Expected(base, run)
    load = Load(url, "any", {names[0]: 1}, expected, 0)
    load.compare(client, names[0], "abc")

    wide = trained("wide", rank=16)
    with pytest.raises(ConfigError, match=r"has rank 16, and the server of .* takes 8 at most: first slipstream und"):
        there.deploy(str(wide), 1)
    with pytest.raises(ConfigError, match=r"--room 3 was asked for, and the server of .* has 2"):
        there.deploy(str(run), 3, Options(room=3))

    # The copy of an adapter is damaged, and its server killed.
    record = registry.one(names[1])
    copy = registry.adapters(record.server) / record.served / "adapter_model.safetensors"
    content = bytearray(copy.read_bytes())
    content[-1] ^= 1
    copy.write_bytes(content)
    killed = server_pids(record.server)
    os.kill(killed[0], signal.SIGKILL)
    until(lambda: there.one(names[0]).state == "deploying")
    assert there.one(names[2]).state == "ready"
    client.completions.create(model=names[2], prompt="a", max_tokens=1)
    assert wait_ready(there, names[0]).state == "ready"
    assert "changed since it was deployed" in wait_ready(there, names[1]).reason
    load.compare(client, names[0], "abc")
    assert load.failures == []
    there.undeploy(names[1])
    until(lambda: len(there.all()) == 2)
    assert wait_ready(there, there.deploy(str(run), 2).name).state == "ready"

    # Its host is killed: all ends with it, and a pass begins again at the same address.
    host = registry.listening().handle
    servers = [pid for key in keys for pid in server_pids(key)]
    os.kill(host.pid, signal.SIGKILL)
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in servers))
    for name in names:
        assert wait_ready(there, name).state == "ready"
    assert there.one(names[0]).url == url
    load.compare(client, names[0], "abc")

    hung = server_pids(record.server)[0]
    os.kill(hung, signal.SIGSTOP)
    until(lambda: there.one(names[0]).state == "deploying", 90)
    assert wait_ready(there, names[0]).state == "ready"
    assert load.failures == []
    for each in there.all():
        there.undeploy(each.name)
    until(lambda: there.all() == [])
    until(lambda: not any(server_pids(key) for key in keys), 90)
    until(lambda: not is_alive(registry.listening().handle) if registry.listening().handle else True)
    assert list(registry.server_keys()) == []


def server_pids(key):
    """Processes of a server, by the name of what it serves."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            command = path.read_bytes().split(b"\0")
            served = Registry(Store()).spec(key)
            if b"slipstream.inference.openai_server" in command and served is not None:
                name = served.arguments[served.arguments.index("--served-model-name") + 1]
                if name.encode() in command:
                    found.append(int(path.parent.name))
    return found


def test_only_whole_files_in_the_registry_have_a_name(tmp_path):
    folder = tmp_path / "registry"
    source = tmp_path / "adapter"
    for place in (folder, source):
        place.mkdir()
    (source / "adapter_config.json").write_text("{}")
    (source / "adapter_model.safetensors").write_bytes(b"12345678")
    served = f"a@{adapter_digest(source)}"
    assert adapter_named(folder, served) is None
    (folder / served).symlink_to(source)
    assert adapter_named(folder, served) is None, "a link leads elsewhere"
    (folder / served).unlink()
    source.rename(folder / served)
    assert adapter_named(folder, served) == folder / served
    for name in (
        "../adapter",
        str(folder / served),
        f"../registry/{served}",
        "a",
        served + "\n",
        f"x/../{served}",
        ".",
    ):
        assert adapter_named(folder, name) is None
    (folder / served / "adapter_model.safetensors").write_bytes(b"12345679")
    assert adapter_named(folder, served) is None


def test_what_cannot_be_served_is_refused_before_anything_starts(there, trained, tmp_path):
    run = tmp_path / "broken"
    shutil.copytree(trained("adapters", rank=2), run)
    weights = run / "checkpoints/step-000002/weights/adapter_model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    with pytest.raises(ConfigError, match="has other contents than when it was written"):
        there.deploy(str(run), 2)
    with pytest.raises(ConfigError, match="not on this machine"):
        there.deploy("nothing", 2)
    with pytest.raises(ConfigError):
        there.deploy("../x")
    with pytest.raises(SystemExit) as ended:
        main(["undeploy", "nothing"])
    assert ended.value.code == 2
    assert there.all() == []
    record = make(Store(), Asked("broken", "me", str(run), 1))
    assert make(Store(), Asked("broken", "me", str(run), 1)) == record
    assert record.request["stop_token_ids"]
    assert oct(there.key_file.stat().st_mode if there.key() else 0).endswith("600")
    there.undeploy(record.name)
    until(lambda: there.all() == [])
