"""Environments of the package verifiers, of both generations, in real environment processes with the real package."""

import asyncio
import contextlib
import os
import time

import psutil
import pytest
import pytest_asyncio
from test_policy import END, Letters
from verifiers_interpreters import ENVIRONMENTS, interpreter

from slipstream.config.environment import EnvironmentConfig
from slipstream.engine_protocols import Generates
from slipstream.envs.base import ContextFull, Reply, Score
from slipstream.envs.hosted import keeper
from slipstream.envs.hosted.apart import placement
from slipstream.envs.registry import load_environment, played
from slipstream.envs.single_turn import make_tasks
from slipstream.errors import ConfigError, EnvironmentFault
from slipstream.orchestrator.rollouts import RolloutRunner
from slipstream.records import Completion, SamplingParams, ToolCall

KEY = "SLIPSTREAM_TEST_TOKEN"
pytestmark = pytest.mark.timeout(300)
one_loop = pytest.mark.asyncio(loop_scope="module")
"""The process that plays episodes belongs to an event loop."""


def load(file, version, settings=None, **config):
    name = f"verifiers/{ENVIRONMENTS / file}.py"
    return load_environment(
        EnvironmentConfig(name=name, python=interpreter(version), settings=settings or {}, **config)
    )


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["0.3", "0.4"])
async def guess(request, tmp_path_factory):
    """The guessing game of either generation; one process plays all episodes, of a run that has a key."""
    if request.param == "0.3":
        environment = load("guess_legacy", "0.3", {"size": 60})
    else:
        environment = load("guess_v1", "0.4", {"taskset": {"size": 60}})
    environment.log_folder = tmp_path_factory.mktemp("logs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(KEY, "secret")
        environment.tasks("train", 60)
        yield environment
    await environment.close()


of_legacy = pytest.mark.parametrize("guess", ["0.3"], indirect=True)
"""Tests that may kill the process, which takes seconds to start."""


class Scripted:
    """A policy that says what is given."""

    state = None

    def __init__(self, *turns):
        self.turns = list(turns)
        self.seen = []

    async def chat(self, messages, *, max_tokens=None):
        self.seen.append(list(messages))
        turn = self.turns.pop(0)
        if isinstance(turn, Exception):
            raise turn
        return turn if isinstance(turn, Reply) else Reply(turn, "stop", num_prompt_tokens=3, num_tokens=2)

    async def call_tool(self, call):
        raise AssertionError("the environment runs its own tools")


class Speaker(Generates):
    """An engine that says the same turns in every rollout, one token for a letter."""

    def __init__(self, *turns):
        self._turns = turns
        self.sampled = []

    async def generate(self, request):
        turn = int(request.id.partition(".")[2].partition("-")[0])
        ids = [*map(ord, self._turns[turn]), END]
        self.sampled += ids
        return Completion(request.id, ids, [-0.5] * len(ids), "stop")


OWN = """
from slipstream.envs import Environment, Episode, Message, Task

class Own(Environment):
    max_turns = 1

    def tasks(self, split, num_tasks):
        return [Task(f"{split}{i}", (Message("user", f"say hi {split} {i}"),), "hi") for i in range(num_tasks)]

    async def run(self, task, policy):
        return Episode((await policy.chat(task.prompt)).text)

    def score(self, task, completion):
        from slipstream.envs import Score
        return Score(float(completion == task.answer))
"""


class OwnScorer:
    """Grades in this process."""

    def __init__(self, environment):
        self.environment = environment

    async def score(self, task, episode):
        return self.environment.score_episode(task, episode)


class NoScorer:
    async def score(self, task, episode):
        raise AssertionError("the environment has graded it")


async def rollout(environment, *turns, run_timeout_s=60.0):
    task, engine = environment.tasks("train", 1)[0], Speaker(*turns)
    runner = RolloutRunner(
        environment, NoScorer(), Letters(), engine, request_timeout_s=60, run_timeout_s=run_timeout_s
    )
    made = await runner.run(task, rollout_id="r", group_id="g", sampling=SamplingParams(8), seed=1)
    return made, engine


def right_and_wrong(environment):
    answer = environment.tasks("train", 1)[0].answer
    return answer, str(int(answer) + 1)


@of_legacy
@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.quick("True-*")
@one_loop
@pytest.mark.full
async def test_a_part_of_a_mixture_beside_another_that_plays_itself(apart, guess, tmp_path):
    """Also where the whole mixture is in a process of its own, because the other part has a `run`."""
    (tmp_path / "own.py").write_text(OWN)
    mixture = {
        "game": {
            "name": f"verifiers/{ENVIRONMENTS / 'guess_legacy.py'}",
            "python": interpreter("0.3"),
            "settings": {"size": 60},
        },
        "own": {"name": str(tmp_path / "own.py")},
    }
    config = EnvironmentConfig.model_validate({"name": "mixture", "mixture": mixture, "processes": int(apart)})
    environment = load_environment(config)
    assert placement(environment)[0], "of the part with a run"
    for name in ("_known", "_tasks", "_is_read"):  # asked for once
        setattr(environment.parts["game"], name, getattr(guess, name))
    whole = played(environment, config)
    whole.attach(lambda text: None, tmp_path)
    game, own = make_tasks(environment, "train", 2)

    async def play(task, *turns):
        runner = RolloutRunner(whole, OwnScorer(environment), Letters(), Speaker(*turns), request_timeout_s=60)
        return await runner.run(task, rollout_id="r", group_id="g", sampling=SamplingParams(8), seed=1)

    await whole.setup()
    try:
        assert (await play(own, "hi")).reward == 1.0
        right = await play(game, game.answer)
        late = await play(game, str(int(game.answer) + 1), game.answer)
        assert (right.outcome, right.num_turns, late.outcome, late.num_turns) == ("done", 1, "done", 2)
        assert right.reward == late.reward == 2.0, "as the game itself grades"
    finally:
        await whole.close()
    if not apart:
        assert (tmp_path / "game" / "environment.log").exists(), "each part with a process has a log of its own"


def test_tasks_come_from_the_environments_own_data(guess):
    train, held_out = guess.tasks("train", 60), guess.tasks("eval", 60)
    assert len(train) + len(held_out) == 60
    assert held_out
    assert not {task.prompt[-1].content for task in train} & {task.prompt[-1].content for task in held_out}
    assert [message.role for message in train[0].prompt] == ["system", "user"]
    assert [message.content for message in train[0].prompt] == ["Be brief.", f"Guess {train[0].id.split('/')[1]}"]
    assert guess.tasks("train", 5) == train[:5]
    assert guess.max_turns == 3
    assert guess.gold(train[0]) is None
    assert guess.eval_source


@one_loop
async def test_an_episode_is_played_and_graded_there(guess):
    right, wrong = right_and_wrong(guess)
    task = guess.tasks("train", 1)[0]
    policy = Scripted(wrong, Reply(f"<think>{wrong} was wrong</think>{wrong}", "stop"), right)
    episode = await guess.run(task, policy)
    assert (episode.completion, episode.reward, episode.num_turns, episode.outcome) == (right, 2.0, 3, "done")
    assert episode.metrics["right"] == 1.0
    # What the policy said comes back as it said it, with its thinking.
    said = [message.content for message in policy.seen[-1]]
    assert said[1:] == [
        task.prompt[1].content,
        wrong,
        "No. Again.",
        f"<think>{wrong} was wrong</think>{wrong}",
        "No. Again.",
    ]
    episode = await guess.run(task, Scripted(wrong, wrong, wrong))
    assert (episode.reward, episode.stop) == (0.0, "turn_limit")


@one_loop
async def test_tokens_trained_are_the_tokens_sampled(guess):
    right, wrong = right_and_wrong(guess)
    made, engine = await rollout(guess, wrong, "", right)
    assert (made.outcome, made.reward, made.error) == ("done", 2.0, "")
    (sequence,) = made.sequences
    trained = [token for token, is_trained in zip(sequence.token_ids, sequence.mask, strict=True) if is_trained]
    assert trained == engine.sampled


@pytest.mark.quick("0.3")
@one_loop
async def test_many_episodes_at_once(guess):
    right, wrong = right_and_wrong(guess)
    task = guess.tasks("train", 1)[0]
    await guess.run(task, Scripted(right))
    began = time.monotonic()
    episodes = await asyncio.gather(*(guess.run(task, Scripted(wrong, right)) for _ in range(50)))
    print(f"{50 / (time.monotonic() - began):.0f} episodes/s of two turns")
    assert {episode.reward for episode in episodes} == {2.0}


@of_legacy
@one_loop
async def test_no_key_of_the_run_is_visible_and_output_is_kept(guess):
    await rollout(guess, right_and_wrong(guess)[0])
    assert os.environ[KEY]
    pid = psutil.Process(guess.keeper.host._process.pid).children()[0].pid
    with open(f"/proc/{pid}/environ", "rb") as file:
        assert KEY.encode() not in file.read()
    deadline = time.monotonic() + 60
    while not (guess.log_folder / "environment.log").read_text():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)


