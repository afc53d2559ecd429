"""The teacher of a distillation run: its engine or server, and warnings where policy and teacher are the same.

Guarantees: an engine of this run serves exactly the weights of `teacher.path`, verified by fingerprints of its files
whenever it starts; it is never updated.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from slipstream.config import PlannedConfig
from slipstream.errors import ConfigError
from slipstream.inference.settings import EngineSettings
from slipstream.launch.engines import EngineMaker, EnginePlan, RunEngine
from slipstream.launch.prepare import Prepared
from slipstream.orchestrator.teacher import EngineSource, ServerSource, Source, Teacher
from slipstream.plan.memory.teacher import STEP_TOKENS, TeacherMemory
from slipstream.records import ParameterSpec, Rollout, Version
from slipstream.runlog import EventLog, RunLog

if TYPE_CHECKING:
    from slipstream.data.chat_template import ChatTokenizer
    from slipstream.weights.base import NamedWeights

_TEXT = "A teacher reads what was written: 12 + 30.5 = 42.5, äöü, 你好!\n"


class RunTeacher:
    """Starts, uses and stops the teacher: an engine process for `teacher.path`, or the server at `teacher.url`."""

    def __init__(
        self,
        config: PlannedConfig,
        planned: TeacherMemory | None,
        tokenizer: ChatTokenizer,
        log: EventLog,
        logs: Path,
        make_engine: EngineMaker,
    ) -> None:
        assert config.teacher is not None
        self._config, self._teacher, self._tokenizer, self._log = config, config.teacher, tokenizer, log
        self.digest = ""
        """Digest of the weights that its engine serves; empty for a server."""
        self._engine: RunEngine | None = None
        self._scorer: Teacher | None = None
        self._server: ServerSource | None = None
        if planned is None:
            return

        def on_event(kind: str, **fields: object) -> None:
            log.event(kind.replace("engine", "teacher"), **fields)

        settings = _settings(config, planned)
        assert settings.version is not None
        self.digest = settings.version.digest
        inference = config.inference
        plan = EnginePlan(
            settings,
            start_timeout_s=inference.start_timeout_s,
            request_timeout_s=inference.request_timeout_s,
            max_restarts=inference.max_restarts,
        )
        self._engine = make_engine(plan, logs / "teacher", on_event)

    def launch(self) -> None:
        """Start its engine, if it has one, without waiting."""
        if self._engine is not None:
            self._engine.launch()

    async def start(self) -> None:
        """Wait until the engine or server answers."""
        self._scorer = Teacher(await self._source())

    async def score(self, rollout: Rollout) -> None:
        """See `orchestrator.teacher.Teacher`."""
        assert self._scorer is not None, "no rollout is made before everything has started"
        await self._scorer.score(rollout)

    async def _source(self) -> Source:
        timeout_s = self._config.inference.request_timeout_s
        if self._engine is not None:
            health = await self._engine.wait_ready()
            self._log.event("teacher", digest=self.digest, patches=health.patches, vllm_version=health.vllm_version)
            temperature = self._config.sampling.temperature
            return EngineSource(self._engine, temperature=temperature, timeout_s=timeout_s)
        assert self._teacher.url is not None
        key = os.environ.get(self._teacher.key_variable, "") if self._teacher.key_variable else ""
        if self._teacher.key_variable and not key:
            raise ConfigError(
                f'teacher.key_variable = "{self._teacher.key_variable}" is not set in the environment: set it to the '
                "server's API key, or leave it out"
            )
        server = self._server = ServerSource(self._teacher.url, self._teacher.name, key, timeout_s=timeout_s)
        await server.connect(_TEXT, self._tokenizer.plain_tokens(_TEXT))
        self._log.event("teacher", url=self._teacher.url)
        return server

    async def stop(self) -> None:
        """Stop the engine, or close the connection."""
        if self._server is not None:
            await self._server.close()
        if self._engine is not None:
            await self._engine.stop()

    def kill(self) -> None:
        """Kill the engine at once, from any thread."""
        if self._engine is not None:
            self._engine.kill()


def launch_teacher(prepared: Prepared, folder: Path, log: EventLog, make_engine: EngineMaker) -> RunTeacher:
    """Create the teacher of a run in `folder` and start it, without waiting."""
    config, plan = prepared.config, prepared.plan
    teacher = RunTeacher(config, plan.teacher, prepared.tokenizer, log, folder / "logs", make_engine)
    teacher.launch()
    return teacher


def refuse_itself(config: PlannedConfig, teacher_digest: str, weights: Callable[[], NamedWeights]) -> None:
    """Raise ConfigError when the policy's initial `weights` equal the teacher's, and there is no reward to learn
    from. `teacher_digest`: empty where a server is the teacher."""
    from slipstream.weights.fingerprint import describe, digest

    algorithm = config.algorithm
    if not teacher_digest or algorithm.kind == "sft" or algorithm.advantage != "none":
        return
    assert config.teacher is not None
    if digest(describe(weights())) == teacher_digest:
        raise ConfigError(
            f'teacher.path = "{config.teacher.path}" holds exactly the weights that the run starts from, so '
            "there is nothing to learn: give another teacher"
        )


def agreement_warning(log: RunLog) -> Callable[[int, Mapping[str, float | None]], None]:
    """Return a listener to metrics rows that warns once, when teacher and policy differ no more than engine and trainer
    do on the same policy."""
    warned = False

    def listener(step: int, row: Mapping[str, float | None]) -> None:
        nonlocal warned
        difference, noise = row.get("teacher/abs_difference"), row.get("probe/abs_logprob_diff")
        if warned or difference is None or noise is None or difference > 2 * noise:
            return
        warned = True
        text = (
            f"teacher and policy differ by {difference:.2g} per token in step {step}, and engine and trainer by "
            f"{noise:.2g} on the same policy: the teacher has nothing more to teach"
        )
        log.warning(text, step=step)

    return listener


def _settings(config: PlannedConfig, planned: TeacherMemory) -> EngineSettings:
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
        socket="",
        dtype=config.model.dtype,
        max_model_len=planned.max_model_len,
        max_num_seqs=planned.max_num_seqs,
        seed=config.run.seed,
        # Prefill only: CUDA graphs and compilation gain nothing.
        enforce_eager=True,
        kv_cache_bytes=planned.cache,
        gpu_memory_utilization=planned.gpu_memory_utilization,
        gpus=() if planned.gpu is None else (_gpu_name(planned.gpu, visible),),
        fp32_head=config.model.fp32_head,
        trust_remote_code=config.model.trust_remote_code,
        threads=config.run.threads if planned.gpu is None else None,
        version=Version(0, 0, digest(parameters)),
        parameters=parameters,
        patches=config.inference.patches,
        options={"max_num_batched_tokens": STEP_TOKENS},
    )


def _gpu_name(number: int, visible: str | None) -> str:
    """The GPU's name in CUDA_VISIBLE_DEVICES."""
    return [name.strip() for name in visible.split(",")][number] if visible else str(number)
