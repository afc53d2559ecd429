"""What a run is made with: imports found without executing, digests computed once, packages and Python objects."""

import json
import os
import random
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

import slipstream
from slipstream.commands.small_models.tiny_qwen3 import new_model
from slipstream.config import load_config, load_settings
from slipstream.config.python_objects import give
from slipstream.data import readers
from slipstream.envs import SingleTurn
from slipstream.envs.from_python import pack_environment
from slipstream.envs.registry import load_environment
from slipstream.envs.store.registry import push
from slipstream.errors import DataError
from slipstream.launch.prepare import prepare
from slipstream.launch.provenance import digests as digests_module
from slipstream.launch.provenance.collect import code_digest, sources_of
from slipstream.launch.provenance.digests import FileDigests
from slipstream.launch.provenance.imports import files_of
from slipstream.launch.provenance.record import Source, changes_between, told

FILES = {
    "main.py": "import os, random\nimport a.b as c\nfrom pack import deep\ndef f():\n    import late\nimport absent\n",
    "late.py": "this is no Python",
    "a/b.py": "from . import beside\nfrom .sub.x import y\n",
    "a/beside.py": "import main\nfrom ..outside import z\n",
    "a/sub/x.py": "",
    "a/unused.py": "",
    "pack/__init__.py": "from pack.deep import d\n",
    "pack/deep.py": "",
    "random.py": "raise SystemExit('the standard library comes first')",
}
ENVIRONMENT = """
def tasks(split, num_tasks, seed):
    return [{"prompt": f"{split} {i}"} for i in range(9)]
def reward(task, completion):
    return 0.0
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return new_model(tmp_path_factory.mktemp("models") / "tiny", hidden_size=32, num_layers=1)


@pytest.fixture
def prepared(model, tmp_path):
    def prepared(**environment):
        given = {"model": {"path": str(model)}, "training": {"steps": 1, "prompts_per_batch": 2}}
        given |= {"algorithm": {"kind": "grpo"}, "evaluation": {"num_tasks": 4}, "environment": environment}
        return prepare(load_settings(given))

    return prepared


def found(prepared, kind):
    return [source for source in sources_of(prepared, FileDigests()) if source.kind == kind]


def test_imports_are_followed_below_the_folder_only(tmp_path):
    for name, text in FILES.items():
        path = tmp_path / "env" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "outside.py").write_text("")
    names = [str(path.relative_to(tmp_path / "env")) for path in files_of(tmp_path / "env" / "main.py")]
    assert names == ["main.py", "a/b.py", "a/beside.py", "a/sub/x.py", "late.py", "pack/__init__.py", "pack/deep.py"]


def test_a_file_is_read_once_and_told_while_it_takes_long(tmp_path, monkeypatch):
    path, texts = tmp_path / "large.jsonl", []
    path.write_bytes(b"x" * 5_000_000)
    digests = FileDigests(texts.append)
    first = digests.of(path)
    monkeypatch.setattr(FileDigests, "_computed", lambda self, path: pytest.fail("read again"))
    os.link(path, tmp_path / "the same.jsonl")
    assert digests.of(tmp_path / "the same.jsonl") == first
    monkeypatch.undo()
    assert texts == []
    monkeypatch.setattr(digests_module, "_FIRST_S", 0.0)
    FileDigests(texts.append).of(path)
    (text,) = texts
    assert text.startswith(f"computing the digest of {path}: ")


def test_data_that_is_written_to_meanwhile_is_an_error(prepared, tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"{i}?", "answer": str(i)}) + "\n" for i in range(40)))
    made = prepared(name="rows", settings={"path": str(rows)})
    assert [source.num_rows for source in found(made, "data")] == [40]
    rows.write_text(rows.read_text() + "\n")
    with pytest.raises(DataError, match=r"rows.jsonl was changed while the run was starting"):
        sources_of(made, FileDigests())


def test_an_environment_by_digest_is_the_same_from_a_folder_and_from_an_address(prepared, tmp_path, monkeypatch):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "environment.py").write_text(f"import words\n{ENVIRONMENT}")
    (tmp_path / "mine" / "words.py").write_text("")
    digests = {}
    for registry in (str(tmp_path / "kept"), "memory://provenance"):
        pushed = push(tmp_path / "mine", registry)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / f"cache-{len(digests)}"))
        made = prepared(name=pushed.reference, registry=registry)
        assert made.loaded.config.environment.registry == registry
        sources = found(made, "environment")
        assert sorted(source.name for source in sources) == ["environment.py", "words.py"]
        digests[registry] = (code_digest(made), [(source.name, source.digest) for source in sources])
        sys.modules.pop("words", None)
    assert len({*map(str, digests.values())}) == 1


class Drawn(SingleTurn):
    def __init__(self, seed=0):
        super().__init__(seed)
        self.random = random.Random(seed)

    def tasks(self, split, num_tasks):
        return []

    def reward(self, task, completion):
        return 0.0


def test_an_objects_digest_has_no_address_in_it():
    assert pack_environment(Drawn()).name == pack_environment(Drawn()).name


class Reversed(set):
    """A set as another process may have it."""

    def __iter__(self):
        return iter(sorted(super().__iter__(), reverse=True))

    def __repr__(self):
        return repr([*self])


def test_a_set_in_an_object_has_an_order():
    names = []
    for order in ("abc", "cba"):
        environment = Drawn()
        environment.words = Reversed("abc") if order == "cba" else set("abc")
        names.append(pack_environment(environment).name)
    assert names[0] == names[1]


def test_python_objects_and_built_in_environments(prepared):
    rows = [{"prompt": f"{i}?", "answer": str(i)} for i in range(40)]
    names = []
    for reward in ("exact", "number"):
        item = pack_environment(rows, None, reward)
        give(item)
        (source,) = found(prepared(name=item.name), "environment")
        assert source.name == "python:rows"
        assert item.name.endswith(source.digest)
        names.append(source.digest)
    assert names[0] != names[1]
    (gym,) = found(prepared(name="reasoning_gym/spell_backward", num_train_tasks=20), "environment")
    assert gym.version.count(".") == 2


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """A folder of packages with an environment `letters`, Slipstream's own package, and another one."""
    site = tmp_path / "site"
    (site / "letters").mkdir(parents=True)
    (site / "letters" / "__init__.py").write_text("")
    (site / "letters" / "text.py").write_text("LETTER = 'a'\n")
    (site / "letters" / "main.py").write_text(
        "import other, slipstream.launch\nfrom slipstream.envs import Message, SingleTurn, Task\n"
        "from .text import LETTER\n"
        "class Letters(SingleTurn):\n"
        "    def tasks(self, split, num_tasks):\n"
        "        names = [f'{split} {i}' for i in range(min(20, num_tasks))]\n"
        "        return [Task(name, (Message('user', name),), LETTER) for name in names]\n"
        "    def reward(self, task, completion): return 0.0\n"
    )
    (site / "other.py").write_text("")
    (site / "slipstream").symlink_to(Path(slipstream.__file__).parent)
    info = site / "letters-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: letters\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text("[slipstream.environments]\nletters = letters.main:Letters\n")
    monkeypatch.syspath_prepend(site)
    yield site
    for name in [name for name in sys.modules if name.partition(".")[0] in ("letters", "other")]:
        del sys.modules[name]


