"""Of run files that are wrong, or odd: each is planned or refused in one sentence, and what is planned starts.

SLIPSTREAM_MUTATION_SEED gives others; `tests/config/mutate.py` is a command, too.
"""

import json
import os
import sys
from collections import Counter
from pathlib import Path

import pytest

from slipstream.cli import main
from slipstream.config import load_config
from slipstream.errors import ConfigError
from slipstream.processes import launchers
from tests.config.mutate import LONGEST_LINE, make_case

ROOT = Path(__file__).parents[2]
SEED = os.environ.get("SLIPSTREAM_MUTATION_SEED", "0")


def mutated(folder, cases, starts):
    """What became of the first `cases`, and of `starts` of those that were accepted."""
    options = ["--cases", str(cases), "--starts", str(starts), "--seed", SEED, "--folder", str(folder)]
    # Forked from a process that has imported vLLM, where there are such.
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = launchers.popen([sys.executable, "-m", "tests.config.mutate", *options], cwd=ROOT, env=environment)
    assert process.wait() == 0
    return [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]


def judge(results, cases, starts):
    assert [each for each in results if each["verdict"] not in ("accepted", "refused", "starts")] == []
    count = Counter(each["verdict"] for each in results)
    assert count["accepted"] + count["refused"] == cases
    assert min(count["accepted"], count["refused"]) >= cases // 10
    assert count["starts"] == min(starts, count["accepted"])


def test_a_hundred_are_loaded_or_refused_in_short_lines(tmp_path):
    """In this process, which plans none of them."""
    path, verdicts, longest = tmp_path / "run.toml", Counter(), 0
    for number in range(100):
        _, text = make_case(SEED, number)
        path.write_text(text, encoding="utf-8", errors="surrogatepass", newline="")
        try:
            load_config(path)
        except ConfigError as error:
            verdicts["refused"] += 1
            longest = max(longest, *map(len, str(error).split("\n")), 0)
        else:
            verdicts["loaded"] += 1
    assert longest <= LONGEST_LINE
    assert min(verdicts["loaded"], verdicts["refused"]) > 10


@pytest.mark.full
@pytest.mark.timeout(5400)
def test_four_hundred_and_what_is_accepted_runs(tmp_path, monkeypatch):
    folder = tmp_path / "files"
    results = mutated(folder, 400, 30)
    judge(results, 400, 30)
    monkeypatch.chdir(folder)
    accepted = [each["number"] for each in results if each["verdict"] == "accepted"]
    for number in accepted[:: len(accepted) // 4][:4]:
        run = ["--training.steps", "2", "--run.folder", f"run{number}", "--evaluation", "false"]
        with pytest.raises(SystemExit) as ended:
            main(["train", f"case{number:04}.toml", *run])
        # 7: it ran, and the answers of a model without training gave nothing to learn from.
        assert ended.value.code in (0, 7), (folder / f"case{number:04}.toml").read_text()
