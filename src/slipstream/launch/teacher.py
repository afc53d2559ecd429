"""Creates the teacher of a distillation run: its engine by the plan, or the connection to its server."""

from __future__ import annotations

import os
from pathlib import Path

from slipstream.config import PlannedConfig
from slipstream.inference.settings import EngineSettings
from slipstream.launch.engines import EngineMaker, EnginePlan
from slipstream.launch.prepare import Prepared
from slipstream.orchestrator.teacher_engine import RunTeacher
from slipstream.plan.memory.teacher import STEP_TOKENS, TeacherMemory
from slipstream.processes.launchers import gpu_name
from slipstream.records import ParameterSpec, Version
from slipstream.runlog import EventLog


def launch_teacher(prepared: Prepared, folder: Path, log: EventLog, make_engine: EngineMaker) -> RunTeacher:
    """Create the teacher of a run in `folder` and start it, without waiting."""
    config, planned, engine, digest = prepared.config, prepared.plan.teacher, None, ""
    if planned is not None:

        def on_event(kind: str, **fields: object) -> None:
            log.event(kind.replace("engine", "teacher"), **fields)

        settings, inference = _teacher_settings(config, planned), config.inference
        assert settings.version is not None
        digest = settings.version.digest
        plan = EnginePlan(
            settings,
            start_timeout_s=inference.start_timeout_s,
            request_timeout_s=inference.request_timeout_s,
            max_restarts=inference.max_restarts,
        )
        engine = make_engine(plan, folder / "logs" / "teacher", on_event)
    teacher = RunTeacher(config, engine, digest, prepared.tokenizer, log)
    teacher.launch()
    return teacher


def _teacher_settings(config: PlannedConfig, planned: TeacherMemory) -> EngineSettings:
    from slipstream.trainer.model.loading import DTYPES, resolve_folder
    from slipstream.weights.fingerprint import describe, digest
    from slipstream.weights.model_files import read_model_folder

    assert config.teacher is not None
    assert config.teacher.path is not None
    folder, dtype = resolve_folder(config.teacher.path), DTYPES[config.model.dtype]
    parameters: tuple[ParameterSpec, ...] = ()
    for name, tensor in read_model_folder(folder):  # one tensor at a time: a teacher may be large
        parameters += describe([(name, tensor.to(dtype) if tensor.is_floating_point() else tensor)])
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return EngineSettings(
        model=str(folder),
        dtype=config.model.dtype,
        max_model_len=planned.max_model_len,
        max_num_seqs=planned.max_num_seqs,
        seed=config.run.seed,
        # Prefill only: CUDA graphs and compilation gain nothing.
        enforce_eager=True,
        kv_cache_bytes=planned.cache,
        gpu_memory_utilization=planned.gpu_memory_utilization,
        gpus=() if planned.gpu is None else (gpu_name(planned.gpu, visible),),
        fp32_head=config.model.fp32_head,
        trust_remote_code=config.model.trust_remote_code,
        threads=config.run.threads if planned.gpu is None else None,
        version=Version(0, 0, digest(parameters)),
        parameters=parameters,
        patches=config.inference.patches,
        options={
            "max_num_batched_tokens": STEP_TOKENS,
            **({"max_logprobs": config.teacher.top_k} if config.teacher.top_k else {}),
        },
    )
