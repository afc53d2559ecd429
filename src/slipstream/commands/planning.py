"""Plans a run without starting it, on this machine or for GPUs elsewhere: the work of `slipstream plan`.

A folder with a configuration alone is enough: sizes follow from it, and without a tokenizer a token is taken to
be a byte.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

from slipstream.config import Loaded
from slipstream.launch.prepare import Prepared, check_engine, prepare
from slipstream.plan.deployable import with_weights_folder
from slipstream.plan.derive import DoesNotFit, Plan
from slipstream.plan.memory.cards import Gpus
from slipstream.plan.preflight.model_folder import has_tokenizer, has_weights
from slipstream.processes.temporary import temporary

BARE_CONTEXT = 1 << 20
"""Longest text, in bytes, of the tokenizer in place of the model's own."""


def plan_run(loaded: Loaded, gpus: Gpus | None = None) -> Prepared:
    """Prepare a run for `gpus`, by default this machine's. Raises ConfigError for an impossible run, and
    `DoesNotFit` with the plan for one that is too large."""
    folder = Path(with_weights_folder(loaded).config.model.path)
    missing = _missing(loaded, folder)
    if "tokenizer" not in missing:
        return _planned(loaded, gpus, folder, missing)
    with temporary("plan") as stand_in:
        _write_stand_in(folder, stand_in)
        model = loaded.config.model.model_copy(update={"path": str(stand_in)})
        other = replace(loaded, config=loaded.config.model_copy(update={"model": model}))
        return _planned(other, gpus, folder, missing)


def _planned(loaded: Loaded, gpus: Gpus | None, folder: Path, missing: list[str]) -> Prepared:
    try:
        prepared = prepare(loaded, weights=False, gpus=gpus)
    except DoesNotFit as error:
        raise DoesNotFit(_named(error.plan, folder, missing)) from None
    if gpus is None and not missing:  # vLLM takes its options for the device it runs on
        check_engine(prepared)
    return replace(prepared, plan=_named(prepared.plan, folder, missing))


def _missing(loaded: Loaded, folder: Path) -> list[str]:
    """The parts needed by a run and missing in the model's folder."""
    if not (folder / "config.json").is_file() or loaded.config.model.trust_remote_code:
        return []
    there = {"weights": has_weights(folder), "tokenizer": has_tokenizer(folder)}
    return [name for name, is_there in there.items() if not is_there]


def _write_stand_in(folder: Path, stand_in: Path) -> None:
    from slipstream.commands.small_models.tiny_qwen3 import new_tokenizer

    new_tokenizer("byte", context_length=BARE_CONTEXT).save_pretrained(str(stand_in))
    shutil.copyfile(folder / "config.json", stand_in / "config.json")


def _named(plan: Plan, folder: Path, missing: list[str]) -> Plan:
    """The plan of the model in `folder`, with its missing parts."""
    if not missing:
        return plan
    text = f"{folder} has no {' and no '.join(missing)}: sizes follow from its config.json"
    if "tokenizer" in missing:
        text += ", and lengths are of UTF-8 bytes in the ChatML template, several times as many as tokens"
    model = plan.config.model.model_copy(update={"path": str(folder)})
    config = plan.config.model_copy(update={"model": model})
    return replace(plan, config=config, warnings=(f"{text}; a run needs them", *plan.warnings))
