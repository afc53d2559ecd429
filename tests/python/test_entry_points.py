"""What a Python caller passes becomes settings and objects for another process; what is wrong is said at once."""

import subprocess
import sys
import threading

import msgspec
import pytest

import slipstream
from slipstream.config import load_settings
from slipstream.config.python_objects import give, given, is_python_object, load, pack
from slipstream.envs import SingleTurn, Task
from slipstream.envs.base import Score
from slipstream.envs.from_python import RowEnvironment, load_python_environment, pack_environment, pack_rows
from slipstream.envs.scoring.pool import ScorerPool
from slipstream.errors import ConfigError, DataError, EnvironmentFault, SlipstreamError
from slipstream.python import entry_points
from slipstream.python.protocol import Outcome
from slipstream.python.run_handle import error_of
from tests.envs.environments import shorten


def tasks(split, num_tasks, seed, suffix=""):
    return [{"prompt": f"{split} {seed} {i}{suffix}", "answer": str(i)} for i in range(num_tasks)]


def reward(task, completion):
    return float(completion == task.answer)


LOCK = threading.Lock()
CYCLE = []
CYCLE.append(CYCLE)
ROWS = [{"question": f"{i} + 1?", "answer": i + 1, "level": i % 3} for i in range(40)]


class Own(SingleTurn):
    def __init__(self, seed=0, size=3):
        super().__init__(seed)
        self.size = size

    def tasks(self, split, num_tasks):
        return [Task(f"{split}/{i}", f"{i}", "x" * self.size) for i in range(num_tasks)]

    def reward(self, task, completion):
        return float(completion == task.answer)


def made(packed, seed=0, **settings):
    give(packed)
    return load_python_environment(packed.name, seed, settings)


def test_functions_get_seed_and_settings():
    environment = made(pack_environment(tasks, reward=reward), 7, suffix="!")
    assert [task.prompt[0].content for task in environment.tasks("eval", 2)] == ["eval 7 0!", "eval 7 1!"]
    (task,) = environment.tasks("train", 1)
    assert environment.score(task, "0") == Score(1.0)


def test_rows_are_split_by_their_text_unless_held_out_ones_are_given():
    environment = made(pack_environment(ROWS, reward="number"))
    train, held_out = environment.tasks("train", 100), environment.tasks("eval", 100)
    assert len(train) + len(held_out) == 40
    assert 0 < len(held_out) < 15
    assert environment.num_train_tasks == len(train)
    assert train[0].info == {"level": (int(train[0].answer) - 1) % 3}
    assert environment.score(train[0], f"it is {train[0].answer}.0") == Score(1.0)
    apart = made(pack_environment(ROWS, [{"prompt": "2?", "answer": "2"}], reward="exact"))
    assert len(apart.tasks("train", 100)) == 40
    (task,) = apart.tasks("eval", 100)
    assert [apart.score(task, text).reward for text in (" 2 ", "3")] == [1.0, 0.0]


@pytest.mark.parametrize("table", ["pandas", "datasets"])
def test_rows_of_a_table(table):
    import datasets
    import pandas

    given_rows = pandas.DataFrame(ROWS) if table == "pandas" else datasets.Dataset.from_list(ROWS)
    assert len(made(pack_environment(given_rows, ROWS[:2], reward="number")).tasks("train", 100)) == 40


def test_an_environment_is_taken_as_it_is():
    assert made(pack_environment(Own(size=5))).tasks("train", 1)[0].answer == "xxxxx"
    assert made(pack_environment(Own), 3, size=2).tasks("train", 1)[0].answer == "xx"
    with pytest.raises(ConfigError, match="no effect"):
        made(pack_environment(Own()), 0, size=2)


def test_the_name_follows_the_source():
    first, same = (pack_environment(tasks, reward=reward).name for _ in range(2))
    assert first == same
    assert first != pack_environment(tasks, reward=lambda task, completion: 0.0).name
    assert pack_rows(ROWS).name != pack_rows(ROWS[1:]).name


