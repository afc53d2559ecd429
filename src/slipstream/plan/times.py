"""Estimates of the engines' updates and starts on GPUs, by rates measured there (dev/bench/LOG.md), and of whole runs.
Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import msgspec

from slipstream.config import PlannedConfig, RLConfig
from slipstream.config.traits import uses_engine
from slipstream.plan.facts import Facts
from slipstream.plan.memory.sizes import GIB, gib, weights_bytes
from slipstream.plan.summary import Note

FINGERPRINT_RATE, VERIFY_RATE = 1.5e11, 4.3e11
"""Bytes a second of a trainer's and an engine's GPU: a 7B model on H200s, 102 and 35 ms."""
LINK_RATES = {"between GPUs": 3.4e11, "between nodes": 4e10}
"""Bytes a second of `broadcast`: NVLink as measured (44 ms), and four fifths of 400 Gbit/s, not measured."""
DISK_RATES = 1e9, 5.7e9
"""Bytes a second of `disk`, written and read: a 1.5B model, 3.1 and 0.5 s."""
IMPORT_S, GRAPHS_S, LOAD_RATE = 26.0, 3.0, 8.4e8
"""An H200's vLLM: imports, CUDA graphs, and bytes a second of its weights (3.1 GB in 3.7 s)."""
COMPILE_S = 60.0
_COMPILE = "start vLLM: compile"
WARM_S = {"start vLLM: import vLLM": 17.0, _COMPILE: 6.3, "start vLLM: capture graphs": 5.5}
"""Stages of an H200's start with compiled code, and files read, of an earlier one (0.5B, 24 layers)."""
PEAK_FLOPS = {"h100": 9.9e14, "h200": 9.9e14, "b200": 2.2e15, "a100": 3.1e14, "l40s": 3.6e14, "4090": 1.65e14}
"""Bfloat16 products without sparsity, as sold, by a part of the GPU's name."""
SMALL_SHARE, SHARE, SMALL_PARAMETERS = 0.23, 0.47, 1e9
"""Parts of the peak in training on an H200: 0.5B (LoRA 0.22, all parameters 0.25), and 1.5B."""
BATCH_S, DECODE_S, READ_RATE = 0.75, 2.8e-3, 4.3e12
"""Generation on an H200: seconds of a batch, and of a token of all its sequences; bytes a second of the weights.
Measured with 1.5B, 256 sequences of 256 and 512 tokens. 0.5B with LoRA needs 0.9 times as long."""
UPDATE_S, TRAINER_START_S = 0.15, 30.0
SHARED_TIMES = 1.25
"""Two runs on one H200 take that much longer (0.5B, LoRA: 1.22 to 1.31, four runs)."""
_SHARED = f"; {SHARED_TIMES:g} times as long, as another run has the GPU, too"


class Estimate(msgspec.Struct, frozen=True):
    """A run's time and memory, before it starts. A figure is None if nobody knows it."""

    shape: str
    """Runs of one shape take equally long."""
    steps: int
    memory_gib: float
    """The fullest GPU's, or the machine's."""
    gpus: int = 0
    step_s: float | None = None
    rest_s: float | None = None
    """All but the steps: start, evaluations, end."""
    how: str = ""
    is_shared: bool = False
    """Another run has its GPU, too."""

    @property
    def seconds(self) -> float | None:
        """The whole run."""
        return None if self.step_s is None else self.steps * self.step_s + (self.rest_s or 0.0)

    @property
    def gpu_hours(self) -> float | None:
        """GPUs times hours."""
        return None if self.seconds is None else self.seconds * self.gpus / 3600


