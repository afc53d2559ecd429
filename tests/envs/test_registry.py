import sys

import pytest
from tests.inline_scorer import InlineScorer

from slipstream.config.schema import EnvironmentConfig
from slipstream.envs.base import Episode, RewardFailed
from slipstream.envs.registry import load_environment
from slipstream.envs.scoring.worker_calls import judge
from slipstream.envs.single_turn import gold_of, make_tasks
from slipstream.errors import ConfigError, DataError, EnvironmentFault
from slipstream.records import Message, Task

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


TALKING = """
from slipstream.envs import Environment
class Game(Environment):
    def tasks(self, split, num_tasks): return []
    async def run(self, task, policy): ...
    def score(self, task, completion): ...
"""


def test_a_class_that_talks_says_how_often(load):
    with pytest.raises(ConfigError, match=r"how many turns .* inference.max_model_len .* max_turns = 1"):
        load(TALKING)
    with pytest.raises(ConfigError, match="has max_turns = 0"):
        load(TALKING + "    max_turns = 0\n")
    assert load(TALKING + "    max_turns = 3\n").max_turns == 3


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
        (CLASSES + "    scores_groups = True", "", {}, "class Sums has scores_groups, and no score_group"),
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
        ("import json\n\njson.loads('{')", "", {}, "mine.py, line 3 failed: JSONDecodeError: Expecting"),
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
        ("unheard_of", "'unheard_of' is not installed: use reasoning_gym/<task>, verifiers/<name>, rows"),
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


FAMILY = """
from slipstream.envs import SingleTurn


class Sums(SingleTurn):
    takes_section = True

    def __init__(self, section):
        super().__init__(section.seed)
        self.name, self.digits = section.name, section.settings["digits"]

    def tasks(self, split, num_tasks):
        return []

    def reward(self, task, completion):
        return 0.0
"""


def test_an_entry_point_of_a_family_has_all_names_with_its_beginning(installed):
    installed("their_family", FAMILY, "[slipstream.environments]\nsums/ = their_family:Sums\n")
    environment = load_environment(EnvironmentConfig(name="sums/long", settings={"digits": 7}))
    assert (environment.name, environment.digits) == ("sums/long", 7)


def test_a_missing_package_names_the_extra(monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "reasoning_gym"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ConfigError, match=r"pip install 'slipstream\[reasoning-gym\]'"):
        load_environment(EnvironmentConfig(name="reasoning_gym/spell_backward"))


STRICT = """
import json
import random
from slipstream.envs import SingleTurn

class Strict(SingleTurn):
    def __init__(self, seed=0, length=5):
        super().__init__(seed)
        self.length = length
        json.dumps(length if length != "set" else {1})

    def tasks(self, split, num_tasks):
        return [{"prompt": "p", "answer": "x" * random.Random(0).randrange(1, self.length)}]

    def gold(self, task):
        return random.choice([]) if self.length == 7 else 3

    def reward(self, task, completion):
        return json.loads(completion)
"""


def line_of(text):
    return STRICT.splitlines().index(next(line for line in STRICT.splitlines() if text in line)) + 1


def test_what_the_librarys_code_raises_is_named_by_the_users_line_and_settings(load):
    with pytest.raises(ConfigError, match=rf"line {line_of('json.dumps')} of .*mine.py; .*settings.length = 'set'"):
        load(STRICT, length="set")
    with pytest.raises(EnvironmentFault, match=rf"line {line_of('randrange')} of .*mine.py; .*settings.length = 'abc'"):
        make_tasks(load(STRICT, length="abc"), "train", 1)
    environment = load(STRICT, length=7)
    (task,) = make_tasks(environment, "train", 1)
    with pytest.raises(EnvironmentFault, match=rf"task train/0 of .* \(line {line_of('random.choice')} of .*mine.py; "):
        gold_of(environment, task)
    with pytest.raises(RewardFailed, match=rf"JSONDecodeError.*\(line {line_of('json.loads')} of .*mine.py\)"):
        judge(environment, task, Episode("{"))
    with pytest.raises(DataError, match="returned a int for task train/0"):
        gold_of(load(STRICT), task)


def test_functions_are_named_by_their_line_and_secrets_are_not_shown(load, tmp_path):
    (tmp_path / "helps.py").write_text("import math\n\ndef root(number):\n    return math.sqrt(number)\n")
    text = (
        "import helps\ndef tasks(split, num_tasks, seed, api_key, x):\n    helps.root(x)\ndef reward(task, text): ...\n"
    )
    with pytest.raises(EnvironmentFault) as raised:
        make_tasks(load(text, api_key="hunter2-hunter2", x="four"), "train", 1)
    assert "line 4 of" in str(raised.value)
    assert "helps.py" in str(raised.value)
    assert "settings.x = 'four'" in str(raised.value)
    assert "hunter2" not in str(raised.value)


@pytest.mark.parametrize("base", ["Environment", "SingleTurn"])
@pytest.mark.parametrize(
    ("word", "method", "is_group"),
    [
        ("def", "score_episode(self, task, episode): return Score(0.5)", False),
        ("def", "score_group(self, task, episodes): return [Score(0.5)] * len(episodes)", True),
        ("async def", "score_group(self, task, episodes): return [Score(0.5)] * len(episodes)", True),
    ],
)
async def test_one_way_to_grade_is_enough(load, base, word, method, is_group):
    """`score_episode` or `score_group` stands in place of `score` and `reward`."""
    text = f"""
from slipstream.envs import Environment, Episode, Message, Score, SingleTurn, Task
class Ranked({base}):
    max_turns = 1
    scores_groups = {is_group}
    def tasks(self, split, num_tasks): return []
    async def run(self, task, policy): return Episode("")
    {word} {method}
"""
    environment = load(text, "")
    task = Task("t", (Message("user", "q"),))
    assert (await InlineScorer(environment).score(task, "text")).reward == 0.5
    if is_group:
        assert len(await InlineScorer(environment).score_group(task, [Episode("a"), Episode("b")])) == 2
    with pytest.raises(ConfigError, match=r"class Ranked does not define (score|reward)"):
        load(text.replace(method.partition("(")[0], "nothing").replace("scores_groups = True", ""), "")
