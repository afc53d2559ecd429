"""`slipstream verify` and `slipstream trace` on what real training loops leave."""

from __future__ import annotations

import json
import shutil

import pytest
from safetensors import safe_open

from slipstream.runlog import read_events, read_samples, read_tickets

from .conftest import Left


@pytest.fixture(scope="module")
def left(model, tmp_path_factory):
    return Left(model, tmp_path_factory.mktemp("left"), "--run.checkpoint_every", "1", "--run.keep_checkpoints", "2")


@pytest.fixture
def run(left):
    """A finished run of three steps that keeps all of its checkpoints but the first."""
    return left.again()


def flip(file, name, place=-1):
    """Change the lowest bit of the last byte of a tensor, in the file."""
    data = bytearray(file.read_bytes())
    length = int.from_bytes(data[:8], "little")
    begin, end = json.loads(data[8 : 8 + length])[name]["data_offsets"]
    data[8 + length + (end - 1 if place < 0 else begin + place)] ^= 1
    file.write_bytes(data)


def test_all_that_a_run_left_is_as_it_was_trained(run, slipstream):
    code, out, err = slipstream("verify", run, "--json")
    assert code == 0, err
    found = json.loads(out)
    assert [(v["what"], v["version"]) for v in found] == [
        *(("checkpoint step-000002", "0.2"), ("checkpoint step-000003", "0.3")),
        *(("published files", "0.2"), ("published files", "0.3")),
    ]
    digests = {e["version"]: e["digest"] for e in read_events(run) if e["kind"] == "publish"}
    assert all(v["digest"] == digests[v["version"]] for v in found)
    assert all(v["num_bytes"] > 0 and v["gb_per_s"] > 0 and not v["problems"] for v in found)
    code, out, _ = slipstream("verify", run / "checkpoints" / "step-000003")
    assert code == 0
    assert "the same" in out
    assert slipstream("verify", run / "weights" / "0.3")[0] == 0


def test_one_flipped_bit_is_found_and_its_parameter_named(run, slipstream):
    file = run / "checkpoints" / "step-000003" / "weights" / "model.safetensors"
    with safe_open(file, framework="pt") as weights:
        name = sorted(weights.keys())[3]
    flip(file, name)
    code, out, err = slipstream("verify", run)
    assert code == 6
    assert "checkpoint step-000003 0.3 is not what was recorded (weights/model.safetensors" in err
    assert f"{name} differs" in err
    assert out.count("differs") == 1
    assert out.count("the same") == 3
    flip(file, name)
    flip(run / "weights" / "0.2" / "model.safetensors", name, place=0)
    code, _, err = slipstream("verify", run)
    assert (code, err.count("differs")) == (6, 1)
    assert f"published files 0.2 is not what was recorded ({name} differs)" in err


def test_files_that_were_swapped_or_lost_are_found(run, slipstream):
    checkpoints = run / "checkpoints"
    proof = checkpoints / "step-000003" / "fingerprints.json"
    proof.write_bytes((checkpoints / "step-000002" / "fingerprints.json").read_bytes())
    code, _, err = slipstream("verify", run)
    assert code == 6
    assert "fingerprints.json has other contents" in err
    (run / "weights" / "0.3" / "model.safetensors").unlink()
    shutil.rmtree(checkpoints)
    code, _, err = slipstream("verify", run)
    assert code == 6
    assert "is missing" in err


def test_an_adapter_and_the_base_below_it(scripted, slipstream):
    # The scripted engine knows no adapters: what it says of the tokens is not the policy's.
    limits = ("--weights.probe_warn", "98", "--weights.probe_stop", "99")
    report = scripted.run("--lora.rank", "4", *limits, change=lambda engine: setattr(engine, "_logprobs", None))
    assert report.status == "finished"
    code, out, err = slipstream("verify", scripted.folder, "--json")
    assert code == 0, err
    found = {v["what"].split()[0]: v for v in json.loads(out)}
    assert set(found) == {"checkpoint", "published", "base"}
    (ticket,) = [t for t in read_tickets(scripted.folder) if t.version.name == "0.3"]
    assert found["base"]["num_parameters"] == len(ticket.base)
    name = ticket.parameters[0].name
    flip(scripted.folder / "checkpoints" / "step-000003" / "weights" / "adapter_model.safetensors", name)
    assert f"{name} differs" in slipstream("verify", scripted.folder)[2]


