"""docs/environments.md: every environment on it is loaded, checked and played, every run file and command is used."""

import re
import shlex
from pathlib import Path

import pytest

from slipstream.cli import main
from slipstream.config import load_config
from slipstream.config.schema import EnvironmentConfig
from slipstream.envs import Reply
from slipstream.envs.check import check_environment
from slipstream.envs.registry import load_environment
from slipstream.envs.scoring.pool import ScorerPool
from slipstream.envs.scoring.worker_calls import judge
from slipstream.envs.single_turn import gold_of, make_tasks
from tests.inline_scorer import InlineScorer

PAGE = Path(__file__).parents[1] / "docs/environments.md"
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
FILES = {found[1]: text for _, text in BLOCKS if (found := re.match(r"# (\S+\.(?:py|toml))\n", text))}
ENVIRONMENTS = sorted(name for name in FILES if name.endswith(".py"))


class Speaker:
    """Says these texts, turn by turn, and keeps what it was told."""

    def __init__(self, *texts, finish_reason="stop"):
        self.texts, self.heard, self.finish_reason = list(texts), [], finish_reason

    async def chat(self, messages):
        self.heard.append([message.content for message in messages])
        return Reply(self.texts.pop(0), self.finish_reason)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("page")
    for name, text in FILES.items():
        # A program may take as long as a busy machine takes.
        (folder / name).write_text(text.replace("timeout=5,", "timeout=60,"), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def load(folder):
    return lambda name, **settings: load_environment(EnvironmentConfig(name=str(folder / name), settings=settings))


def test_every_block_is_a_file_or_a_command():
    assert len(FILES) == len([language for language, _ in BLOCKS if language in ("python", "toml")])
    assert {language for language, _ in BLOCKS} == {"python", "toml", "sh"}


@pytest.mark.parametrize("name", ENVIRONMENTS)
async def test_an_environment_keeps_the_contract(load, name):
    environment = load(name)
    train, held_out = make_tasks(environment, "train", 300), make_tasks(environment, "eval", 30)
    assert (len(train), len(held_out)) == (300, 30)
    assert not {task.prompt for task in train} & {task.prompt for task in held_out}
    assert make_tasks(load(name), "train", 20) == train[:20]
    check = await check_environment(environment, InlineScorer(environment), 4 if name == "programs.py" else 60)
    assert check.failures == []
    gold = gold_of(environment, train[0])
    policy = Speaker(gold)
    episode = await environment.run(train[0], policy)
    assert judge(environment, train[0], episode).reward == 1.0
    assert (episode.outcome, episode.num_turns, len(policy.heard)) == ("done", 1, 1)
    assert (await environment.run(train[0], Speaker("zz", finish_reason="length"))).outcome == "truncated"


async def test_several_turns(load):
    environment = load("second_chance.py")
    (task,) = make_tasks(environment, "train", 1)
    policy = Speaker("zz", task.answer)
    episode = await environment.run(task, policy)
    assert policy.heard[1][-2:] == ["zz", "No. Again."]
    assert (episode.completion, episode.num_turns, episode.metrics) == (task.answer, 2, {"turns": 2})
    assert (await environment.run(task, Speaker("y", "z"))).num_turns == environment.max_turns


async def test_a_program_that_does_not_end_is_judged_within_the_rewards_deadline(folder):
    section = EnvironmentConfig(name=str(folder / "programs.py"))
    environment = load_environment(section)
    (task,) = make_tasks(environment, "train", 1)
    (folder / "quick.py").write_text(FILES["programs.py"].replace("timeout=5", "timeout=0.5"))
    quick = EnvironmentConfig(name=str(folder / "quick.py"), reward_timeout_s=60.0)
    assert "timeout=5," in FILES["programs.py"]
    assert section.reward_timeout_s > 5
    async with ScorerPool(quick) as scorer:
        score = await scorer.score(task, "while True: pass")
    assert (score.reward, score.metrics) == (0.0, {"too_slow": 1.0})


def test_run_files_and_commands(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    for name in FILES:
        if name.endswith(".toml"):
            load_config(Path(name))
    lines = [line for language, text in BLOCKS if language == "sh" for line in text.splitlines()]
    assert lines
    for line in lines:
        with pytest.raises(SystemExit) as ended:
            main(shlex.split(line)[1:])
        assert ended.value.code == 0, capsys.readouterr()


def test_every_named_setting_and_metric_exists():
    text, root = PAGE.read_text(encoding="utf-8"), PAGE.parent
    known = (root / "settings.md").read_text(encoding="utf-8")
    for section, name in re.findall(r"`(environment|inference|run|training|evaluation|sampling)\.(\w+)`", text):
        assert name in ("name",) or f"| `{name}` |" in known, f"{section}.{name}"
    metrics = (root / "metrics.md").read_text(encoding="utf-8")
    for name in re.findall(r"`(reward/\w+)`", text):
        assert f"`{name}`" in metrics
