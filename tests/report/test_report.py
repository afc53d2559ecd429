"""What a report says, read from its HTML, and what it makes of runs in every state."""

import json
import math
import re
from html.parser import HTMLParser

import pytest
import torch

from slipstream.algo.importance_sampling import log_ratio_histogram, ratio_shares
from slipstream.cli.commands import _gain_line
from slipstream.errors import ConfigError
from slipstream.python.run_handle import load_run
from slipstream.report import write_report
from slipstream.report.markup import data, h
from slipstream.report.plot import linear_scale, log_scale, step_scale, y_labels
from slipstream.report.series import GROUPS, MAX_POINTS, Line, series_of
from slipstream.report.timeline import MAX_BARS, StepTime, _lanes, step_times
from slipstream.runlog import read_run
from slipstream.runlog.ledger import Ledger
from tests.report.conftest import HOSTILE


class Words(HTMLParser):
    """The elements of a page and what people read of it."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.words, self._open, self.attributes = [], "", [], []
        self.feed(text)
        assert self._open == [], f"left open: {self._open}"

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in ("meta", "br", "link"):
            self._open.append(tag)

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data):
        if self._open and self._open[-1] not in ("script", "style"):
            self.words += data


def report(tmp_path, *folders):
    text = write_report(folders, tmp_path / "out.html").read_text(encoding="utf-8")
    return text, Words(text)


def rewrite(folder, name, change):
    """Passes every line of a run's file through `change`."""
    rows = [json.loads(line) for line in (folder / name).read_text().splitlines()]
    (folder / name).write_text("".join(json.dumps(change(row)) + "\n" for row in rows))
    return folder


def with_samples(folder, lines):
    """The run in `folder` with these for its samples."""
    shared = {"time": 1.0, "lineage": 0, "prompt": "ask", "task": "t", "outcome": "done"}
    (folder / "samples.jsonl").write_text("".join(json.dumps(shared | line) + "\n" for line in lines))
    return folder


def test_who_waited_and_where_tokens_went(write, tmp_path):
    def change(row):
        step = row["step"]
        own = {"idle/engine_s": 1.0 + step, "idle/trainer_s": 2.0 * step, "staleness/age_0": 1 / (step or 1)}
        own |= {"tokens/generated": 10.0 * step, "tokens/trained": 9.0 * step, "rollout/requests_open": 1.0 * step}
        late = {"idle/engine_update_s": 1.0, "dropped_tokens/undone_by_a_resume": 4.0, "staleness/age_2": 0.5}
        late |= {"dropped_groups/undone_by_a_resume": 1.0}
        return row | (own if step else {}) | (late if step == 3 else {})

    folder = rewrite(write("one"), "metrics.jsonl", change)
    ledger = Ledger(folder, 0, 0, staleness=1, shape={})
    ledger.begin("0.0")
    ledger.close(1)
    text, page = report(tmp_path, folder)
    for title in ("Engine idle", "Trainer idle", "Tokens by age", "Queues", "Tokens", "Tokens dropped"):
        assert f"<h3>{title}</h3>" in text, title
    assert "undone by a resume" in page.words
    assert "restart" not in text[text.index("<h3>Engine idle</h3>") : text.index("<h3>Trainer idle</h3>")]
    assert "1 groups were begun in all attempts, 0 of them have not ended." in page.words
    assert "cancelled: run ended" in page.words


def test_a_finished_run_is_told_whole(write, tmp_path):
    text, page = report(tmp_path, write("one"))
    for words in ("one", "finished", "reasoning_gym/spell_backward", "+60.0", "of 6", "0.6"):
        assert words in page.words, words
    for title in ("Reward", "Held-out accuracy", "Probe difference", "Entropy", "Throughput", "Outcomes dropped",
                  "Learning rate", "Every step", "An ordinary step"):  # fmt: skip
        assert f"<h3>{title}</h3>" in text, title
    assert re.findall(r"<h2>(.*?)</h2>", text)[:5] == ["Learning", "Rollouts", "Policy", "Numerics", "Speed"]
    assert "2 warnings, listed below (End of the run)." in page.words
    assert "derived: few parameters" in page.words
    assert "something to know <b>" in page.words
    assert "0000000000000006" in page.words
    assert "hunter2" not in text


