"""Code on its way to a service, and bundles of people with bad intentions."""

import shutil

import pytest

from slipstream.config import dump_given, load_config
from slipstream.errors import ConfigError
from slipstream.service.bundles import MAX_BYTES, MAX_FILES, digest_of, encoded, pack, unpack
from slipstream.service.client import RemoteRuns

RUN = """
[model]
path = "org/model"
[environment]
name = "task/env.py"
settings = {size = 3}
tools = ["task/more/tools.py:add", "mcp:python server.py"]
[algorithm]
kind = "grpo"
loss = "losses/own.py:loss"
[training]
steps = 2
"""


def write(folder, **files):
    for name, text in files.items():
        path = folder / name.replace("__", "/").replace("_py", ".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_code_and_its_imports_go_and_nothing_else(tmp_path):
    write(
        tmp_path, run="", task__env_py="import json, helper\nfrom sub import a", task__helper_py="", task__other_py=""
    )
    write(tmp_path, task__sub__a_py="from . import b", task__sub__b_py="", task__sub____init___py="")
    write(tmp_path, task__more__tools_py="def add(): ...", losses__own_py="def loss(): ...", task__secret="hunter2")
    (tmp_path / "task/sub/__init__.py").touch()
    (tmp_path / "run.toml").write_text(RUN)
    settings, files = pack(dump_given(load_config(tmp_path / "run.toml")))
    assert sorted(files) == [
        *("0/env.py", "0/helper.py", "0/sub/__init__.py", "0/sub/a.py", "0/sub/b.py", "1/tools.py", "2/own.py"),
    ]
    assert str(tmp_path) not in settings
    target = unpack(tmp_path, digest_of(files), encoded(files))
    place = tmp_path / "elsewhere"
    place.mkdir()
    (place / "code").symlink_to(target)
    (place / "run.toml").write_text(settings)
    config = load_config(place / "run.toml").config
    assert config.environment.name == str(target / "0/env.py")
    assert config.environment.tools == (f"{target}/1/tools.py:add", "mcp:python server.py")
    assert config.algorithm.loss == f"{target}/2/own.py:loss"
    assert config.model.path == "org/model"
    assert (target / "0/env.py").read_text() == (tmp_path / "task/env.py").read_text()
    (target / "0/env.py").write_text("changed by somebody")
    assert unpack(tmp_path, digest_of(files), encoded(files)) == target
    assert (target / "0/env.py").read_text() == (tmp_path / "task/env.py").read_text()
    assert [path.name for path in (tmp_path / "code").iterdir()] == [target.name]


@pytest.mark.parametrize(
    "name",
    ["../x.py", "/etc/x.py", "0/../../x.py", "0//x.py", "", ".", "0/x.sh", "0/x\n.py", "a\\b.py", "0/" * 40 + "x.py"],
)
def test_a_name_that_leads_elsewhere_is_refused(tmp_path, name):
    files = {name: b"print()"}
    with pytest.raises(ConfigError, match="cannot be unpacked"):
        unpack(tmp_path, digest_of(files), encoded(files))
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize(
    ("code", "digest"),
    [
        ({"0/x.py": "!"}, "0" * 64),
        ({"0/x.py": "eA=="}, "0" * 64),
        ({"0/x.py": "eA=="}, "../../x"),
        ({f"0/{number}.py": "" for number in range(MAX_FILES + 1)}, "0" * 64),
        (encoded({"0/x.py": b"x" * (MAX_BYTES + 1)}), "0" * 64),
        (encoded({"0/x.py": b"", "0/x.py/y.py": b""}), digest_of({"0/x.py": b"", "0/x.py/y.py": b""})),
    ],
)
def test_a_hostile_bundle_is_refused(tmp_path, code, digest):
    with pytest.raises(ConfigError):
        unpack(tmp_path, digest, code)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_too_much_code_is_refused_before_it_is_sent(tmp_path):
    write(tmp_path, task__env_py="#" * (MAX_BYTES + 1))
    with pytest.raises(ConfigError, match="install it as a package"):
        pack(f'[environment]\nname = "{tmp_path}/task/env.py"\n')


TASK = """
from helper import ANSWERS

def tasks(split, num_tasks, seed):
    return [{"prompt": f"{i}", "answer": ANSWERS[i % 2]} for i in range(num_tasks)]

def reward(task, completion):
    return 1.0
"""


@pytest.mark.service
@pytest.mark.real_start
def test_a_run_from_another_machine_brings_its_code(place, monkeypatch):
    """The client's files are gone before the run starts. Somebody's hostile bundle leaves nothing."""
    write(place.folder, task__env_py=TASK, task__helper_py='ANSWERS = ("a", "b")')
    file = place.run_file(3)
    text = file.read_text().replace(
        f'[data]\npath = "{place.folder / "data.jsonl"}"', '[environment]\nname = "task/env.py"'
    )
    file.write_text(text)
    with place.serve() as service:
        monkeypatch.setattr("slipstream.service.client.this_machine", lambda: "another")
        mine, loaded = RemoteRuns(service.url, ""), load_config(file)
        body = {"name": "x", "settings": text, "code": encoded({"../x.py": b""}), "digest": digest_of({"../x.py": b""})}
        answer = service.client.post("/v1/runs", json=body)
        assert (answer.status_code, "leads out" in answer.text) == (400, True)
        assert mine.all() == []
        paused = place.submit("first", 3000)
        name = mine.submit(loaded, "run").id
        shutil.rmtree(place.folder / "task")
        mine.cancel(paused)
        place.until(name, "done", ticks=False)
        assert str(place.folder / "task") not in (place.folder_of(name) / "service/run.toml").read_text()
