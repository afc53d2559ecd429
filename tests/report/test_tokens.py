"""The tokens of rollouts in the report: which text, log-probability, version and advantage each has."""

import json
import re

from slipstream.commands.small_models.tiny_qwen3 import new_model
from slipstream.report import tokens
from slipstream.report.tokens import key_of, token_views
from slipstream.runlog import read_run

SEQUENCE = {
    "token_ids": [72, 73, 10, 11, 12, 74, 13],
    "sampled": [[2, 5], [6, 7]],
    "versions": [[2, "0.1"], [4, "0.2"]],
    "logprobs": [-0.5, -1.5, -2.5, -3.5],
}


def sample(step, number=0, **fields):
    return {
        "time": 1.0, "lineage": 0, "step": step, "id": f"{step}.0.{number}", "task": "t", "prompt": "p",
        "completion": "c", "reward": 1.0, "outcome": "done", "version": "0.1", "sequences": [SEQUENCE], **fields,
    }  # fmt: skip


def views(write, *samples):
    folder = write("run", steps=2, open=True)
    with (folder / "samples.jsonl").open("a") as file:
        file.writelines(json.dumps(each) + "\n" for each in samples)
    return folder, token_views(read_run(folder))


def spans(html):
    found = re.findall(r"<span([^>]*)>([^<]*)</span>", html)
    return [(text, dict(re.findall(r'data-(\w)="([^"]*)"', attributes))) for attributes, text in found]


def test_each_sampled_token_has_its_own_figures(write):
    whole = sample(1, advantage=0.25, carries_loss=True)
    own = sample(2, sequences=[{**SEQUENCE, "advantages": [1.0, 2.0, 3.0, 4.0]}], carries_loss=False)
    _, (found, missing) = views(write, whole, own)
    first, second = found[key_of(whole)], found[key_of(own)]
    assert 'data-a="0.25" data-trained=""' in first
    assert 'data-trained="no"' in second
    shown = spans(first)
    assert [(figures.get("l"), figures.get("v")) for _, figures in shown] == [
        (None, None), ("-0.5", "0.1"), ("-1.5", "0.1"), ("-2.5", "0.2"), (None, None), ("-3.5", "0.2"),
    ]  # fmt: skip
    assert [figures["a"] for _, figures in spans(second) if figures] == ["1.0", "2.0", "3.0", "4.0"]
    assert [text for text, _ in shown] == ["⟨72⟩⟨73⟩", "⟨10⟩", "⟨11⟩", "⟨12⟩", "⟨74⟩", "⟨13⟩"]
    assert missing == "Tokens have their ids: no tokenizer can be read."


def test_texts_are_those_of_the_newest_checkpoint(write, tmp_path):
    folder, _ = views(write, sample(1))
    new_model(folder / "checkpoints" / "step-000001" / "weights")
    found, missing = token_views(read_run(folder))
    texts = [text for text, _ in spans(found[1, "1.0.0"])]
    assert missing == ""
    assert len(texts) == 6
    assert not any("⟨" in text for text in texts)


def test_the_latest_that_fit_have_theirs(write, monkeypatch):
    monkeypatch.setattr(tokens, "MAX_TOKENS", 2 * 7)
    huge = sample(9, sequences=[{**SEQUENCE, "token_ids": [1] * 50}])
    broken = [sample(8, sequences=[{"token_ids": "x"}]), {"completion": "a line of something else"}]
    _, (found, _) = views(write, *(sample(step) for step in range(1, 6)), huge, *broken)
    assert sorted(found) == [(4, "4.0.0"), (5, "5.0.0")]
