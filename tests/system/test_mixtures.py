"""Runs on a mixture of tasks, with a scripted engine."""

import collections
import contextlib
import re
import time
import tomllib
from pathlib import Path

import pytest

from slipstream.config import load_config
from slipstream.config.environment import EnvironmentConfig
from slipstream.data.curriculum import MixtureCurriculum
from slipstream.envs.mixed import section_of
from slipstream.envs.registry import load_environment
from slipstream.envs.single_turn import make_tasks
from slipstream.errors import ConfigError
from slipstream.launch.prepare import prepare
from slipstream.runlog import read_metrics, read_samples
from slipstream.runlog.ledger import balance
from tests.refusals import refuses

ROOT = Path(__file__).parents[2]
PARTS = {
    "vowels": """
def tasks(split, num_tasks, seed):
    return [{"prompt": f"vowel {split} {i}", "answer": "a"} for i in range(min(num_tasks, 6))]

def reward(task, completion):
    assert task.id.count("/") == 1 and not task.part, "a part sees its own tasks"
    return float(completion == task.answer)
""",
    "never": """
def tasks(split, num_tasks, seed):
    return [{"prompt": f"never {split} {i}", "data_source": f"set{i % 2}"} for i in range(min(num_tasks, 10))]

def reward(task, completion):
    return 0.0
""",
}


@pytest.fixture
def mixture(tmp_path):
    """Overrides that turn the run into one on two parts."""
    options = ["--environment.name", "mixture"]
    for name, text in PARTS.items():
        (tmp_path / f"{name}.py").write_text(text)
        options += [f"--environment.mixture.{name}.name", str(tmp_path / f"{name}.py")]
    return (*options, "--environment.mixture.vowels.weight", "3.0")


def names(folder):
    """The tasks of the groups that were trained on, by step."""
    found = collections.defaultdict(dict)
    for sample in read_samples(folder):
        if sample.get("split") != "eval":
            found[sample["step"]][sample["id"].rpartition(".")[0]] = sample["task"]
    return {step: list(groups.values()) for step, groups in found.items()}


def test_each_part_has_its_tasks_rewards_and_figures(scripted, mixture):
    report = scripted.run(*mixture, "--training.steps", "8", "--run.save_samples", "16")
    assert (report.status, report.step) == ("finished", 8), scripted.error
    rows = scripted.metrics
    total = collections.Counter()
    for row in rows[1:]:
        for name in ("vowels", "never/set0", "never/set1"):
            total[name] += row.get(f"task/{name}/drawn_groups", 0)
            if f"task/{name}/reward_mean" in row:
                assert row[f"task/{name}/dropped"] == 0
                assert (row[f"task/{name}/reward_mean"] == 0) == name.startswith("never") or name == "vowels"
    assert sum(total.values()) == 8 * 4
    assert total["vowels"] > total["never/set0"] + total["never/set1"] > 0
    shares = [
        sum(v for k, v in row.items() if k.startswith("task/") and k.endswith("/tokens_fraction")) for row in rows[1:]
    ]
    assert shares == pytest.approx([1.0] * 8)
    assert (rows[-1]["eval/source/vowels/num_tasks"], rows[-1]["eval/source/never/set0/num_tasks"]) == (4, 2)
    trained = [task for tasks in names(scripted.folder).values() for task in tasks]
    vowels = [task for task in trained if task.startswith("vowels/")]
    assert all(
        len(set(vowels[start : start + 6])) == len(vowels[start : start + 6]) for start in range(0, len(vowels), 6)
    )


