"""Tasks of SkyPilot: a run on a rented machine, with its artifacts in a store.

SkyPilot's packages exclude ours (click), so its program lives in an environment of its own, named by `PROGRAM`. A task
is complete in itself: settings and code are inside, and secrets by name alone.
"""

from __future__ import annotations

import base64
import json
import os
import shlex
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from slipstream import __version__
from slipstream.clusters import sky_offers
from slipstream.config import Loaded, dump_given
from slipstream.errors import ConfigError
from slipstream.processes.temporary import temporary
from slipstream.runlog.redaction import refuse_secrets
from slipstream.service import bundles
from slipstream.service.records import Asked
from slipstream.service.store import name_from

PROGRAM = "SLIPSTREAM_SKY"
"""Environment variable: the program `sky`; default: the one on PATH."""
CATALOGUES = Path(".sky/catalogs/v8")
"""Below the user's home: a folder for each cloud."""
_ANSWER_S = 120.0
_CREDENTIALS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "HF_TOKEN", "WANDB_API_KEY")
_END = "SLIPSTREAM_END"


class Offer(msgspec.Struct, frozen=True):
    """A machine of a cloud."""

    cloud: str
    machine: str
    hour: float
    """Dollars, all nodes together."""


class _Answer(msgspec.Struct, frozen=True):
    error: str = ""
    offers: tuple[Offer, ...] = ()


def task_of(loaded: Loaded, name: str, asked: Asked, store: str) -> str:
    """A task in YAML. Raises ConfigError for a run without a store in a bucket, or with a secret in its settings."""
    if "://" not in store or store.startswith("file://"):
        raise ConfigError("a rented machine keeps nothing: add --store s3://BUCKET/PREFIX")
    if loaded.config.cluster.nodes > 1:
        raise ConfigError(f"cluster.nodes = {loaded.config.cluster.nodes} does not go with --to sky: use one node")
    if loaded.config.run.folder is not None:
        raise ConfigError("run.folder is on the rented machine: leave it out")
    name = name_from(name)
    settings, files = bundles.pack(dump_given(loaded))
    refuse_secrets(settings)
    accelerators = f"{asked.kind}:{asked.gpus_per_node or 1}" if asked.kind else None
    resources: dict[str, Any] = {"accelerators": accelerators} if accelerators else {"cpus": "4+"}
    resources |= {"infra": asked.infra} if asked.infra else {}
    submit = ["slipstream", "submit", "run.toml", "--to", "local", "--run.folder", f"runs/{name}", "--resume"]
    lines = ["set -e", "mkdir -p ~/slipstream", "cd ~/slipstream", *_written("run.toml", settings)]
    for path, data in files.items():
        text = base64.encodebytes(data).decode()
        lines += [shlex.join(["mkdir", "-p", f"{bundles.FOLDER}/{path.rpartition('/')[0]}"])]
        lines += _written(f"{bundles.FOLDER}/{path}", text, "base64 --decode")
    lines += [shlex.join([*submit, "--store", store, "--follow"])]
    task = {
        "name": name,
        "resources": resources,
        "secrets": {each: None for each in _CREDENTIALS if each in os.environ},
        "setup": f"pip install 'slipstream[s3]=={__version__}'",
        "run": "\n".join(lines) + "\n",
    }
    return json.dumps({key: value for key, value in task.items() if value}, indent=2) + "\n"


def _written(path: str, text: str, program: str = "cat") -> list[str]:
    if any(line == _END for line in text.splitlines()):
        raise ConfigError(f"the run file has a line {_END}: change it")
    return [f"{program} > {shlex.quote(path)} <<'{_END}'", text.rstrip("\n"), _END]


def offers_for(task: str) -> tuple[Offer, ...]:
    """Offers for a task by SkyPilot's catalogues on this disk, the cheapest first. Raises ConfigError without SkyPilot,
    without a catalogue, and if SkyPilot refuses the task."""
    program = os.environ.get(PROGRAM) or shutil.which("sky")
    if not program or not (python := Path(program).parent / "python").exists():
        raise ConfigError(
            f"SkyPilot is not here: install skypilot in an environment of its own, and set {PROGRAM} to its program sky"
        )
    home = Path.home() / CATALOGUES
    clouds = sorted(path.parent.name for path in home.glob("*/vms.csv"))
    if not clouds:
        raise ConfigError(f"{home} has no catalogue CLOUD/vms.csv: call sky gpus list once, which fetches them")
    with temporary("sky") as place:
        path = place / "task.yaml"
        path.write_text(task, encoding="utf-8")
        answer = _ask([str(python), "-I", sky_offers.__file__, str(path), *clouds], os.environ)
    if answer.error:
        raise ConfigError(answer.error)
    if not answer.offers:
        raise ConfigError(f"no machine in the catalogues of {', '.join(clouds)} has what the task asks for")
    return tuple(sorted(answer.offers, key=lambda offer: (offer.hour, offer.cloud, offer.machine)))


def _ask(command: list[str], environment: Mapping[str, str]) -> _Answer:
    quiet = {**environment, "SKYPILOT_DISABLE_USAGE_COLLECTION": "1"}
    try:
        done = subprocess.run(command, capture_output=True, env=quiet, timeout=_ANSWER_S, check=False)
    except subprocess.TimeoutExpired:
        raise ConfigError(f"SkyPilot gave no answer within {_ANSWER_S:g} s: look at its catalogues") from None
    lines = done.stdout.splitlines()
    try:
        return msgspec.json.decode(lines[-1] if lines else b"", type=_Answer)
    except msgspec.DecodeError:
        last = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
        raise ConfigError(f"SkyPilot failed ({''.join(last)[:300] or done.returncode}): see sky --version") from None
