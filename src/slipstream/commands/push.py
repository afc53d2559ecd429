"""Pushes a run's model or adapter to the Hugging Face hub, with a model card.

Guarantees: the files are compared with their digests first. An adapter that changes nothing is refused. The token never
leaves `huggingface_hub`.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import slipstream
from slipstream.artifacts.outgoing import checkpoints_in
from slipstream.errors import ConfigError, DataError, SlipstreamError, first_line
from slipstream.plan.deployable import run_settings, weights_folder
from slipstream.plan.preflight.model_folder import hub_commit
from slipstream.processes.temporary import temporary
from slipstream.runlog import holds_run
from slipstream.runlog.files import folder_of_run
from slipstream.trainer.checkpoints.checkpoint import CheckpointStore, damage
from slipstream.trainer.checkpoints.manifest import MANIFEST


@dataclass(frozen=True)
class Pushed:
    """A repository of the hub after a push."""

    repo: str
    url: str
    commit: str
    step: int | None


def push(run: str, repo: str, *, step: int | None = None, is_public: bool = False) -> Pushed:
    """Push the weights of a run (its name or folder), a checkpoint or `run:ID/step-N` to the repository `repo`. Raises
    ConfigError, before anything is sent, for what cannot be pushed."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    source = _source(run, step)
    with temporary("push") as here:
        folder = here / "files"
        shutil.copytree(source, folder)
        found = _step_of(source)
        (folder / "README.md").write_text(model_card(repo, source, found), encoding="utf-8")
        text = f"Step {found}, by Slipstream {slipstream.__version__}" if found is not None else "By Slipstream"
        api = HfApi(library_name="slipstream", library_version=slipstream.__version__)
        try:
            api.create_repo(repo, private=not is_public, exist_ok=True)
            commit = api.upload_folder(repo_id=repo, folder_path=folder, commit_message=text)
        except HFValidationError as error:
            raise ConfigError(f"{repo!r} is no name of a repository ({first_line(error)}): give owner/name") from None
        except HfHubHTTPError as error:
            status = error.response.status_code
            reason = {401: "the token is missing or wrong", 403: "the token has no right to write there"}.get(status)
            raise ConfigError(
                f"{repo} cannot be pushed to ({reason or f'the hub answered {status}'}): set HF_TOKEN, or name another "
                "repository"
            ) from None
        except OSError as error:
            raise SlipstreamError(f"the hub cannot be reached ({type(error).__name__}): check HF_ENDPOINT") from None
    return Pushed(repo, str(commit.repo_url), commit.oid, found)


def _source(run: str, step: int | None) -> Path:
    """The verified folder of weights."""
    from slipstream.weights.adapter_folder import changes_nothing, is_adapter_folder, read_adapter_config

    path = Path(run).expanduser()
    if not run.startswith("run:") and not path.exists():
        submitted = folder_of_run(run) if "/" not in run and run not in (".", "..") else None
        path = submitted if submitted is not None else Path(f"run:{run}")  # then the store may have it
    if step is not None:
        if str(path).startswith("run:"):
            path = Path(f"{str(path).partition('/')[0]}/step-{step}")
        elif holds_run(path) and (found := checkpoints_in(path / "checkpoints").get(step)) is not None:
            path = found
        else:
            raise ConfigError(f"{run} has no checkpoint of step {step}: slipstream checkpoints lists them")
    folder = weights_folder(path)
    if (folder.parent / MANIFEST).is_file() and (reason := damage(folder.parent, whole="weights/")):
        raise ConfigError(f"checkpoint {folder.parent} is damaged ({reason}): use another one of its run")
    if is_adapter_folder(folder):
        if changes_nothing(folder):
            raise ConfigError(f"every B of the adapter in {folder} is zero, so it was not trained: name a later step")
        base = read_adapter_config(folder).base
        if Path(base).is_absolute():
            raise ConfigError(
                f"the adapter in {folder} names its base by a path of this machine, {base}: push a model made by "
                "slipstream export --merged"
            )
    return folder


def _step_of(source: Path) -> int | None:
    from slipstream.trainer.checkpoints.manifest import read_manifest

    try:
        return read_manifest(source.parent).step if source.name == "weights" else None
    except DataError:
        return None


def model_card(repo: str, source: Path, step: int | None) -> str:
    """The text of README.md: facts of the run, for the hub and for people."""
    from slipstream.weights.adapter_folder import is_adapter_folder, read_adapter_config

    settings = run_settings(source)
    is_adapter = is_adapter_folder(source)
    base, commit = hub_commit(str(settings.get("model.path", "")))
    if is_adapter:
        adapter = read_adapter_config(source)
        base, commit = adapter.base, adapter.revision
    kind = settings.get("algorithm.kind", "")
    head: dict[str, Any] = {"library_name": "peft" if is_adapter else "transformers"}
    head |= {"pipeline_tag": "text-generation", "tags": ["slipstream", *([kind] if kind else [])]}
    if base and not Path(base).is_absolute():
        head["base_model"] = base
    facts = {
        "base model": base if not Path(base).is_absolute() else "",
        "commit of the base model": commit,
        "method": f"{kind}, {'LoRA' if is_adapter else 'all weights'}" if kind else "",
        "step": step,
        "environment": _public(settings.get("environment.name")),
        "learning rate": settings.get("training.learning_rate"),
        "digest of the weights": _digest(source),
    }
    rows = [f"| {name} | {value} |" for name, value in facts.items() if value not in ("", None)]
    # JSON is YAML.
    front = "\n".join(f"{name}: {json.dumps(value)}" for name, value in head.items())
    table = "\n".join(["| | |", "|---|---|", *rows])
    return f"---\n{front}\n---\n\n# {repo.partition('/')[2] or repo}\n\nTrained with Slipstream.\n\n{table}\n"


def _public(name: Any) -> str:
    """An environment's name, without folders of this machine."""
    return str(name).rpartition("/")[2] if name and str(name).startswith("/") else str(name or "")


def _digest(source: Path) -> str:
    try:
        return CheckpointStore.read_fingerprints(source.parent).digest if source.name == "weights" else ""
    except DataError:
        return ""
