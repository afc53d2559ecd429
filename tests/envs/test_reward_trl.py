"""TRL's reward functions: called as TRL's trainer calls them, and TRL's own give what they give there."""

import contextlib
import inspect
import json
import logging
import types

import pytest
import torch
import trl.rewards
import trl.trainer.grpo_trainer as grpo_trainer
from tokenizers import Tokenizer, models, pre_tokenizers
from trl import GRPOTrainer

from slipstream.config.python_objects import give
from slipstream.config.schema import EnvironmentConfig
from slipstream.envs.base import Episode, RewardFailed
from slipstream.envs.from_python import RowEnvironment, load_python_environment, pack_environment
from slipstream.envs.registry import load_environment
from slipstream.envs.rewards import NotApplicable, Options, named
from slipstream.envs.scoring.pool import ScorerPool
from slipstream.errors import ConfigError, DataError

FUNCTIONS = """
from trl.rewards import get_cosine_scaled_reward, get_repetition_penalty_reward, get_soft_overlong_punishment

soft = get_soft_overlong_punishment(max_completion_len=6, soft_punish_cache=4)
repeated = get_repetition_penalty_reward(ngram_size=2)
CALLS = []

def columns(prompts, completions, completion_ids=None, **kwargs):
    CALLS.append({"prompts": prompts, "completions": completions, "completion_ids": completion_ids, **kwargs})
    return [1.0] * len(prompts)

def narrow(completions, solution):
    return [float(each[0]["content"] == right) for each, right in zip(completions, solution)]

def unique(completions, **kwargs):
    texts = [each[0]["content"] for each in completions]
    return [1.0 / texts.count(text) for text in texts]

async def later(prompts, completions, **kwargs):
    return [0.25] * len(prompts)

def metrics(completions, log_metric, log_extra, **kwargs):
    log_extra("length", [len(completions)])
    log_metric("seen", len(completions))
    return [0.5 for _ in completions]

def short(completions, **kwargs): return [1.0, 2.0]
def text(completions, **kwargs): return "1"
def nan(completions, **kwargs): return [float("nan")]
def needs(completions, difficulty, **kwargs): return [1.0]
NUMBER = 3
"""
SAID = [
    "<think>\nsix\n</think>\n\\boxed{6}",
    "<think>\nsix\n\\boxed{6}",
    "\\boxed{7}",
    "the answer is 6",
    "a a a a a a a a",
    "",
]


@pytest.fixture
def file(tmp_path):
    (tmp_path / "functions.py").write_text(FUNCTIONS)
    return tmp_path / "functions.py"


@pytest.fixture
def tokenizer(tmp_path):
    words = {word: number for number, word in enumerate(["[UNK]", "a", "the", "answer", "is", "6"])}
    made = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


@pytest.fixture
def rows(tmp_path):
    """`rows(reward, prompt=..., **settings)`: the environment, and its first task."""

    def make(reward, prompt=None, given=None, **settings):
        data = [
            {
                "prompt": prompt if prompt is not None else [{"role": "user", "content": f"2 * {n}?"}],
                "solution": "$6$",
                "level": n,
                **(given or {}),
            }
            for n in range(20)
        ]
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in data))
        config = EnvironmentConfig(
            name="rows", settings={"path": str(tmp_path / "rows.jsonl"), "reward": reward, **settings}
        )
        environment = load_environment(config)
        return environment, environment.tasks("train", 1)[0]

    return make