def test_an_installed_environment_is_its_package_and_its_code(prepared, installed):
    before, *files = found(prepared(name="letters"), "environment")
    assert (before.name, before.version) == ("letters", "letters 1.2")
    assert [each.name for each in files] == ["letters/main.py", "letters/__init__.py", "letters/text.py"]


def _file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(f"import words\nimport slipstream\n{ENVIRONMENT}")
    return {"name": str(path)}, path.with_name("words.py")


def _letters(tmp_path):
    return {"name": "letters"}, tmp_path / "site" / "letters" / "text.py"


def _rows(reward, changed):
    def rows(tmp_path):
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps({"prompt": f"{i}?", "answer": str(i)}) + "\n" for i in range(40)))
        (tmp_path / "own.py").write_text(
            "import words\ndef good(data_source, solution_str, ground_truth, extra_info=None): return 0.0\n"
        )
        given = json.loads(reward.replace("HERE", str(tmp_path)))
        return {"name": "rows", "settings": {"path": str(path), "reward": given}}, tmp_path / changed

    return rows


def _tool(tmp_path):
    tool = tmp_path / "tool.py"
    tool.write_text('import words\ndef double(x: int) -> int:\n    """Twice."""\n    return 2 * x\n')
    given, _ = _file(tmp_path)
    return {**given, "tools": [f"{tool}:double"], "max_turns": 2}, tool