@pytest.mark.full
@pytest.mark.parametrize("staleness", ["0", "2"])
@pytest.mark.parametrize("curriculum", ["none", "adaptive"])
def test_a_run_that_goes_on_draws_the_tasks_of_one_that_was_not_interrupted(
    scripted, mixture, tmp_path, staleness, curriculum
):
    options = (*mixture, "--environment.curriculum", curriculum, "--training.staleness", staleness)
    options += ("--evaluation", "false", "--run.save_samples", "16", "--run.max_steps_without_signal", "9")
    if staleness != "0":
        options += ("--training.order", "data")
    whole = scripted.run(*options, "--training.steps", "8")
    assert whole.status == "finished", scripted.error
    in_one = names(scripted.folder)
    probabilities = [row.get("task/vowels/probability") for row in scripted.metrics[1:]]
    scripted.folder = tmp_path / "in-two"
    again = (*options, "--run.folder", str(scripted.folder))
    assert scripted.run(*again, "--training.steps", "3").status == "finished"
    assert scripted.run(*again, "--training.steps", "8", resume=True).status == "finished", scripted.error
    assert names(scripted.folder) == in_one
    if curriculum == "adaptive":
        assert probabilities[0] == 0.75
        assert probabilities[-1] > 0.9, "what never has signal is drawn less"
        assert [row.get("task/vowels/probability") for row in scripted.metrics[1:]] == probabilities


@pytest.mark.parametrize("curriculum", [pytest.param("none", marks=pytest.mark.full), "adaptive"])
def test_under_ready_no_task_is_drawn_twice_or_never_in_an_epoch(scripted, mixture, curriculum):
    options = (*mixture, "--environment.curriculum", curriculum, "--training.staleness", "2", "--evaluation", "false")
    options += ("--run.save_samples", "16", "--run.max_steps_without_signal", "9", "--run.checkpoint_every", "1")

    async def dies(engine, request):
        if request.group_id == "4.1":
            await scripted.until_a_group_waits()
            engine.kill()

    assert scripted.run(*options, "--training.steps", "9", before=dies).status == "failed"
    before, asked = balance(scripted.folder), set()

    def counts(engine, request):
        asked.add(request.group_id)

    again = (*options, "--run.folder", str(scripted.folder), "--training.steps", "9")
    assert scripted.run(*again, resume=True, on_request=counts).status == "finished", scripted.error
    # Under a curriculum a group's name may mean another task in another attempt: none is used again.
    generated = {group for group in asked if group and "probe" not in group}
    left = 36 - before.num("trained")
    assert before.num("ready", "batched") > 0
    assert len(generated) >= left if curriculum == "adaptive" else len(generated) < left
    found = balance(scripted.folder)
    assert (found.num("trained"), found.num_open) == (36, 0)
    trained = [task for tasks in names(scripted.folder).values() for task in tasks]
    assert len(trained) == 36
    for part, size in (("vowels", 6), ("never", 10)):
        counts = collections.Counter(task for task in trained if task.startswith(f"{part}/"))
        # At most the groups that are begun and not trained on when the run ends are missing in an epoch.
        assert max(counts.values()) - min([*counts.values(), 0 if len(counts) < size else 99]) <= 2


def test_sft_imitates_each_parts_gold_answers_by_weight(scripted, mixture, tmp_path, model):
    (tmp_path / "never.py").write_text(PARTS["never"].replace('"data_source"', '"answer": "b", "data_source"'))
    config = load_config(tmp_path / "sft.toml", mixture)
    prepared = prepare(config)
    assert len(prepared.part_of_item) == len(prepared.conversations) == 16
    assert sorted(prepared.part_of_item) == [0] * 6 + [1] * 10
    (tmp_path / "never.py").write_text(PARTS["never"])
    with refuses("environment.mixture.never"):
        prepare(config)


