"""Tasks of SkyPilot: made here, and parsed and priced by a real SkyPilot in an environment of its own."""

import json
import os
import shutil
import subprocess

import pytest

from slipstream.cli import main

PROGRAM = os.environ.get("SLIPSTREAM_SKY") or shutil.which("sky")
needs_sky = pytest.mark.skipif(
    not PROGRAM, reason="needs SkyPilot: pip install skypilot==0.14.1 elsewhere, and SLIPSTREAM_SKY=.../bin/sky"
)
HEADER = "InstanceType,AcceleratorName,AcceleratorCount,vCPUs,MemoryGiB,Price,Region,GpuInfo,SpotPrice"
ROWS = {
    "lambda": (
        "gpu_1x_h100_pcie,H100,1.0,26.0,200.0,2.49,us-east-1,,",
        "gpu_8x_h100,H100,8.0,208.0,1800.0,23.9,us-east-1,,",
    ),
    "runpod": ("1x_H100_SECURE,H100,1.0,16.0,80.0,2.39,US,,",),
}


@pytest.fixture
def home(tmp_path, monkeypatch):
    made = tmp_path / "home"
    made.mkdir()
    monkeypatch.setenv("HOME", str(made))
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY", raising=False)
    return made


@pytest.fixture
def submit(place, home, capsys):
    def run(*arguments, file=None):
        with pytest.raises(SystemExit) as ended:
            main(["submit", str(file or place.run_file()), "--to", "sky", "--json", *arguments])
        return ended.value.code, json.loads(capsys.readouterr().out.splitlines()[-1])

    return run


STORE = ("--store", "s3://bucket/runs")


def test_what_is_missing_is_one_sentence(submit, monkeypatch, home):
    assert "add --store s3://BUCKET/PREFIX" in submit()[1]["message"]
    assert "add --store s3://BUCKET/PREFIX" in submit("--store", "/tmp/folder")[1]["message"]
    assert "--time does not go with --to sky" in submit(*STORE, "--time", "1:00")[1]["message"]
    monkeypatch.setenv("SLIPSTREAM_SKY", str(home / "no/sky"))
    assert "SkyPilot is not here: install skypilot in an environment of its own" in submit(*STORE)[1]["message"]
    (home / "bin").mkdir()
    (home / "bin/python").symlink_to("/bin/false")
    monkeypatch.setenv("SLIPSTREAM_SKY", str(home / "bin/sky"))
    code, answer = submit(*STORE)
    assert (code, "has no catalogue CLOUD/vms.csv" in answer["message"]) == (2, True)


@pytest.mark.service
@needs_sky
def test_sky_parses_the_task_and_prices_it_from_a_given_catalogue(submit, home, place, monkeypatch):
    for cloud, rows in ROWS.items():
        folder = home / ".sky/catalogs/v8" / cloud
        folder.mkdir(parents=True)
        (folder / "vms.csv").write_text("\n".join((HEADER, *rows)) + "\n")
    monkeypatch.setenv("SLIPSTREAM_SKY", PROGRAM)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hunter2")
    code, answer = submit(*STORE, "--accelerator", "H100")
    assert code == 0
    assert [(offer["cloud"], offer["machine"], offer["hour"]) for offer in answer["offers"]] == [
        ("runpod", "1x_H100_SECURE", 2.39),
        ("lambda", "gpu_1x_h100_pcie", 2.49),
    ]
    task = json.loads(answer["task"])
    assert task["resources"] == {"accelerators": "H100:1"}
    assert task["secrets"] == {"AWS_SECRET_ACCESS_KEY": None}
    assert "hunter2" not in answer["task"]
    assert "slipstream submit run.toml --to local" in task["run"]
    assert subprocess.run(["bash", "-n"], input=task["run"], text=True, check=False).returncode == 0
    code, answer = submit(*STORE, "--accelerator", "H100", "--gpus-per-node", "8", "--infra", "lambda")
    assert [(offer["machine"], offer["hour"]) for offer in answer["offers"]] == [("gpu_8x_h100", 23.9)]
    assert "no machine in the catalogues of lambda, runpod" in submit(*STORE, "--accelerator", "A100")[1]["message"]