def test_it_needs_nothing_from_outside(write, tmp_path):
    text, page = report(tmp_path, write("one"))
    assert not {"link", "img", "iframe", "object", "base"} & set(page.tags) - {"link"}
    links = {value for name, value in page.attributes if name in ("src", "href")}
    inside = {value for value in links if value.startswith("#")}
    assert links - inside == {"data:,"}
    assert {f'id="{value[1:]}"' in text for value in inside} == {True}
    assert re.findall(r"https?://|@import|url\(", text) == []


def test_hostile_text_stays_text(write, tmp_path):
    text, page = report(tmp_path, write("one"))
    assert "<img" not in text
    assert "<script>window.hacked" not in text
    assert page.tags.count("script") == text.count("</script>")
    assert page.words.count("</script><script>window.hacked = 1</script>") >= 4
    assert "\x00" not in text
    assert "\x1b" not in text


def test_a_hostile_name_stays_text(write, tmp_path):
    folder = write("</title><script>alert(1)<")
    assert folder.name == "title><script>alert(1)<"
    text, _ = report(tmp_path, folder)
    assert "<script>alert" not in text


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"steps": 2, "ends": False}, "the run was killed"),
        ({"steps": 2, "ends": False, "open": True}, "The run is still going on"),
        ({"steps": 0, "ends": False, "open": True}, "Throughput"),
        ({"steps": 1, "total": 1}, "1of 1"),
    ],
)
def test_unfinished_runs(write, tmp_path, options, expected):
    _, page = report(tmp_path, write("one", **options))
    if expected == "Throughput":
        assert expected not in page.words
        assert "running" in page.words
    else:
        assert expected in page.words.replace("\u00a0", " ").replace(" of", "of")


def test_a_failed_run_says_why_at_once(write, tmp_path, failed):
    _, page = report(tmp_path, write("one", steps=2, error=failed))
    assert page.words.index("the engine died") < page.words.index("Does the policy get better")
    assert "with exit code 5" in page.words