def estimate_run(config: PlannedConfig, facts: Facts, memory_bytes: int, mean_tokens: float) -> Estimate:
    """Estimate a run with conversations, or prompts and completions, of `mean_tokens` on average."""
    algorithm, device = config.algorithm, facts.gpu_name if facts.num_gpus else f"{facts.num_cpus} cores"
    rollouts = algorithm.group_size if isinstance(algorithm, RLConfig) else 1
    sequences = config.training.prompts_per_batch * rollouts
    lora = config.lora.rank if config.lora else 0
    parts = (algorithm.kind, facts.model.num_parameters, f"lora {lora}", f"{sequences} x {mean_tokens:.0f} tokens")
    shape = ", ".join(map(str, (*parts, config.model.dtype, f"{max(1, facts.num_gpus)} x {device}")))
    known = Estimate(shape, config.training.steps, round(memory_bytes / GIB, 2), facts.num_gpus)
    peak = next((rate for name, rate in PEAK_FLOPS.items() if name in facts.gpu_name.lower()), 0.0)
    if not facts.num_gpus or not peak:
        return msgspec.structs.replace(known, how="no earlier run of this shape, and no known rate of the device")
    share = SMALL_SHARE if facts.model.num_parameters < SMALL_PARAMETERS else SHARE
    num_bytes = weights_bytes(facts.model, config.model.dtype)
    tokens, rest_s, generation_s = sequences * mean_tokens, TRAINER_START_S, 0.0
    if uses_engine(config):  # it starts beside the trainer, and without an earlier run of the shape it compiles
        compile_s = 0.0 if config.inference.enforce_eager else COMPILE_S
        rest_s = max(rest_s, IMPORT_S + GRAPHS_S + compile_s + num_bytes / LOAD_RATE)
    if isinstance(algorithm, RLConfig):
        length = config.sampling.max_tokens
        tokens -= (sequences - config.training.prompts_per_batch) * (mean_tokens - length)  # a group shares its prompt
        turns = math.ceil(sequences / (config.inference.max_num_seqs * config.inference.replicas))
        decode_s = DECODE_S + num_bytes / config.inference.tensor_parallel_size / READ_RATE
        generation_s = BATCH_S + turns * length * decode_s
    training_s = 6.0 * facts.model.num_parameters * tokens / (peak * share * config.training.ranks)
    is_ahead = config.training.staleness > 0 and config.run.placement == "separate"
    step_s = max(training_s, generation_s) if is_ahead else training_s + generation_s
    step_s += UPDATE_S if generation_s else 0.0
    generates = f", {generation_s:.2g} s of generation" if generation_s else ""
    how = f"{share:.0%} of {peak:.2g} FLOP/s in training{generates}; no earlier run of this shape"
    return msgspec.structs.replace(known, step_s=step_s, rest_s=rest_s, how=how)


def first_start_s(start_s: Mapping[str, float]) -> float:
    """Seconds that a start with these stages took as the first on its machine; 0 for one that found compiled code."""
    start_s = {name.replace("vLLM 0:", "vLLM:"): seconds for name, seconds in start_s.items()}
    if start_s.get(_COMPILE, 0.0) < 2 * WARM_S[_COMPILE]:
        return 0.0
    return sum(max(0.0, start_s.get(name, 0.0) - warm_s) for name, warm_s in WARM_S.items())


def corrected(estimate: Estimate, step_s: float, rest_s: float, run: str, memory_gib: float | None = None) -> Estimate:
    """The estimate with the times, and if known the memory, of an earlier run of the same shape."""
    memory_gib = memory_gib or estimate.memory_gib
    how = f"as measured in {run}"
    return msgspec.structs.replace(estimate, step_s=step_s, rest_s=rest_s, memory_gib=memory_gib, how=how)


def shared(estimate: Estimate, *, is_shared: bool = True) -> Estimate:
    """The estimate of a run that shares a GPU with another, or has it alone."""
    if estimate.is_shared == is_shared:
        return estimate
    times = SHARED_TIMES if is_shared else 1 / SHARED_TIMES
    step_s, rest_s = (None if each is None else each * times for each in (estimate.step_s, estimate.rest_s))
    how = estimate.how + _SHARED if is_shared else estimate.how.removesuffix(_SHARED)
    return msgspec.structs.replace(estimate, step_s=step_s, rest_s=rest_s, how=how, is_shared=is_shared)


def engine_time_notes(config: PlannedConfig, facts: Facts) -> Iterator[Note]:
    """Seconds of an update and of a start; nothing on a CPU, whose speed is unknown."""
    if not facts.num_gpus or not uses_engine(config):
        return
    num_bytes, size = weights_bytes(facts.model, config.model.dtype), config.inference.tensor_parallel_size
    if config.weights.bridge in ("broadcast", "disk"):
        checks = num_bytes / config.training.ranks / FINGERPRINT_RATE + num_bytes / size / VERIFY_RATE
        if config.weights.bridge == "broadcast":
            where = "between nodes" if config.cluster.nodes > 1 else "between GPUs"
            moves, how = num_bytes / LINK_RATES[where], f"{LINK_RATES[where] / 1e9:g} GB/s {where}"
            how += " (400 Gbit/s, not measured)" if config.cluster.nodes > 1 else " (NVLink)"
        else:
            writes, reads = DISK_RATES
            moves = num_bytes / writes + num_bytes / reads
            how = f"{writes / 1e9:g} GB/s written and {reads / 1e9:g} GB/s read"
        yield _note("update", checks + moves, f"{gib(num_bytes)} at {how}; fingerprints {checks:.2g} s")
    how = f"import {IMPORT_S:g} s, {gib(num_bytes)} at {LOAD_RATE / 1e9:g} GB/s, graphs {GRAPHS_S:g} s"
    seconds = IMPORT_S + num_bytes / LOAD_RATE + GRAPHS_S
    yield _note("start of vLLM", seconds, f"{how}; the first one also compiles, for about {COMPILE_S:g} s")


def _note(name: str, seconds: float, how: str) -> Note:
    return Note(name, float(f"{seconds:.2g}"), "s", how)