def test_tickets_are_the_newest_two(run):
    tickets = read_tickets(run)
    assert [ticket.version.name for ticket in tickets] == ["0.2", "0.3"]
    assert {path.suffix for path in (run / "tickets").iterdir()} == {".json"}


def test_a_rollout_is_followed_to_weights_and_batch(run, slipstream):
    samples = [sample for sample in read_samples(run) if sample.get("split") != "eval"]
    sample = samples[-1]
    assert sample["step"] == 2
    code, out, err = slipstream("trace", run, sample["id"], "--json", "--token", 0)
    assert code == 0, err
    found = json.loads(out)
    (span,) = found["spans"]
    (sequence,) = sample["sequences"]
    ((start, end),) = sequence["sampled"]
    assert (span["start"], span["end"], span["version"]) == (start, end, "0.2")
    assert found["num_sampled"] == end - start == len(sequence["logprobs"])
    (version,) = found["versions"]
    digests = {e["version"]: e["digest"] for e in read_events(run) if e["kind"] == "publish"}
    assert version["digest"] == digests["0.2"]
    assert version["verified"]
    assert version["held_by"] == "checkpoints/step-000002"
    assert found["update"] == "0.3"
    assert found["reward"] == sample["reward"]
    assert found["advantage"] == sample["advantage"]
    assert found["carries_loss"] is True
    assert found["token"] == {
        "number": 0, "sequence": 0, "position": start, "token_id": sequence["token_ids"][start],
        "logprob": sequence["logprobs"][0], "version": "0.2", "request": 0,
    }  # fmt: skip


def test_what_no_folder_holds_any_more_is_said_with_a_remedy(run, slipstream):
    code, out, _ = slipstream("trace", run, "1.0.0")
    assert code == 0
    assert "no folder holds it any more: a run with run.checkpoint_every = 1" in out
    assert "trained on: made version 0.2" in out
    code, out, _ = slipstream("trace", run, "0.0.0", "--json")
    assert json.loads(out)["versions"][0]["held_by"].endswith("tiny"), "the model that the run began with"


def test_held_out_samples_and_names_that_are_not_there(run, slipstream):
    held_out = [sample for sample in read_samples(run) if sample.get("split") == "eval"]
    step = held_out[-1]["step"]
    assert held_out[-1]["id"] == f"eval.{step}.{len([s for s in held_out if s['step'] == step]) - 1}"
    code, out, err = slipstream("trace", run, f"eval.{step}.0", "--json")
    assert code == 0, err
    found = json.loads(out)
    assert (found["split"], found["update"], found["advantage"]) == ("eval", "", None)
    assert held_out[-1]["answer"]
    code, _, err = slipstream("trace", run, "nobody")
    assert code == 2
    assert "kept no sample nobody: name one of" in err
    code, _, err = slipstream("trace", run, "2.0.0", "--token", 999)
    assert code == 2
    assert "has no sampled token 999: there are 0 to" in err


def test_an_empty_answer_is_kept_and_traced(scripted, slipstream):
    report = scripted.run("--training.steps", "1", script=lambda prompt, seed: scripted.say("a" if seed % 2 else ""))
    assert report.status == "finished"
    kept = [sample for sample in read_samples(scripted.folder) if not sample["completion"]]
    assert {sample.get("split", "train") for sample in kept} == {"train", "eval"}
    code, out, err = slipstream("trace", scripted.folder, kept[0]["id"], "--json")
    assert code == 0, err
    assert json.loads(out)["num_sampled"] == 1, "the end token"