NAMED = {
    "a file": _file,
    "an entry point": _letters,
    "the file of a reward": _rows('"HERE/own.py:good"', "own.py"),
    "what the file of a reward imports": _rows('"HERE/own.py:good"', "words.py"),
    "one of several rewards": _rows('[{"reward": "exact"}, {"reward": "HERE/own.py:good"}]', "own.py"),
    "a tool": _tool,
}
PLACES = {
    "alone": lambda given, first: given,
    "in a mixture apart": lambda given, first: (
        {"name": "mixture", "mixture": {"first": {"name": first}, "second": given}} | {"processes": 1}
    ),
}


@pytest.mark.parametrize("place", [pytest.param("alone", marks=pytest.mark.full), "in a mixture apart"])
@pytest.mark.parametrize("named", NAMED)
def test_what_decides_a_reward_counts_wherever_it_is_named(prepared, installed, tmp_path, named, place):
    (tmp_path / "words.py").write_text("")
    given, changed = NAMED[named](tmp_path)
    item = pack_environment([{"prompt": f"{i}?", "answer": str(i)} for i in range(40)], None, "exact")
    give(item)
    environment = PLACES[place](given, item.name)
    before = prepared(**environment)
    sources = [each for each in sources_of(before, FileDigests()) if each.kind in ("environment", "reward", "tools")]
    assert str(changed) in {each.path for each in sources}
    assert {Path(each.path).is_relative_to(tmp_path) for each in sources if each.path} == {True}
    assert "other.py" not in {each.name for each in sources}
    digest = code_digest(before)
    changed.write_text(changed.read_text() + "\n")
    if named == "a tool":
        assert code_digest(before) == digest, "what was executed counts"
    for name in [name for name in sys.modules if name.partition(".")[0] in ("letters", "words")]:
        del sys.modules[name]
    assert code_digest(prepared(**environment)) != digest


def test_slipstreams_own_environments_are_its_version(prepared, tmp_path):
    (tmp_path / "mine.py").write_text(ENVIRONMENT)
    made = prepared(name=str(tmp_path / "mine.py"))
    section = made.config.environment.model_copy(update={"name": "detection", "settings": {}})
    config = made.config.model_copy(update={"environment": section})
    (source,) = found(replace(made, plan=replace(made.plan, config=config), reads=()), "environment")
    assert (source.name, source.version, source.path) == ("detection", "built in", "")