def test_limits_of_a_part(scripted, mixture):
    options = ("--environment.mixture.never.group_size", "2", "--environment.mixture.vowels.max_tokens", "1")
    asked = []

    def counts(engine, request):
        asked.append((request.group_id, request.sampling.max_tokens))

    options += ("--run.save_samples", "99", "--evaluation", "false")
    report = scripted.run(*mixture, *options, on_request=counts)
    assert report.status == "finished", scripted.error
    samples = [(s["id"].rpartition(".")[0], s["task"].partition("/")[0]) for s in read_samples(scripted.folder)]
    sizes, parts = collections.Counter(group for group, _ in samples), dict(samples)
    assert {(parts[group], size) for group, size in sizes.items()} == {("vowels", 4), ("never", 2)}
    # Of ids of rollouts, which have a serial number; the probe's have none.
    limits = {parts[group]: {tokens for name, tokens in asked if name == group} for group in sizes}
    assert limits == {"vowels": {1}, "never": {max(tokens for _, tokens in asked)}}
    assert limits["never"] != {1}


def test_what_is_wrong_in_a_part_is_named_with_it(scripted, mixture, tmp_path):
    run_file = tmp_path / "run.toml"
    (tmp_path / "never.py").write_text("def tasks(split, num_tasks, seed):\n    return 1 / 0\n")
    with refuses("environment.mixture.never.name"):
        prepare(load_config(run_file, mixture))


@pytest.mark.full
@pytest.mark.engine
def test_with_real_vllm_and_orchestrators_of_their_own_the_curriculum_reaches_them(
    command, run_file, mixture, tmp_path
):
    coin = "float(__import__('zlib').crc32(completion.encode()) % 2)"
    (tmp_path / "vowels.py").write_text(PARTS["vowels"].replace("float(completion == task.answer)", coin))
    folder = tmp_path / "run"
    options = ("--environment.curriculum", "adaptive", "--run.streams", "files", "--run.orchestrators", "2")
    options += ("--training.steps", "12", "--evaluation", "false", "--run.max_steps_without_signal", "12")
    options += ("--run.save_samples", "16", "--training.staleness", "1", "--training.order", "data")
    command("train", run_file, *mixture, *options, "--run.folder", folder).ok()
    probabilities = [row["task/vowels/probability"] for row in read_metrics(folder) if row["step"]]
    assert probabilities[0] == 0.75
    assert probabilities[-1] > 0.9
    assert balance(folder).num("trained") == 12 * 4
    drawn = [len(tasks) for tasks in names(folder).values()]
    assert drawn == [4] * 12


def test_two_parts_may_ask_the_same_in_sft(scripted, mixture, tmp_path):
    for name in PARTS:
        (tmp_path / f"{name}.py").write_text(PARTS["vowels"].replace('f"vowel {split} {i}"', 'f"same {split} {i}"'))
    systems = ("--environment.mixture.vowels.system_prompt", "A.", "--environment.mixture.never.system_prompt", "B.")
    prepared = prepare(load_config(tmp_path / "sft.toml", (*mixture, *systems)))
    found = [(part, talk[0].content) for part, talk in zip(prepared.part_of_item, prepared.conversations, strict=True)]
    assert sorted(found) == [(0, "A.")] * 6 + [(1, "B.")] * 6


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--environment.mixture.never.system_prompt", '""'), 'never.system_prompt = "" is empty'),
        (("--environment.mixture.never.max_tokens", "9999", "--sampling.max_tokens", "8"), "9999 is more than"),
        (("--environment.mixture.never.max_tokens", "4", "--algorithm.kind", "dapo"), "overlong_buffer"),
        (("--environment.mixture.never.group_size", "9"), "group_size = 9 must be 2 to 4"),
        (("--environment.mixture.never.name", "mixture"), "is no task"),
        (("--environment.settings.a", "1"), "whose parts have it each"),
    ],
)
def test_settings_that_do_not_go_together(scripted, mixture, tmp_path, options, said):
    with pytest.raises(ConfigError, match=said):
        load_config(tmp_path / "run.toml", (*mixture, *options))


def test_what_the_plan_derives_may_be_less_than_a_part_asks_for(scripted, mixture, tmp_path):
    config = load_config(tmp_path / "run.toml", (*mixture, "--environment.mixture.never.max_tokens", "9999"))
    with pytest.raises(ConfigError, match=r"never\.max_tokens = 9999 is more than sampling\.max_tokens = \d+"):
        prepare(config)


