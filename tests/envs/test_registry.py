import sys

import pytest

from slipstream.config.schema import EnvironmentConfig
from slipstream.envs.registry import load_environment
from slipstream.errors import ConfigError

CLASSES = """
from slipstream.envs import SingleTurn
class Sums(SingleTurn):
    def __init__(self, seed=0, digits=2):
        super().__init__(seed)
        self.digits = digits
        if digits == 99: raise ValueError("too many digits")
    def tasks(self, split, num_tasks): return []
    def reward(self, task, completion): return 0.0
"""
FUNCTIONS = "def tasks(split, num_tasks, seed, digits=2): return []\ndef reward(task, completion): return 0.0\n"


@pytest.fixture
def load(tmp_path):
    def load(text, suffix="", **settings):
        path = tmp_path / "mine.py"
        path.write_text(text)
        return load_environment(EnvironmentConfig(name=f"{path}{suffix}", seed=3, settings=settings))

    return load


def test_a_class_by_name_or_alone(load):
    for suffix in (":Sums", ""):
        env = load(CLASSES, suffix, digits=5)
        assert (type(env).__name__, env.name, env.seed, env.digits) == ("Sums", "Sums", 3, 5)


def test_two_functions(load):
    env = load(FUNCTIONS, digits=4)
    assert (env.name, env.seed) == ("mine", 3)
    assert env.tasks("train", 5) == []


def test_what_lies_beside_the_file_can_be_imported(load, tmp_path):
    (tmp_path / "beside_mine.py").write_text("VALUE = 1")
    assert load("import beside_mine\n" + CLASSES).name == "Sums"


@pytest.mark.parametrize(
    ("text", "suffix", "settings", "said"),
    [
        (CLASSES, ":Sumz", {}, r"mine.py has no class 'Sumz': did you mean 'Sums'\?"),
        (CLASSES + "other = 5", ":other", {}, "other is not an Environment"),
        (CLASSES + "class Two(Sums): pass", "", {}, "has the environments Sums, Two"),
        (
            CLASSES,
            "",
            {"digit": 1},
            r"environment.settings.digit: class Sums has no such setting: did you mean 'digits'\?",
        ),
        (CLASSES, "", {"digits": 99}, "class Sums refused its settings: ValueError: too many digits"),
        (CLASSES, "", {"seed": 1}, "use environment.seed"),
        (CLASSES.replace("def reward", "def rewards"), "", {}, "class Sums does not define reward"),
        (CLASSES.replace("super().__init__(seed)", "pass"), "", {}, "does not call super"),
        (CLASSES.replace("seed=0, ", ""), "", {}, "cannot be called with seed"),
        (FUNCTIONS, "", {"digit": 1}, r"tasks\(\) in .* has no such setting: did you mean 'digits'\?"),
        (FUNCTIONS.replace("seed, digits=2", "seed"), "", {"digits": 1}, "it takes no settings"),
        (FUNCTIONS.replace(", seed, digits=2", ""), "", {}, "cannot be called with split, num_tasks, seed"),
        (
            FUNCTIONS.replace("task, completion", "task"),
            "",
            {},
            r"reward\(\) in .* cannot be called with task, completion",
        ),
        (
            "def tasks(split, num_tasks, seed): return []",
            "",
            {},
            "neither an Environment class nor the function reward",
        ),
        ("import json\n\njson.loads('{')", "", {}, "mine.py, line 3 failed: json.decoder.JSONDecodeError: Expecting"),
        ("import no_such_package_here", "", {}, "ModuleNotFoundError: No module named 'no_such_package_here'"),
        ("def f(:", "", {}, "SyntaxError"),
        ("import sys; sys.exit(3)", "", {}, "line 1 failed: SystemExit: 3"),
    ],
)
def test_what_is_wrong_with_a_file_is_said(load, text, suffix, settings, said):
    with pytest.raises(ConfigError, match=said):
        load(text, suffix, **settings)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("nowhere/mine.py", "there is no file nowhere/mine.py"),
        ("nowhere/mine.py:Sums", "there is no file nowhere/mine.py"),
        ("unheard_of", "'unheard_of' is not installed: use reasoning_gym/<task>, rows, path/to/file.py"),
        ("reasoning_gym/spell_backwards", r"no task 'spell_backwards': did you mean 'spell_backward'\?"),
        ("reasoning_gym/zzz", "no task 'zzz': use one of ab, acre, .* and 9[0-9] more"),
    ],
)
def test_an_unknown_name_is_said(name, said):
    with pytest.raises(ConfigError, match=said):
        load_environment(EnvironmentConfig(name=name))


def test_an_entry_point_of_another_package(installed):
    points = "[slipstream.environments]\nsums = their_package:Sums\nbroken = their_package:Missing\n"
    installed("their_package", CLASSES, points)
    assert load_environment(EnvironmentConfig(name="sums", settings={"digits": 7})).digits == 7
    with pytest.raises(ConfigError, match=r"'sum' is not installed: did you mean 'sums'\?"):
        load_environment(EnvironmentConfig(name="sum"))
    with pytest.raises(ConfigError, match="entry point 'broken' cannot be loaded: AttributeError"):
        load_environment(EnvironmentConfig(name="broken"))


def test_a_missing_package_names_the_extra(monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "reasoning_gym"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ConfigError, match=r"pip install 'slipstream\[reasoning-gym\]'"):
        load_environment(EnvironmentConfig(name="reasoning_gym/spell_backward"))