def test_another_body_under_the_same_name_is_another_source():
    def half():
        def graded(task, completion):
            return 0.5

        return graded

    def whole():
        def graded(task, completion):
            return 1.0

        return graded

    assert pack_environment(tasks, reward=half()).name != pack_environment(tasks, reward=whole()).name


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((tasks,), "no reward: give reward="),
        ((tasks, None, "best"), "'best' is not a reward"),
        ((tasks, None, 3), "reward is a int"),
        ((tasks, None, lambda: 0.0), r"reward\(\) cannot be called with task, completion"),
        ((lambda split: [], None, reward), r"tasks\(\) cannot be called with split, num_tasks, seed"),
        ((tasks, ROWS, reward), "omit eval_tasks"),
        ((Own(), None, reward), "its own reward"),
        (({"prompt": "a"}, None, reward), "tasks is a dict"),
        (([], None, reward), "tasks holds no row"),
        ((["a"], None, reward), "row 0 of tasks is a str"),
        (
            (tasks, None, lambda task, completion, lock=LOCK: 0.0),
            "or a function given with them, cannot be sent to the run's process",
        ),
    ],
)
def test_what_is_wrong_is_one_sentence(arguments, message):
    with pytest.raises(ConfigError, match=message):
        pack_environment(*arguments)


def test_rows_of_one_prompt_are_trained_on():
    """One prompt in ten is held out by its text; of one prompt alone, none."""
    for number in range(40):
        environment = RowEnvironment("tasks", [{"prompt": f"{number}", "answer": "1"}] * 3, None, "exact")
        assert len(environment.tasks("train", 9)) == 3


def test_a_row_without_a_prompt_is_named():
    with pytest.raises(DataError, match="train task 1 of tasks has no 'prompt'"):
        pack_environment([{"prompt": "a"}, {"text": "b"}], reward="exact")


def test_what_nobody_gave_is_told_with_the_calls_to_use():
    told = r"slipstream.train\(.*resume=True\), or slipstream.sft, .* slipstream.evaluate\("
    with pytest.raises(ConfigError, match=told):
        given("python:tasks@0123456789ab")


def test_arguments_become_tables(tmp_path):
    tree = entry_points._tree({"training": {"learning_rate": 1e-3}, "evaluation": False}, tmp_path, "grpo", 3, "out", 5)
    assert tree["training"] == {"learning_rate": 1e-3, "steps": 3}
    loaded = load_settings({**tree, "environment": {"name": "reasoning_gym/spell_backward"}})
    assert (loaded.config.training.steps, loaded.config.run.seed, loaded.config.evaluation) == (3, 5, None)
    assert loaded.origins["training.steps"] == "Python call"
    with pytest.raises(ConfigError, match=r"steps and training=.*say the same"):
        entry_points._tree({"training": {"steps": 3}}, "m", "grpo", 3, None, None)
    with pytest.raises(ConfigError, match="folder = b'out' is no path"):
        entry_points._tree({}, "m", "grpo", 3, b"out", None)


def test_conversations_become_the_section_data(monkeypatch, tmp_path):
    talk, held_out = [{"prompt": "a", "completion": "b"}], [{"prompt": "c", "completion": "d"}]
    made = []

    class Job:
        def __init__(self, call, shown):
            made.append(call)

        def follow(self, each):
            return Outcome()

    monkeypatch.setattr(entry_points, "Job", Job)

    def settings(data, **more):
        slipstream.sft("m", data, folder=tmp_path / f"run{len(made)}", progress=False, **more)
        return load_settings(made[-1].settings, algorithm="sft").config

    config = settings(
        {"path": talk, "max_length": 8, "too_long": "truncate"}, eval_data=held_out, epochs=0.5, evaluation={"every": 2}
    )
    assert [load_rows(each) for each in made[-1].objects] == [talk, held_out]
    assert [config.data.path, config.data.eval_path] == [each.name for each in made[-1].objects]
    assert (config.data.max_length, config.data.too_long) == (8, "truncate")
    assert (config.training.steps, config.training.epochs, config.evaluation.every) == (None, 0.5, 2)
    config = settings("org/name", steps=3, algorithm={"train_on": "everything"})
    assert (config.data.path, config.algorithm.train_on, made[-1].objects) == ("org/name", "everything", ())
    assert settings({"path": talk, "eval_path": held_out}, steps=3).data.eval_path == made[0].objects[1].name
    for arguments, message in (
        (((),), "data holds no row"),
        ((None,), "nothing to imitate"),
        (({"path": "a", "eval_path": "b"},), "eval_data and data=.*say the same"),
        ((talk,), "training.epochs has no effect while training.steps is set"),
    ):
        with pytest.raises(ConfigError, match=message):
            slipstream.sft("m", *arguments, eval_data=None if None in arguments else "e", steps=1, epochs=1)