@one_loop
async def test_a_reward_that_raises_is_not_zero(guess):
    made, _ = await rollout(guess, "boom", "boom", "boom")
    assert made.outcome == "reward_error"
    assert "a reward that raises" in made.error


@one_loop
async def test_a_full_context_ends_the_episode_which_is_graded(guess):
    _, wrong = right_and_wrong(guess)
    episode = await guess.run(guess.tasks("train", 1)[0], Scripted(wrong, ContextFull("full")))
    assert (episode.reward, episode.stop, episode.outcome) == (0.0, "context_full", "truncated")


@one_loop
async def test_what_the_policy_raises_is_raised(guess):
    with pytest.raises(LookupError, match="the engine"):
        await guess.run(guess.tasks("train", 1)[0], Scripted(LookupError("the engine")))


@pytest.mark.full
@of_legacy
@one_loop
async def test_an_environment_that_raises_dies_or_hangs_costs_its_episode(guess, monkeypatch):
    monkeypatch.setattr("slipstream.processes.guarded._OUTPUT_WAIT_S", 60.0)
    monkeypatch.setattr(keeper, "_CANCEL_S", 60.0)
    made, _ = await rollout(guess, "raise")
    assert made.outcome == "environment_error"
    assert "an environment that raises" in made.error
    made, _ = await rollout(guess, "sleep", run_timeout_s=0.5)  # the process goes on
    first = guess.keeper.host
    assert (made.outcome, first.alive) == ("environment_error", True)
    made, _ = await rollout(guess, "die")
    assert made.outcome == "environment_error"
    assert "ended with exit code 7" in made.error
    with monkeypatch.context() as patch:
        patch.setattr(keeper, "_CANCEL_S", 0.5)  # which passes in full
        made, _ = await rollout(guess, "hang", run_timeout_s=0.5)
    assert made.outcome == "environment_error"
    assert guess.keeper.host is None
    made, _ = await rollout(guess, right_and_wrong(guess)[0])
    assert (made.outcome, made.reward) == ("done", 2.0)
    process = psutil.Process(guess.keeper.host._process.pid)
    family = [process, *process.children(recursive=True)]
    await guess.close()
    assert not [each for each in family if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.full
@of_legacy
@one_loop
async def test_processes_that_only_die_end_the_run(guess, monkeypatch):
    monkeypatch.setattr(keeper, "MAX_DEATHS", 1)
    assert (await rollout(guess, "die"))[0].outcome == "environment_error"
    with pytest.raises(EnvironmentFault, match="2 environment processes of verifiers/guess_legacy ended"):
        await rollout(guess, "die")


@pytest.mark.full
@one_loop
async def test_tools_are_the_environments():
    shop = load("shop_legacy", "0.3")
    task = shop.tasks("train", 1)[0]
    call = Reply("<call>", "stop", (ToolCall("price", {"item": "tea"}),), "")
    broken = Reply("<call", "stop", (ToolCall("price", {}, "", "no JSON"),), "")
    policy = Scripted(call, broken, task.answer)
    episode = await shop.run(task, policy)
    assert (episode.reward, episode.stop) == (1.0, "answer")
    assert episode.metrics["total_tool_calls"] == 2
    first, said, result = policy.seen[1]
    assert [tool["function"]["name"] for tool in first.tools] == ["price"]
    assert list(first.tools[0]["function"]["parameters"]["properties"]) == ["item"]
    assert (said.content, result.role, result.content, result.tool_call_id) == (
        "<call>",
        "tool",
        "9 in corner",
        "call_1",
    )
    assert "Expecting value" in policy.seen[2][-1].content
    await shop.close()


@pytest.mark.full
@one_loop
async def test_a_tools_argument_that_nobody_supplies_ends_the_episode():
    shop = load("shop_legacy", "0.3", {"supplies": False})
    call = Reply("<call>", "stop", (ToolCall("price", {"item": "tea"}),), "")
    with pytest.raises(keeper.EnvironmentRaised, match="needs shop, which is hidden from the model"):
        await shop.run(shop.tasks("train", 1)[0], Scripted(call))
    await shop.close()


@pytest.mark.full
@pytest.mark.parametrize(
    ("file", "version", "settings", "config", "message"),
    [
        ("guess_legacy", "0.3", {}, {}, "needs size, which nobody supplies: set environment.settings.size"),
        ("guess_legacy", "0.3", {"size": 3, "sise": 4}, {}, "has no argument 'sise', but size, offset"),
        ("guess_legacy", "0.3", {"size": 3, "max_turns": -1}, {}, "environment.max_turns is not set"),
        ("guess_v1", "0.4", {"player": {"retries": {"max_retries": 1}}}, {}, "player.retries would train on"),
        ("guess_v1", "0.4", {"player": {"harness": {"id": "bash"}}}, {}, "verifiers. default, Prime"),
    ],
)
def test_what_cannot_be_used_is_refused_at_the_start(file, version, settings, config, message, monkeypatch):
    monkeypatch.delenv("PRIME_API_KEY", raising=False)
    environment = load(file, version, settings, **config)
    with pytest.raises(ConfigError, match=message):
        print(environment.max_turns, environment.tasks("train", 1))


def test_an_interpreter_that_is_none_and_settings_of_others_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="is not a program"):
        load_environment(EnvironmentConfig(name="verifiers/x", python=str(tmp_path / "python")))
    with pytest.raises(ConfigError, match=r"environment\.python has an effect on verifiers/<name> only"):
        load_environment(EnvironmentConfig(name="rows", python="python"))


@pytest.mark.full
def test_held_out_tasks_of_a_data_set_of_their_own():
    guess = load("guess_legacy", "0.3", {"size": 5, "held_out": 7})
    assert [len(guess.tasks("train", 9)), len(guess.tasks("eval", 9)), guess.num_train_tasks] == [5, 7, 5]
    assert guess.eval_source == ""
    guess = load("guess_v1", "0.4", {"taskset": {"size": 5}, "eval_taskset": {"size": 7, "offset": 100}})
    assert [len(guess.tasks("train", 9)), len(guess.tasks("eval", 9))] == [5, 7]


@pytest.mark.full
def test_a_turn_limit_of_the_run():
    assert load("guess_legacy", "0.3", {"size": 5, "max_turns": -1}, max_turns=4).max_turns == 4
    assert load("guess_v1", "0.4", {"taskset": {"size": 5}}, max_turns=4).max_turns == 4


def test_a_score_alone_is_refused():
    guess = load_environment(EnvironmentConfig(name="verifiers/x"))
    with pytest.raises(Exception, match="grades whole episodes"), contextlib.suppress(OSError):
        assert isinstance(guess.score(None, ""), Score)
    assert os.path.isabs(guess._python)