def theirs(function, task, completions, ids=None):
    """What TRL's own trainer computes for these completions."""
    columns = {name: value for name, value in task.info["columns"].items() if name != "prompt"}
    prompt = task.info["columns"]["prompt"]
    is_text = isinstance(prompt, str)
    texts = [text if is_text else [{"role": "assistant", "content": text}] for text in completions]
    trainer = types.SimpleNamespace(
        accelerator=types.SimpleNamespace(device=torch.device("cpu"), num_processes=1),
        reward_funcs=[function],
        reward_processing_classes=[None],
        reward_func_names=["f"],
        state=None,
        environments=None,
        _log_completion_extra=lambda *_: None,
        _log_metric=lambda *_: None,
        _current_train_step_time=0.0,
        _metrics={"train": {}},
        model=types.SimpleNamespace(training=True),
        args=types.SimpleNamespace(report_to=[]),
    )
    inputs = [{"prompt": prompt, **columns} for _ in texts]
    calculate = inspect.unwrap(GRPOTrainer._calculate_rewards)
    module = grpo_trainer
    gather, context, logger = module.gather, module.profiling_context, module.logger
    module.gather, module.logger = (lambda tensor: tensor), logging.getLogger("test")
    module.profiling_context = lambda *_: contextlib.nullcontext()
    try:
        found = calculate(trainer, inputs, [prompt] * len(texts), texts, ids or [[] for _ in texts])
    finally:
        module.gather, module.profiling_context, module.logger = gather, context, logger
    return [None if value != value else value for value in found[:, 0].tolist()]


def ours(environment, task, completions):
    found = []
    for text in completions:
        try:
            found.append(environment.score(task, text).reward)
        except NotApplicable:
            found.append(None)
    return found


@pytest.mark.parametrize("name", ["think_format_reward", "accuracy_reward", "reasoning_accuracy_reward"])
def test_functions_of_trl_give_what_its_trainer_gets(rows, name):
    environment, task = rows(f"trl:trl.rewards:{name}")
    expected = theirs(getattr(trl.rewards, name), task, SAID)
    assert ours(environment, task, SAID) == expected
    assert len(set(expected)) > 1


def test_a_right_answer_that_cannot_be_parsed_is_not_applicable(rows):
    environment, task = rows("trl:trl.rewards:accuracy_reward", given={"solution": "none"})
    assert ours(environment, task, SAID[:2]) == theirs(trl.rewards.accuracy_reward, task, SAID[:2]) == [None, None]
    with pytest.raises(RewardFailed, match=r"accuracy_reward.* gave None for a completion of task path/0"):
        environment.score(task, "6")


@pytest.mark.parametrize(("name", "distinct"), [("soft", 3), ("repeated", 2)])
def test_functions_of_token_ids(rows, file, tokenizer, name, distinct):
    with pytest.raises(ConfigError, match=r"reads completion_ids.*name the folder .*environment.settings.tokenizer"):
        rows(f"trl:{file}:{name}")
    environment, task = rows(f"trl:{file}:{name}", tokenizer=str(tokenizer))
    encode = Tokenizer.from_file(str(tokenizer / "tokenizer.json")).encode
    ids = [encode(text).ids for text in SAID]
    module = trl.rewards
    function = (
        module.get_soft_overlong_punishment(6, 4)
        if name == "soft"
        else module.get_repetition_penalty_reward(ngram_size=2)
    )
    expected = theirs(function, task, SAID, ids)
    assert ours(environment, task, SAID) == pytest.approx(expected)
    assert len(set(expected)) >= distinct


def test_they_are_called_as_trl_calls_them(rows, file):
    environment, task = rows(f"trl:{file}:columns")
    assert ours(environment, task, ["six"]) == [1.0]
    (reward,) = environment._rewards.values()
    calls = reward._function.__globals__["CALLS"]
    theirs(reward._function, task, ["six"])
    for call in calls:
        call.pop("log_extra")
        call.pop("log_metric")
    assert calls[0] == calls[1]
    assert calls[0] == {
        "prompts": [[{"role": "user", "content": "2 * 0?"}]],
        "completions": [[{"role": "assistant", "content": "six"}]],
        "completion_ids": [[]],
        "solution": ["$6$"],
        "level": [0],
        "trainer_state": None,
    }


