"""A training loop with stand-ins around it: for tests of what it decides, in which order, and what it writes down."""

import contextlib
import dataclasses
from pathlib import Path
from types import SimpleNamespace

import torch

from slipstream import records
from slipstream.config import RunConfig
from slipstream.errors import ZeroGradientError
from slipstream.plan.decided import planned_config
from slipstream.trainer.checkpoints.checkpoint import CheckpointStore
from slipstream.trainer.checkpoints.manifest import Identity
from slipstream.trainer.checkpoints.resumed import Resumed, load_resumed
from slipstream.trainer.checkpoints.writer import create_writer
from slipstream.trainer.evaluations import nothing
from slipstream.trainer.learner import Scores
from slipstream.trainer.loop import TrainingLoop
from slipstream.trainer.optim.base import OptimStats

SAMPLING = records.SamplingParams(max_tokens=4)
OURS = -0.5
"""The trainer's log-probability of every token."""


def planned(kind="grpo", **sections):
    """A planned configuration of three steps; `sections` add to its own."""
    own = {
        "model": {"path": "m"},
        "algorithm": {"kind": kind},
        "training": {"steps": 3, "learning_rate": 0.5, "prompts_per_batch": 2},
        "weights": {"probe_warn": 0.25, "probe_stop": 1.0},
        "run": {"checkpoint_every": 100, "keep_batches": 0},
        "evaluation": None,
    }
    own |= {"data": {"path": "d"}} if kind == "sft" else {"environment": {"name": "reasoning_gym/spell_backward"}}
    for name, values in sections.items():
        own[name] = (own.get(name) or {}) | values
    return planned_config(RunConfig.model_validate(own))


def sequence(logprob=OURS, size=2, ids=(1,)):
    """A prompt, `ids`, and `size` sampled tokens."""
    none = [0.0] * len(ids)
    return records.Sequence([*ids, *range(2, 2 + size)], [False for _ in ids] + [True] * size, none + [logprob] * size)


def batch_of(step, *groups, version=None, outcome="done", **fields):
    """A batch whose groups have these rewards; version `version`, of the step itself if left out."""
    rollouts = [
        records.Rollout(f"{step}.{g}.{i}", f"t{g}", f"{step}.{g}", [sequence()], reward, outcome)
        for g, rewards in enumerate(groups or ((1.0, 0.0),))
        for i, reward in enumerate(rewards)
    ]
    return records.Batch(step, records.Version(0, step if version is None else version), rollouts, **fields)


class Learner:
    """Counts its steps, and notes what it is asked for in `calls`."""

    def __init__(self, calls):
        self.calls, self.step, self.zero, self.metrics = calls, 0, set(), {"loss": 0.25}
        self.micro_batch_tokens, self.rows, self.steps, self.logprob = 10, [], [], OURS
        self.model = SimpleNamespace(device=torch.device("cpu"), folder=Path("start"))
        self.optimizer = SimpleNamespace(discard_gradients=lambda: calls.append("discard"))

    def forward(self, sequences, sampling=None, *, micro_batch_tokens=None):
        self.rows.append(micro_batch_tokens)
        values = [torch.full((s.num_trainable,), self.logprob) for s in sequences]
        return Scores(values, values)

    def forward_backward(self, batch, objective):
        self.steps.append(batch)
        return dict(self.metrics)

    def optim_prepare(self, rate):
        self.calls.append(f"prepare {rate:g}")
        if len(self.steps) in self.zero:
            raise ZeroGradientError("zero")
        return OptimStats(rate, 0.125, clipped=False, loss_scale=8.0, num_overflows=2)

    def optim_commit(self):
        self.calls.append("commit")
        self.step += 1

    def write_weights(self, folder, source):
        folder.mkdir(parents=True)
        (folder / "weights").write_text(f"{source} {self.step}")
        return ()

    def save(self, folder):
        folder.mkdir()
        (folder / "learner").write_text(str(self.step))

    def load(self, folder):
        self.step = int((folder / "learner").read_text())


