"""The teacher of a run: the checks before it starts, its engine, and what says that it teaches nothing.

Guarantees: an engine of ours serves the very weights of `teacher.path`, proved by the fingerprints of its files
whenever it starts; nothing ever updates it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from slipstream.config import PlannedConfig, RunConfig
from slipstream.config.traits import starts_teacher
from slipstream.errors import ConfigError
from slipstream.inference.settings import EngineSettings
from slipstream.launch.engines import EngineMaker, EnginePlan, RunEngine
from slipstream.launch.plan.memory.teacher import STEP_TOKENS, TeacherMemory
from slipstream.orchestrator.teacher import EngineSource, ServerSource, Source, Teacher
from slipstream.records import ParameterSpec, Rollout, Version
from slipstream.runlog import RunLog

if TYPE_CHECKING:
    from slipstream.data.chat_template import ChatTokenizer
    from slipstream.launch.prepare import Prepared
    from slipstream.weights.base import NamedWeights

_TEXT = "A teacher reads what was written: 12 + 30.5 = 42.5, äöü, 你好!\n"


class Messages(Protocol):
    """The terminal, as far as it is told something here."""

    def message(self, text: str, level: Any = "info") -> None:
        """Something worth reading."""
        ...


class RunTeacher:
    """The teacher as a run owns it. With `teacher.path` an engine process, with `teacher.url` a server elsewhere."""

    def __init__(
        self,
        config: PlannedConfig,
        room: TeacherMemory | None,
        tokenizer: ChatTokenizer,
        log: RunLog,
        logs: Path,
        make_engine: EngineMaker,
    ) -> None:
        assert config.teacher is not None
        self._config, self._teacher, self._tokenizer, self._log = config, config.teacher, tokenizer, log
        self.digest = ""
        """Of the weights that its engine serves; empty for a server elsewhere."""
        self._engine: RunEngine | None = None
        self._teacher_now: Teacher | None = None
        self._server: ServerSource | None = None
        if room is None:
            return

        def on_event(kind: str, **fields: object) -> None:
            log.event(kind.replace("engine", "teacher"), **fields)

        settings = _settings(config, room)
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
        """Begin to start."""
        if self._engine is not None:
            self._engine.launch()

    async def start(self) -> None:
        """Wait until it can score."""
        self._teacher_now = Teacher(await self._source())

    async def score(self, rollout: Rollout) -> None:
        """See `orchestrator.teaching.Teacher`."""
        assert self._teacher_now is not None, "no rollout is made before everything has started"
        await self._teacher_now.score(rollout)

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

    def refuse_itself(self, weights: Callable[[], NamedWeights]) -> None:
        """Raises ConfigError when the policy starts with the very `weights` of the teacher, and nothing else teaches
        it."""
        from slipstream.weights.fingerprint import describe, digest

        algorithm = self._config.algorithm
        if not self.digest or algorithm.kind == "sft" or algorithm.advantage != "none":
            return
        if digest(describe(weights())) == self.digest:
            raise ConfigError(
                f'teacher.path = "{self._teacher.path}" holds the very weights that the run starts from, so that there '
                "is nothing to learn: give another teacher"
            )

    async def stop(self) -> None:
        """Stop for good."""
        if self._server is not None:
            await self._server.close()
        if self._engine is not None:
            await self._engine.stop()

    def kill(self) -> None:
        """The same at once, from any thread."""
        if self._engine is not None:
            self._engine.kill()


def launch_teacher(
    prepared: Prepared, folder: Path, log: RunLog, progress: Messages, make_engine: EngineMaker
) -> RunTeacher:
    """The teacher of a run in `folder`, which begins to start."""
    config, plan = prepared.config, prepared.plan
    teacher = RunTeacher(config, plan.teacher, prepared.tokenizer, log, folder / "logs", make_engine)
    teacher.launch()
    log.listen(agreement_warning(log, lambda text: progress.message(text, "warning")))
    return teacher


def check_teacher(config: RunConfig, tokenizer: ChatTokenizer) -> None:
    """Raises ConfigError for a model folder that cannot be this policy's teacher: before anything is started."""
    from slipstream.launch.preflight.model_folder import check_model

    if config.teacher is None or not starts_teacher(config):
        return
    model = config.model.model_copy(update={"path": config.teacher.path})
    try:
        check_model(model, packing=False)
    except ConfigError as error:
        raise ConfigError(str(error).replace("model.path", "teacher.path")) from error
    try:
        problem = tokenizer.differs_from(model.path, model.trust_remote_code)
    except (OSError, ValueError) as error:
        reason = str(error).strip().split("\n")[0]
        raise ConfigError(
            f"teacher.path = {model.path}: no tokenizer can be loaded ({reason}): give a model folder or a hub id"
        ) from error
    if problem:
        raise ConfigError(
            f"teacher.path has another tokenizer than model.path ({problem}), and a teacher scores the very tokens of "
            "its student: use a teacher of the same family"
        )


def agreement_warning(log: RunLog, tell: Callable[[str], None]) -> Callable[[int, Mapping[str, float | None]], None]:
    """Listens to the rows of metrics: once, says that teacher and policy are no further apart than the two ways of
    computing one of them are."""
    said = False

    def listener(step: int, row: Mapping[str, float | None]) -> None:
        nonlocal said
        apart, noise = row.get("teacher/abs_difference"), row.get("probe/abs_logprob_diff")
        if said or apart is None or noise is None or apart > 2 * noise:
            return
        said = True
        text = (
            f"teacher and policy differ by {apart:.2g} per token in step {step}, and engine and trainer by {noise:.2g} "
            "on one and the same policy: the teacher has nothing more to teach"
        )
        log.warning(text, step=step)
        tell(text)

    return listener


def _settings(config: PlannedConfig, room: TeacherMemory) -> EngineSettings:
    from slipstream.trainer.model.policy import DTYPES, resolve_folder
    from slipstream.weights.fingerprint import describe, digest
    from slipstream.weights.model_files import read_model_folder

    assert config.teacher is not None
    assert config.teacher.path is not None
    folder, dtype = resolve_folder(config.teacher.path), DTYPES[config.model.dtype]
    parameters: tuple[ParameterSpec, ...] = ()
    for name, tensor in read_model_folder(folder):  # one at a time: a teacher may be large
        parameters += describe([(name, tensor.to(dtype) if tensor.is_floating_point() else tensor)])
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return EngineSettings(
        model=str(folder),
        socket="",
        dtype=config.model.dtype,
        max_model_len=room.max_model_len,
        max_num_seqs=room.max_num_seqs,
        seed=config.run.seed,
        # No decoding: graphs and compilation have nothing to gain.
        enforce_eager=True,
        kv_cache_bytes=room.cache,
        gpu_memory_utilization=room.gpu_memory_utilization,
        gpus=() if room.gpu is None else (_gpu_name(room.gpu, visible),),
        fp32_head=config.model.fp32_head,
        trust_remote_code=config.model.trust_remote_code,
        threads=config.run.threads if room.gpu is None else None,
        version=Version(0, 0, digest(parameters)),
        parameters=parameters,
        patches=config.inference.patches,
        options={"max_num_batched_tokens": STEP_TOKENS},
    )


def _gpu_name(number: int, visible: str | None) -> str:
    """As CUDA_VISIBLE_DEVICES names it."""
    return [name.strip() for name in visible.split(",")][number] if visible else str(number)