def load_rows(packed):
    give(packed)
    return load(packed.name)


@pytest.mark.parametrize(
    ("given_more", "message"),
    [
        ({"training": {"stepps": 1}}, r"training.stepps is not a known key: did you mean training.steps\?"),
        ({"trainning": {"steps": 1}}, "trainning is not a known section"),
        ({"training": {"steps": 0}}, r"training.steps = 0 .*Python call"),
        ({"steps": 1, "resume": True}, "resume=True needs the folder"),
    ],
)
def test_wrong_settings_start_nothing(given_more, message, monkeypatch):
    monkeypatch.setattr(entry_points, "Job", None)
    with pytest.raises(ConfigError, match=message):
        slipstream.train("model", tasks, reward, **given_more)


def test_a_module_beside_the_program_goes_along_by_value(tmp_path, monkeypatch):
    module = "WORD = 'yes'\ndef grade(task, completion):\n    return float(completion == WORD)\n"
    (tmp_path / "my_rewards.py").write_text(module)
    monkeypatch.syspath_prepend(str(tmp_path))
    import my_rewards

    data = pack("grade", my_rewards.grade, my_rewards.grade).data
    program = "import sys, cloudpickle; print(cloudpickle.loads(sys.stdin.buffer.read())(None, 'yes'))"
    done = subprocess.run([sys.executable, "-c", program], input=data, capture_output=True, timeout=300, check=True)
    assert done.stdout.strip() == b"1.0"


async def test_closures_are_graded_in_workers_that_can_be_killed():
    bonus = {"x": 0.5}

    def graded(task, completion):
        while completion == "hang":
            pass
        return bonus.get(completion, 0.0)

    packed = pack_environment(tasks, reward=graded)
    give(packed)
    assert is_python_object(packed.name)
    tree = {"model": {"path": "m"}, "algorithm": {"kind": "grpo"}, "training": {"steps": 1}}
    config = load_settings({**tree, "environment": {"name": packed.name, "reward_timeout_s": 60.0}}).config.environment
    (task,) = load_python_environment(packed.name, 0, {}).tasks("train", 1)
    async with ScorerPool(config) as scorer:
        assert (await scorer.score(task, "x")).reward == 0.5
        shorten(scorer, 0.5)
        with pytest.raises(EnvironmentFault, match=r"0\.5 s"):
            await scorer.score(task, "hang")
        shorten(scorer, 60.0)
        assert (await scorer.score(task, "y")).reward == 0.0


def test_errors_keep_their_class():
    error = error_of(Outcome(error="DataError", message="row 3 is empty: remove it", exit_code=3))
    assert type(error) is DataError
    assert type(error_of(Outcome(error="os", message="?"))) is SlipstreamError
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(Outcome(again=True)), type=Outcome).again


@pytest.mark.parametrize("data", [tasks, Own, Own()])
def test_what_makes_tasks_is_no_data_and_the_argument_is_named(data):
    with pytest.raises(ConfigError, match="pass it as tasks="):
        slipstream.sft("m", data, reward)


@pytest.mark.parametrize("bad", ["half \ud83d of it", CYCLE])
def test_rows_that_are_no_json_are_named(bad):
    rows = [*ROWS, {"prompt": "a", "completion": "b", "note": bad}]
    for packed in (lambda: pack_rows(rows), lambda: pack_environment(rows, reward=reward)):
        with pytest.raises(DataError, match="row 40 of"):
            packed()


def test_on_step_that_cannot_be_called_is_refused_at_once():
    with pytest.raises(ConfigError, match="on_step"):
        slipstream.sft("model", ROWS, on_step=3)