def test_a_prompt_that_is_a_text_makes_completions_texts(rows, file):
    environment, task = rows(f"trl:{file}:columns", prompt="2 * 3?")
    ours(environment, task, ["six"])
    (reward,) = environment._rewards.values()
    (call,) = reward._function.__globals__["CALLS"]
    assert (call["prompts"], call["completions"]) == (["2 * 3?"], ["six"])


def test_rows_without_an_answer_and_functions_without_kwargs(rows, file):
    environment, task = rows(f"trl:{file}:narrow", given={"solution": "so"})
    assert ours(environment, task, ["so", "no"]) == [1.0, 0.0]
    environment, task = rows("trl:trl.rewards:think_format_reward", given={"solution": None})
    assert task.answer is None
    assert ours(environment, task, SAID[:1]) == [1.0]


async def test_coroutines_and_metrics_in_workers(rows, file):
    environment, task = rows(f"trl:{file}:later")
    assert (await environment.score(task, "x")).reward == 0.25
    environment, task = rows(f"trl:{file}:metrics")
    config = EnvironmentConfig(name="rows", settings=environment._settings)
    async with ScorerPool(config) as scorer:
        score = await scorer.score(task, "x")
    assert (score.reward, score.metrics) == (0.5, {"seen": 1.0})


async def test_groups_are_given_together(rows, file):
    environment, task = rows(f"trl:{file}:unique", score_groups=True)
    assert environment.scores_groups
    scores = await environment.score_group(task, [Episode(text) for text in ("a", "b", "a", "a")])
    assert [score.reward for score in scores] == pytest.approx([1 / 3, 1.0, 1 / 3, 1 / 3])
    async with ScorerPool(EnvironmentConfig(name="rows", settings=environment._settings)) as scorer:
        scores = await scorer.score_group(task, [Episode(text) for text in ("a", "b", "a")])
    assert [score.reward for score in scores] == [0.5, 1.0, 0.5]
    environment, _ = rows(f"trl:{file}:unique")
    assert not environment.scores_groups


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("short", "returned 2 rewards for 1 completions"),
        ("text", "returned a str"),
        ("nan", "returned nan among its rewards"),
    ],
)
def test_what_is_no_list_of_rewards(rows, file, name, said):
    environment, task = rows(f"trl:{file}:{name}")
    with pytest.raises(RewardFailed, match=said):
        environment.score(task, "x")


@pytest.mark.parametrize(
    ("reward", "said"),
    [
        ("trl:functions.py", "names no function"),
        ("trl:FILE:colums", "has no function 'colums': did you mean 'columns'"),
        ("trl:FILE:NUMBER", "has no function 'NUMBER'"),
        ("trl:trl.rewards:nothing", "nothing cannot be imported"),
        ("trl:no.such:f", "f cannot be imported .*ModuleNotFoundError"),
    ],
)
def test_names_that_are_wrong(file, reward, said):
    with pytest.raises(ConfigError, match=said):
        named(reward.replace("FILE", str(file)))


def test_a_column_that_is_missing_is_named_with_its_row(rows, file):
    with pytest.raises(DataError, match=r"row 1 of .*rows.jsonl has no column 'difficulty', which needs\(\) needs"):
        rows(f"trl:{file}:needs")


async def test_from_python(file):
    data = [{"prompt": f"2 * {n}?", "solution": "so", "answer": "so"} for n in range(20)]
    pack_environment(data, reward=f"trl:{file}:columns")
    environment = RowEnvironment("rows", data, None, f"trl:{file}:columns")
    task = environment.tasks("train", 1)[0]
    assert environment.score(task, "<think>x</think>y").reward == 1.0
    (call,) = environment._reward._function.__globals__["CALLS"]
    assert (call["prompts"], call["completions"]) == (["2 * 0?"], ["<think>x</think>y"])
    assert (call["solution"], call["answer"]) == (["so"], ["so"])
    grouped = named(f"trl:{file}:unique", Options(score_groups=True))
    packed = pack_environment(data, reward=grouped)
    give(packed)
    environment = load_python_environment(packed.name, 0, {})
    assert environment.scores_groups