class Engine:
    """Draws as the trainer would, but for `differs`, of each sequence of a probe."""

    def __init__(self, calls):
        self.calls, self.differs, self.prompts, self.accuracies = calls, [0.0], [(1,)] * 8, {}
        self.running = None

    def update(self, step):
        self.calls.append(f"update {step}")

    def probe(self):
        return [sequence(OURS + d, ids=ids) for d, ids in zip(self.differs, self.prompts, strict=False)]

    def fence(self):
        self.calls.append("fence")

    def begin(self, step):
        self.calls.append(f"begin the batch of {step}")

    def release(self, step, change=None):
        self.calls.append(f"release {step}" + ("" if change is None else f" {change}"))

    def evaluate(self, step, meanwhile=nothing):
        meanwhile(lambda: False)
        self.calls.append(f"evaluate {step}")
        return {"eval/accuracy": self.accuracies.get(step, 0.0)}

    def begin_evaluation(self, step):
        self.calls.append(f"begin {step}")
        self.running = step

    def take_evaluation(self, *, waits):
        if not waits or self.running is None:
            return None
        step, self.running = self.running, None
        return self.evaluate(step)


class Log:
    """A run's log that only remembers."""

    lineage = 7

    def __init__(self, folder):
        self.folder, self.rows, self.events, self.warnings, self.samples = folder, {}, [], [], []
        self.phases, self.repeated = [], []

    def event(self, kind, **fields):
        self.events.append((kind, fields))

    def warning(self, message, **fields):
        self.warnings.append((message, fields))

    def metrics(self, step, values):
        self.rows[step] = dict(values)
        return {**values, "none": None}

    def add_metrics(self, step, values):
        self.rows[step] = self.rows.get(step, {}) | dict(values)

    def sample(self, record):
        self.samples.append(record)

    @contextlib.contextmanager
    def phase(self, name):
        self.phases.append(name)
        yield

    def repeats(self, name):
        self.repeated.append(name)

    def of(self, kind):
        """The fields of the events of one kind."""
        return [fields for each, fields in self.events if each == kind]


class Progress:
    """What is shown of a run."""

    def __init__(self):
        self.phases, self.steps, self.messages, self.advanced = [], [], [], 0

    def phase(self, name, total=None):
        self.phases.append((name, total))

    def advance(self, n=1):
        self.advanced += n

    def step(self, step, metrics):
        self.steps.append((step, metrics))

    def evaluated(self, step, metrics):
        self.steps.append((step, metrics))

    def message(self, text, level="info"):
        self.messages.append(text)


@dataclasses.dataclass
class Run:
    """A loop, and what is around it."""

    loop: TrainingLoop
    calls: list
    learner: Learner
    engine: Engine
    log: Log
    progress: Progress


def finished(folder, batches=None, **options):
    """A run that has gone through."""
    run = make_run(folder, batches, **options)
    run.loop.run()
    return run


def make_run(
    folder, batches=None, *, config=None, with_engine=True, accuracies=None, after=None, trained_s=0.0, **fields
):
    """`batches`: of every step, by default those with signal. `accuracies`: of evaluations, by step. `after`: the
    checkpoint of an earlier attempt."""
    calls = []
    learner, engine, log, progress = Learner(calls), Engine(calls), Log(folder), Progress()
    engine.accuracies = accuracies or {}

    def take(step):
        calls.append(f"take {step}")
        return batch_of(step) if batches is None else batches[step]

    config, store = config or planned(), CheckpointStore(folder / "checkpoints", keep=5)
    resumed = Resumed()
    if after is not None:
        identity, curriculum = fields.get("identity", Identity()), fields.get("curriculum")
        resumed = load_resumed(store, after, learner, None, identity, curriculum, prompts_per_batch=2)
    loop = TrainingLoop(
        config=config,
        learner=learner,
        objective=SimpleNamespace(ignores_silent=False),
        reader=SimpleNamespace(take=take),
        engine=engine if with_engine else None,
        writer=create_writer(config, store, learner, None, log),
        resumed=dataclasses.replace(resumed, trained_s=trained_s),
        log=log,
        progress=progress,
        sampling=SAMPLING,
        **fields,
    )
    return Run(loop, calls, learner, engine, log, progress)