def test_damage_is_told_and_the_rest_is_shown(write, tmp_path):
    folder = write("one")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7, "time": "late"}\nnonsense\n{"torn')
    (folder / "exit.json").write_text("{")
    (folder / "resolved.toml").write_text("[training]\nsteps = 'many'\n")
    record = read_run(folder)
    assert record.summary.status == "damaged"
    assert len(record.rows) == 7
    assert len(record.damage) == 4
    _, page = report(tmp_path, folder)
    for words in ("metrics.jsonl, line 9 is damaged", "1 lines cannot be used", "exit.json is damaged", "wrong kind"):
        assert words in page.words, words


def test_settings_keep_their_origins(write):
    found = {item.name: item for item in read_run(write("one")).settings}
    assert (found["model.path"].value, found["model.path"].origin) == ('"models/tiny"', "run.toml:2")
    assert found["environment.api_key"].value == '"<redacted>"'
    assert not found["algorithm.arguments.kl_estimator"].applies
    assert (found["training.max_seconds"].value, found["training.max_seconds"].applies) == ("", False)


def test_several_runs_are_compared(write, tmp_path):
    text, page = report(tmp_path, write("a/one"), write("b/one", learns=False, task="chain_sum"), write("two", total=9))
    assert "a/one" in page.words
    assert "b/one" in page.words
    differing = page.words[page.words.index("Settings that differ") :]
    assert "reasoning_gym/chain_sum" in differing
    assert text.count('class="line mark"') > 3 * 6
    assert "not sure" not in page.words


@pytest.mark.parametrize("out", ["", "missing/out.html"])
def test_a_place_that_cannot_be_written(write, tmp_path, out):
    folder = write("one")
    with pytest.raises(ConfigError, match="--out"):
        write_report([folder], tmp_path / out)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one"]


def test_a_folder_without_a_run(tmp_path):
    with pytest.raises(ConfigError, match="holds no run"):
        write_report([tmp_path], tmp_path / "out.html")


def test_scales_hold_their_values():
    for low, high in ((0, 1), (-3e-9, 4e-9), (5, 5), (0, 0), (-7, -7), (999, 1001), (1e-300, 1e300)):
        scale = linear_scale([low, high])
        assert scale.low <= low <= high <= scale.high
        assert 2 <= len(scale.ticks) <= 8, scale.ticks
    assert log_scale([1e-7, 3e-7]).ticks == (1e-7, 1e-6)
    assert len(log_scale([1e-12, 1e3]).ticks) <= 6
    assert step_scale([0, 330]).ticks == (0, 100, 200, 300)
    assert step_scale([0.0]).low < 0 < step_scale([0.0]).high


@pytest.mark.parametrize("high", [0.002, 0.011, 0.03, 1.0])
def test_labels_of_shares_differ(high):
    scale = linear_scale([0.0, high])
    labels = re.findall(r">([^<]* %)<", y_labels(scale, "%"))
    assert len(set(labels)) == len(labels) == len(scale.ticks)


def test_markup_is_escaped_and_data_cannot_leave_its_script():
    assert h("p", "<&\"'", title='"') == '<p title="&quot;">&lt;&amp;&quot;&#x27;</p>'
    assert "<" not in data({"a": HOSTILE})
    assert json.loads(data({"a": HOSTILE})) == {"a": HOSTILE}


def test_long_runs_are_thinned_without_hiding_extremes(write):
    rows = [{"step": step, "m/x": 100.0 if step == 777 else step / 1e4} for step in range(3000)]
    series = series_of(rows, Line("m/x", "x"), "x", 0)
    assert len(series.x) == MAX_POINTS
    assert max(series.high) == 100.0
    assert series.x[-1] == 2999
    assert series.num_steps == 3000


def test_a_step_is_made_of_its_phases(write):
    steps = step_times(read_run(write("one")))
    assert len(steps) == 7 <= MAX_BARS
    assert all(sum(step.phases.values()) == pytest.approx(step.wall) for step in steps)
    assert "generate" not in steps[1].phases
    assert steps[1].generate == 1.0


def test_the_engine_generates_while_the_trainer_compares_the_probe():
    phases = {"batch": 3.0, "train": 4.0, "update": 2.0, "probe": 1.0}
    lanes = str(_lanes([StepTime(1, 10.0, phases, 3.5)], "wait for rollouts"))
    assert 'aria-label="generate 2.5 s, idle 4.5 s, update 2.0 s, generate 1.0 s"' in lanes.replace("\xa0", " ")


def test_the_engine_generates_from_the_end_of_the_update_where_requests_waited_in_it():
    phases = {"batch": 3.0, "train": 4.0, "update": 2.0, "probe": 1.0}
    lanes = str(_lanes([StepTime(1, 10.0, phases, 5.0)], "wait for rollouts"))
    assert 'aria-label="generate 3.0 s, idle 4.0 s, update 1.0 s, generate 2.0 s"' in lanes.replace("\xa0", " ")


def test_the_ranges_of_the_ratio_are_those_that_are_measured():
    names = [*ratio_shares(log_ratio_histogram(torch.zeros(1)))]
    groups = {"Histogram of the policy ratio": "train", "Histogram of the importance weights": "mismatch"}
    for title, group in groups.items():
        (panel,) = [panel for group in GROUPS for panel in group.panels if panel.title == title]
        assert [line.metric for line in panel.lines] == [f"{group}/ratio_{name}" for name in names]


def test_parts_of_the_users_reward_stand_right_after_the_reward(write, tmp_path):
    def change(row):
        own = dict.fromkeys(("reward/in_place", "reward/turns", "reward/overlong"), row["step"] / 10)
        return row | own if row["step"] else row

    folder = rewrite(write("one"), "metrics.jsonl", change)
    text, _ = report(tmp_path, folder)
    titles = re.findall(r"<h3>(.*?)</h3>", text)
    place = titles.index("Reward")
    assert titles[place : place + 3] == ["Reward", "Reward: in_place", "Reward: turns"]
    assert titles.count("Shaped rewards") == 1
    assert "Reward: overlong" not in titles
    assert "reward/" not in text[text.index("All other metrics") :]


def test_curves_that_do_not_vary_are_one_line_with_their_numbers(write, tmp_path):
    flat = {"staleness/mean": 0.0, "staleness/max": 1.0, "staleness/age_1": 1.0, "memory/gib": 2.5}
    folder = rewrite(write("one"), "metrics.jsonl", lambda row: row | flat)
    text, page = report(tmp_path, folder)
    for title in ("Gradient norm", "Staleness", "Signal fraction"):
        assert f"<h3>{title}</h3>" not in text
    words = page.words.replace("\u00a0", " ")
    assert "Signal fraction 50.0 %" in words
    assert "Staleness largest 1" in words
    assert "Tokens by age age 1 100.0 %" in words
    assert "memory/gib 2.5" in words
    assert "All other metrics (3)" in words
    folder = rewrite(write("other"), "metrics.jsonl", lambda row: row | {"train/grad_norm": 0.75})
    text, _ = report(tmp_path, tmp_path / "one", folder)
    assert "<h3>Gradient norm</h3>" in text, "it is not the same in both runs"
    assert "<h3>Reward</h3>" in report(tmp_path, write("third", learns=False))[0]


def test_a_reward_with_very_many_parts_does_not_push_the_curves_away(write, tmp_path):
    own = {f"reward/part_{number:03}": 0.5 for number in range(300)}
    change = lambda row: row | dict.fromkeys(own, row["step"]) if row["step"] else row  # noqa: E731
    text, _ = report(tmp_path, rewrite(write("one"), "metrics.jsonl", change))
    assert text.index("<h3>Held-out accuracy</h3>") < text.index("part_100")
    assert "All other metrics (294)" in text


@pytest.mark.parametrize("rewards", [(0, 0, 0, 1), (1, 1, 1, 0), (0.2, 0.9, 1, 1), (-3, 5, 5, 5)])
def test_the_band_ends_where_rewards_do(rewards):
    values = torch.tensor(rewards, dtype=torch.float64)
    mean, std = values.mean().item(), values.std(correction=0).item()
    row = {"step": 1, "reward/mean": mean, "reward/std": std}
    line = GROUPS[0].panels[0].lines[0]
    found = series_of([row | {"reward/min": min(rewards), "reward/max": max(rewards)}], line, "mean", 0)
    assert found.low == [pytest.approx(max(mean - std, min(rewards)))]
    assert found.high == [pytest.approx(min(mean + std, max(rewards)))]
    found = series_of([row], line, "mean", 0)
    assert (found.low[0], found.high[0]) == pytest.approx((mean - std, mean + std)), "a run of before"


def test_rollouts_that_changed_come_first_with_the_right_answer(write, tmp_path):
    def sample(task, before, after):
        for step, (text, reward) in ((0, before), (6, after)):
            yield {"step": step, "id": f"eval.{step}.0", "completion": text, "reward": reward, "split": "eval",
                   "task": task, "prompt": f"ask {task}", "answer": f"gold {task}"}  # fmt: skip

    lines = [
        *sample("same", ("x", 1.0), ("x", 1.0)),
        *sample("words", ("x", 0.0), ("y", 0.0)),
        *sample("better", ("x", 0.0), ("z", 1.0)),
    ]
    folder = with_samples(write("one"), sorted(lines, key=lambda line: line["step"]))
    _, page = report(tmp_path, folder)
    pairs, _, every = page.words.partition("All kept rollouts")
    assert pairs.index("ask better") < pairs.index("ask words")
    assert "1 more of them got the same answer both times" in pairs
    assert "right answer: gold better" in pairs
    assert "eval.6.0" in pairs
    assert every.count("ask same") == 2, "and the excerpts leave out what all prompts begin with"


def test_every_kept_rollout_can_be_read_with_its_parts_and_turns(write, tmp_path):
    turns = [{"role": "assistant", "content": "first guess"}, {"role": "user", "content": "too low"}]
    lines = [
        {"step": step, "id": f"{step}.0.0", "completion": f"text {step}", "reward": reward, "answer": "gold"}
        for step, reward in enumerate((0.0, 0.9, 1.0))
    ]
    lines[1] |= {"metrics": {"in_place": 0.75}, "num_turns": 2, "turns": turns, "outcome": "truncated"}
    text, page = report(tmp_path, with_samples(write("one"), lines))
    assert re.findall(r'data-step="(\d+)" data-kind="(\S+)" data-grade="(\w+)"', text) == [
        ("0", "training", "wrong"), ("1", "training", "wrong"), ("2", "training", "right")
    ]  # fmt: skip
    assert [f"text {step}" in page.words for step in range(3)] == [True] * 3
    words = page.words.replace("0.9000", "0.9").replace("0.7500", "0.75")
    assert "reward 0.9 · in_place 0.75 · truncated · 2 turns · 1.0.0" in words
    assert page.words.index("first guess") < page.words.index("too low")


def test_what_failed_can_be_found_with_its_error(write, tmp_path):
    failing = {"step": 1, "id": "1.0.0", "metrics": {"tool_failures": 1.0}}
    lines = [
        {"step": 0, "id": "0.0.0"},
        failing | {"kept": "failure"},
        failing | {"advantage": 0.25},
        {"step": 2, "id": "2.0.0", "outcome": "environment_error", "stop": "timeout", "error": "KeyError: odd"},
    ]
    lines = [{"completion": "so far", "reward": 0.0} | line for line in lines]
    text, page = report(tmp_path, with_samples(write("one"), lines))
    found = re.findall(r'data-step="(\d+)" data-kind="\S+" data-grade="(\w+)" data-tools="(\w*)"', text)
    assert found == [("0", "wrong", ""), ("1", "wrong", "failed"), ("2", "failed", "")]
    assert 'data-by="tools"' in text
    assert '<option value="failed">failed</option>' in text
    assert "KeyError: odd" in page.words
    assert "environment_error · stop: timeout · 2.0.0" in page.words
    assert "advantage 0.2500" in page.words, "of a rollout that was kept twice the last line counts"
    pairs, _, _ = page.words.partition("All kept rollouts")
    assert "so far" in pairs
    assert "step 2" not in pairs, "what failed is no answer to compare"


def test_a_run_in_which_nothing_was_lost_says_so_in_full_and_has_no_table_of_figures(write, tmp_path):
    text, page = report(tmp_path, write("one"))
    assert "no steps skipped for want of signal, 2 rollouts dropped" in page.words
    assert "Held-out figures" not in text


def with_figures(row):
    """A row of metrics with evaluations of four samples a task, of two data sources."""
    value = row.get("eval/accuracy")
    for group, less in (("eval", 0.0), ("eval/source/gsm8k", 0.1), ("eval/source/<em>", 0.15)) if value else ():
        for name in ("mean@4", "std@4", "best@2", "best@4", "worst@4", "maj@4", "pass@4", "reward/mean@4"):
            row[f"{group}/{name}"] = value - less
            row |= {f"{group}/{name}_low": value - less - 0.02, f"{group}/{name}_high": value - less + 0.02}
        row |= {f"{group}/accuracy": value - less, f"{group}/num_tasks": 50.0, "eval/samples_per_task": 4.0}
    return row


def test_figures_of_several_samples_are_shown(write, tmp_path):
    text, page = report(tmp_path, rewrite(write("one"), "metrics.jsonl", with_figures))
    assert re.findall(r"<h2>(.*?)</h2>", text)[:3] == ["Learning", "Held-out figures", "Rollouts"]
    for title in ("Held-out figures", "Held-out accuracy by source"):
        assert f"<h3>{title}</h3>" in text, title
    assert "pass@k is the chance that one of k different samples is right" in page.words
    table = text[text.index('id="held-out-figures"') :]
    cells = [re.sub(r"<[^>]+>", "", cell) for cell in re.findall(r"<t[hd](?: [^>]*)?>(.*?)</t[hd]>", table)][4:]
    assert cells[:4] == ["all tasks", "accuracy", "20.0 (15.0 to 25.0)", "80.0 (75.0 to 85.0)"]
    assert ["", "best@4", "20.0 (18.0 to 22.0)", "80.0 (78.0 to 82.0)"] in [cells[n : n + 4] for n in range(80)]
    assert "gsm8k" in cells
    assert "&lt;em&gt;" in cells
    assert "<em>" not in text
    assert "eval/source/gsm8k/best@2" not in page.words, "it is in the table, not among all other metrics"
    both, _ = report(tmp_path, tmp_path / "one", write("two"))
    assert both.count("<summary>Held-out figures") == 1


def test_the_gain_is_told_at_the_end_and_by_a_run_of_python(write):
    gained = write("gained")
    assert _gain_line(gained).startswith("gained:     +60.0 points since step 0 (95 % interval +")
    run = load_run(gained)
    half = math.hypot(0.05, 0.05)  # Newcombe's interval of a difference
    assert run.gained == pytest.approx((0.6, 0.6 - half, 0.6 + half))
    assert "accuracy 0.800 (+60.0 points, 95 % interval +" in repr(run)
    high = {"eval/accuracy": 0.95, "eval/accuracy_low": 0.9, "eval/accuracy_high": 0.99}
    worse = rewrite(write("worse"), "metrics.jsonl", lambda row: row if row["step"] else row | high)
    assert "gained:     -15.0 points" in _gain_line(worse)
    assert "the model got worse; lower training.learning_rate" in _gain_line(worse)
    flat = write("flat", learns=False)
    assert _gain_line(flat).endswith("no sure gain; docs/when-rl-does-not-learn.md says what to change")
    rewrite(flat, "metrics.jsonl", lambda row: {name.replace("reward/", "other/"): row[name] for name in row})
    assert _gain_line(flat).endswith("easier tasks, or answers that show their working")
    assert load_run(write("begun", steps=0)).gained is None