def test_names_of_parts_are_no_secrets(scripted, mixture, tmp_path):
    renamed = [option.replace("mixture.never", "mixture.token_key") for option in mixture]
    assert scripted.run(*renamed, "--training.steps", "1").status == "finished", scripted.error
    assert "redacted" not in (scripted.folder / "resolved.toml").read_text()


def test_a_change_of_what_was_drawn_already_ends_the_run_at_once(scripted, mixture, monkeypatch):
    monkeypatch.setattr(MixtureCurriculum, "_first_unseen", lambda self, step, draws: step - 1)
    options = ("--environment.curriculum", "adaptive", "--evaluation", "false", "--run.max_steps_without_signal", "9")
    began = time.monotonic()
    assert scripted.run(*mixture, *options, "--training.steps", "9").status == "failed"
    assert "the curriculum changed tasks that were drawn already" in str(scripted.error)
    assert time.monotonic() - began < 60


def test_the_plan_tells_what_is_drawn_of_each_part(scripted, mixture, tmp_path):
    notes = {note.name: note for note in prepare(load_config(tmp_path / "run.toml", mixture)).plan.notes}
    assert (notes["tasks of vowels"].value, notes["tasks of never"].value) == (6, 10)
    assert notes["tasks of vowels"].how == "75 % of what is drawn, 1.5 passes over them"


def test_the_page_shows_what_can_be_loaded():
    (block,) = re.findall(r"```toml\n(.*?)```", (ROOT / "docs/mixtures.md").read_text(), re.DOTALL)
    config = EnvironmentConfig.model_validate(tomllib.loads(block)["environment"])
    assert list(config.mixture) == ["reverse", "sums", "exams"]
    for name in ("reverse", "sums"):
        section = section_of(config, config.mixture[name])
        assert make_tasks(load_environment(section), "train", 3)


RUN_FILE = """
[environment]
name = "mixture"
[environment.mixture.vowels]
name = "vowels.py"
[environment.mixture.sheet]
name = "rows"
settings = {path = "rows.jsonl", eval_path = "rows.jsonl", reward = "vowels.py:compute_score"}
"""


def test_paths_of_parts_are_found_beside_the_run_file(scripted, mixture, tmp_path):
    text = (tmp_path / "run.toml").read_text()
    before, after = text[: text.index("[environment]")], text[text.index("[algorithm]") :]
    (tmp_path / "parts.toml").write_text(before + RUN_FILE + after)
    config = load_config(tmp_path / "parts.toml").config
    parts = config.environment.mixture
    assert parts["vowels"].name == str(tmp_path / "vowels.py")
    folder = {"path": f"{tmp_path}/rows.jsonl", "eval_path": f"{tmp_path}/rows.jsonl"}
    assert parts["sheet"].settings == {**folder, "reward": f"{tmp_path}/vowels.py:compute_score"}


def test_a_run_does_not_go_on_with_other_weights_or_another_reward(scripted, mixture, tmp_path):
    options = (*mixture, "--evaluation", "false", "--run.folder", str(scripted.folder), "--training.steps", "4")
    assert scripted.run(*options, "--training.steps", "2").status == "finished", scripted.error
    with pytest.raises(ConfigError, match=r"weights of environment\.mixture"):
        raise_of(scripted, *options, "--environment.mixture.never.weight", "2.0")
    (tmp_path / "never.py").write_text(PARTS["never"].replace("0.0", "0.5"))
    with pytest.raises(ConfigError, match=r"environment\.name never\.py|never\.py"):
        raise_of(scripted, *options)


def raise_of(scripted, *options):
    """Resume, and raise what ended it."""
    with contextlib.suppress(AssertionError):  # a refused one leaves no report
        scripted.run(*options, resume=True)
    raise scripted.error
