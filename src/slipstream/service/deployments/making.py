"""Makes a deployment of a run's checkpoint: finds, verifies and checks it, copies an adapter, and stores the record.

Guarantees: an unusable checkpoint is refused before anything starts; a contradiction shows both values. The service
calls this as a program, since it imports torch and transformers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import msgspec

from slipstream.artifacts.outgoing import step_of
from slipstream.artifacts.references import located
from slipstream.config.addresses import RunReference
from slipstream.errors import ConfigError, SlipstreamError
from slipstream.inference.plugin.named_adapters import FILES, adapter_digest, adapter_named
from slipstream.plan.deployable import Deployable, ServeOptions, adapter_config_of, find_deployable
from slipstream.runlog import holds_run, read_settings
from slipstream.service.deployments.records import DEFAULT_ROOM, Deployment, Options, ServerSpec
from slipstream.service.deployments.registry import Registry
from slipstream.service.store import Store
from slipstream.trainer.checkpoints.manifest import read_manifest

_GPU_MEMORY = 0.8
_SPARE = 0.95
"""The share of a fuller GPU's free memory."""


class Asked(msgspec.Struct, frozen=True):
    """A checkpoint to deploy."""

    run: str
    owner: str
    folder: str = ""
    """The run's, if it is here."""
    step: int | None = None
    options: Options = Options()


class Answer(msgspec.Struct, frozen=True):
    """Of the program."""

    name: str = ""
    error: str = ""


@dataclasses.dataclass(frozen=True)
class _Found:
    record: Deployment
    deployable: Deployable
    with_tower: bool


def make(store: Store, asked: Asked) -> Deployment:
    """Store the deployment of a checkpoint, for the host to serve. An earlier one stays. Raises
    ConfigError."""
    found, registry = _find(asked), Registry(store)
    record = found.record
    with registry.locked():
        old = registry.one(record.name)
        if old is not None and old.digest != record.digest and old.state not in ("failed", "undeploying"):
            raise ConfigError(
                f"{old.name} is deployed with digest {old.digest}, and its checkpoint has {record.digest} now: "
                f"slipstream undeploy {old.name}"
            )
        spec = _settled(store, registry, found, asked.options)
        if old is not None and old.digest == record.digest and old.state in ("deploying", "ready"):
            return old
        if old is not None and old.served != record.served:
            registry.remove(old)
        registry.put_spec(spec)
        if record.kind == "adapter":
            _copy(Path(record.source), registry.adapters(spec.key), record.served)
        record = msgspec.structs.replace(record, context=spec.context)
        registry.put(record)
    return record


def _find(asked: Asked) -> _Found:
    from slipstream.commands.chat import chat_tokenizer
    from slipstream.weights.model_files import weights_digest

    folder = Path(asked.folder) if asked.folder else None
    text = f"run:{asked.run}" + ("" if asked.step is None else f"/step-{asked.step}")
    checkpoint = located(RunReference(text, asked.run, asked.step), folder)
    settings = read_settings(folder) if folder is not None and holds_run(folder) else {}
    is_trusted = bool(settings.get("model.trust_remote_code"))
    step = read_manifest(checkpoint).step or step_of(checkpoint.name) or asked.step or 0
    deployable = find_deployable(str(checkpoint), trust_remote_code=is_trusted)
    deployable = dataclasses.replace(deployable, run_settings=deployable.run_settings or settings)
    tokenizer = chat_tokenizer(deployable, trust_remote_code=is_trusted)
    adapter, model = deployable.adapter, Path(deployable.model)
    config = adapter_config_of(deployable, trust_remote_code=is_trusted)
    whole = weights_digest(model)
    if adapter is None or config is None:
        key = f"model-{_short(f'{asked.run} {step} {whole}')}"
        digest, base, rank = whole[:16], str(model), 0
    else:
        _check_tensors(adapter, model)
        key = f"base-{_short(f'{model.resolve()} {whole}')}"
        digest, base, rank = adapter_digest(adapter), config.base, config.rank
    ends = dict.fromkeys((*tokenizer.stop_token_ids, *_end_tokens(adapter or model)))
    request: dict[str, Any] = {"stop_token_ids": list(ends)}
    if tokenizer.template_kwargs:
        request["chat_template_kwargs"] = dict(tokenizer.template_kwargs)
    record = Deployment(
        name=f"{asked.run}-step-{step}",
        owner=asked.owner,
        run=asked.run,
        step=step,
        kind="model" if adapter is None else "adapter",
        source=str(adapter or model),
        digest=digest,
        base=base,
        rank=rank,
        server=key,
        created=time.time(),
        changed=time.time(),
        request=request,
        system_prompt=tokenizer.system_prompt,
    )
    return _Found(record, deployable, config is not None and config.with_tower)


def _short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _end_tokens(folder: Path) -> tuple[int, ...]:
    """The end tokens of training, as the folder names them."""
    from slipstream.weights.usage import GENERATION_CONFIG

    try:
        named = msgspec.json.decode((folder / GENERATION_CONFIG).read_bytes(), type=dict[str, Any]).get("eos_token_id")
    except (OSError, msgspec.DecodeError):
        return ()
    ids = named if isinstance(named, list) else [named]
    return tuple(each for each in ids if isinstance(each, int))