def test_verifiers_is_looked_up_where_its_interpreter_has_it(prepared, tmp_path):
    (tmp_path / "mine.py").write_text(ENVIRONMENT)
    (tmp_path / "taskset.py").write_text("import part\n")
    (tmp_path / "part.py").write_text("")
    for name, version in (("verifiers", "0.5.1"), ("my_shop", "3.0")):
        info = tmp_path / "venv/lib/python3.12/site-packages" / f"{name}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {version}\n")
    made = prepared(name=str(tmp_path / "mine.py"))
    python = tmp_path / "venv/bin/python"
    python.parent.mkdir()
    python.touch(mode=0o700)

    def sources(name):
        section = made.config.environment.model_copy(update={"name": name, "python": str(python)})
        config = made.config.model_copy(update={"environment": section})
        environment, plan = load_environment(section), replace(made.plan, config=config)
        return found(replace(made, plan=plan, environment=environment, reads=()), "environment")

    versions = [(each.name, each.version) for each in sources("verifiers/my-shop")]
    assert versions == [("verifiers", "0.5.1"), ("my-shop", "3.0")]
    files = sources(f"verifiers/{tmp_path / 'taskset.py'}")[1:]
    assert [each.name for each in files] == ["taskset.py", "part.py"]
    (tmp_path / "venv/lib/python3.12/site-packages/my_shop.py").write_text("import verifiers\n")
    assert [each.name for each in sources("verifiers/my-shop")][2:] == ["my_shop.py"]


def test_a_data_set_of_the_hub_has_a_revision():
    commit = "0123456789" * 4
    cached = SimpleNamespace(cache_files=[{"filename": f"/cache/org___name/default/0.0.0/{commit}/name-train.arrow"}])
    assert readers._hub_revision(cached) == commit
    assert readers._hub_revision(SimpleNamespace(cache_files=[], _fingerprint="5e1f")) == "5e1f"


def test_the_files_of_tool_servers(prepared, tmp_path):
    environment, tool = tmp_path / "mine.py", tmp_path / "tool.py"
    environment.write_text(ENVIRONMENT)
    tool.touch()
    made = prepared(name=str(environment))
    run = {"tools": (f"mcp:{sys.executable} {tool} --key s3cret",)}
    server = SimpleNamespace(**vars(made.config.environment) | run)
    config = made.config.model_copy(update={"environment": server})
    served = replace(made, plan=replace(made.plan, config=config), reads=())
    sources = found(served, "tools")
    assert [each.name for each in sources] == ["tool.py"]
    assert "s3cret" not in repr(sources)


def test_only_data_that_both_read_are_compared():
    def data(digest, split="", name="a.jsonl", setting="data.path"):
        return Source("data", setting, name, digest, split=split)

    one = [data("1"), data("2", "test")]
    assert changes_between(one, [data("1")]) == [], "no evaluation any more"
    assert changes_between(one, [data("1", name="renamed"), data("2", "test")]) == []
    (change,) = changes_between([data("1" * 64)], [data("2" * 64)])
    assert change.sentence == "a.jsonl was 111111111111 and is 222222222222"
    many = [Source("environment", "environment.name", f"{i}.py", str(i)) for i in range(6)]
    text = told(changes_between(many, [replace_digest(each) for each in many]))
    assert text.endswith("2.py was 2 and is x2; and 3 more")
    added = changes_between([], [Source("tools", "environment.tools", "t.py", "9")])
    assert [change.sentence for change in added] == ["t.py (9) is new"]


def replace_digest(source):
    return Source(source.kind, source.setting, source.name, f"x{source.digest}")


def test_an_advantage_of_ones_own_counts(model, tmp_path):
    own, environment, run_file = tmp_path / "own.py", tmp_path / "mine.py", tmp_path / "run.toml"
    own.write_text("def centred(rewards_S, group_ids_S):\n    return rewards_S - rewards_S.mean()\n")
    environment.write_text(ENVIRONMENT)
    run_file.write_text(
        f'[model]\npath = "{model}"\n[environment]\nname = "mine.py"\n[algorithm]\nkind = "grpo"\n'
        f'advantage = "own.py:centred"\n[training]\nsteps = 1\nprompts_per_batch = 2\n'
    )
    made = prepare(load_config(run_file))
    assert [(each.setting, each.name) for each in found(made, "algorithm")] == [("algorithm.advantage", "own.py")]