def _check_tensors(adapter: Path, model: Path) -> None:
    """Raise ConfigError for infinite numbers and NaN, and for other shapes than the base's."""
    import torch

    from slipstream.weights.adapter_folder import adapted_modules, adapter_parameter, read_adapter_tensors, renamed
    from slipstream.weights.model_files import stored_parameters

    tensors = read_adapter_tensors(adapter)
    for name, tensor in tensors.items():
        if not bool(torch.isfinite(tensor).all()):
            raise ConfigError(f"the adapter in {adapter} has numbers that are not finite in {name}: name another step")
    shapes = {each.name.removesuffix(".weight"): each.shape for each in stored_parameters(model, "float32")}
    for module, known in renamed(adapted_modules(tensors), shapes).items():
        first, second = (tensors.get(adapter_parameter(module, half)) for half in ("A", "B"))
        wanted = shapes.get(known)
        if first is None or second is None or wanted is None or len(wanted) != 2:
            continue
        if (there := (second.shape[0], first.shape[1])) != tuple(wanted):
            raise ConfigError(
                f"the adapter in {adapter} has {module} of shape {list(there)}, and its base {model} has "
                f"{list(wanted)}: name the base that it was trained on"
            )


def _settled(store: Store, registry: Registry, found: _Found, options: Options) -> ServerSpec:
    """The server for a deployment, new or as it is. Raises ConfigError if the two contradict."""
    record = found.record
    spec = registry.spec(record.server)
    others = [each.name for each in registry.all() if each.server == record.server and each.name != record.name]
    if spec is not None:
        problem = _contradiction(spec, found, options)
        if not problem:
            return spec
        if others:
            raise ConfigError(f"{problem}: first slipstream undeploy {' '.join(others)}")
    gpus, share = _gpu(store, options.gpu_memory_utilization)
    room = options.room or DEFAULT_ROOM
    if room < 1 or not 0 < share <= 1:
        raise ConfigError(f"--room {room} and --gpu-memory-utilization {share:g} serve nothing: use more")
    serve = ServeOptions(
        name=record.served if record.kind == "model" else record.server,
        max_model_len=options.max_model_len,
        gpu_memory_utilization=share,
        trust_remote_code=bool(found.deployable.run_settings.get("model.trust_remote_code")),
    )
    arguments, max_rank = _arguments(found, serve, room)
    return ServerSpec(
        key=record.server,
        model=found.deployable.model,
        base=record.base,
        arguments=tuple(arguments),
        options=Options(room, options.max_model_len, share),
        max_rank=max_rank,
        with_tower=found.with_tower,
        context=int(arguments[arguments.index("--max-model-len") + 1]),
        gpus=gpus,
    )


def _arguments(found: _Found, options: ServeOptions, room: int) -> tuple[list[str], int]:
    """vLLM's arguments, and the largest rank of the server's adapters."""
    from slipstream.commands.serve import max_rank_for, vllm_arguments

    base = dataclasses.replace(found.deployable, adapter=None)
    arguments = [*vllm_arguments(base, {}, options), "--disable-uvicorn-access-log"]
    if found.record.kind == "model":
        return arguments, 0
    max_rank = max_rank_for(found.record.rank)
    values = {"max-lora-rank": max_rank, "max-loras": room, "max-cpu-loras": room}
    arguments += ["--enable-lora", *(part for name, value in values.items() for part in (f"--{name}", str(value)))]
    return arguments + (["--enable-tower-connector-lora"] if found.with_tower else []), max_rank


def _contradiction(spec: ServerSpec, found: _Found, options: Options) -> str:
    """Why a server cannot take a deployment; empty if it can."""
    record = found.record
    server = f"the server of {spec.base}"
    if record.kind == "adapter" and record.rank > spec.max_rank:
        return f"the adapter of {record.name} has rank {record.rank}, and {server} takes {spec.max_rank} at most"
    if found.with_tower and not spec.with_tower:
        return f"the adapter of {record.name} has layers of a vision tower, and {server} takes none"
    for name in options.__struct_fields__:
        wanted, there = getattr(options, name), getattr(spec.options, name)
        if wanted is not None and wanted != there:
            return f"--{name.replace('_', '-')} {wanted:g} was asked for, and {server} has {there}"
    return ""


def _gpu(store: Store, share: float | None) -> tuple[tuple[str, ...], float]:
    """The GPU with the most free memory, and the share of its memory. Raises ConfigError for a full one."""
    from slipstream.service.runs import LocalRuns

    places = [each for each in LocalRuns(store).places() if each.place != "cpu"]
    if not places:
        return (), share or _GPU_MEMORY
    best = max(places, key=lambda each: each.free_gib)
    there = best.free_gib / best.total_gib
    if share is not None and share > there:
        raise ConfigError(
            f"--gpu-memory-utilization {share:g} of {best.place} is {share * best.total_gib:.1f} GiB, and "
            f"{best.free_gib:.1f} GiB are free: use less, or wait for a run"
        )
    return (best.place,), share or round(min(_GPU_MEMORY, there * _SPARE), 3)


def _copy(source: Path, folder: Path, served: str) -> None:
    """Copy an adapter below its name, if it is not there."""
    if adapter_named(folder, served) is not None:
        return
    new = folder / f".new-{os.getpid()}"
    shutil.rmtree(new, ignore_errors=True)
    shutil.rmtree(folder / served, ignore_errors=True)
    new.mkdir(parents=True, mode=0o700)
    for name in FILES:
        shutil.copyfile(source / name, new / name)
    new.rename(folder / served)
    if adapter_named(folder, served) is None:
        shutil.rmtree(folder / served, ignore_errors=True)
        raise ConfigError(f"the files of the adapter in {source} changed while they were copied: deploy it again")


def main() -> None:
    """Answer the first argument, in the file of the second."""
    from slipstream.processes import lifeline

    lifeline.Parent()
    try:
        answer = Answer(make(Store(), msgspec.json.decode(sys.argv[1], type=Asked)).name)
    except SlipstreamError as error:
        answer = Answer(error=str(error))
    Path(sys.argv[2]).write_bytes(msgspec.json.encode(answer))


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
