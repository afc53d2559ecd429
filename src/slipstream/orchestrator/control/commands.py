"""Commands of the trainer to the generating side, and its answers: records, also if both share a process.

A command is answered once, or fails. `executor.py` carries commands out; a `Caller` (`handle.py`) brings them there,
within the process or over transports (`remote.py`).
"""

from __future__ import annotations

from typing import Any

import msgspec

from slipstream.orchestrator.evaluate import Evaluation
from slipstream.records import ApplyReport, Batch, ParameterSpec, Rollout, Sequence, Task, Ticket, Version
from slipstream.weights.bridges.single_copy import SharedWeights


class Command(msgspec.Struct, frozen=True, tag=True):
    """Base of all commands."""


class Start(Command, frozen=True):
    """Wait until engine, reward workers and teacher are ready; sent before the first update, and before an engine
    shares its weights. Another one is answered at once."""


class OpenLedger(Command, frozen=True):
    """Open the ledger of an attempt from step `first` on."""

    first: int


class MakeBatches(Command, frozen=True):
    """Make the batches of the steps from `first` to `num_steps` - 1; answered after the last one."""

    first: int
    num_steps: int
    draws: dict[str, Any] = {}
    """State of `Draws`: the draws of the task order used up before."""
    changes: list[tuple[int, list[float]]] = []
    """Changes of a mixture's weights so far: (first step of the order of the tasks, weights)."""


class MakeBatch(Command, frozen=True):
    """Make one batch for `step`, of these tasks, or of the run's own if there are none; answered by `Made`. Its groups
    are ready then, and `Settle` says how they end. It begins once version `oldest` is released, and after the batch of
    the previous command."""

    step: int
    oldest: int
    tasks: list[Task] = []
    group_size: int = 0
    """Rollouts of a task; 0: `algorithm.group_size`."""
    first: int = 0
    """Number of groups of this step asked for before."""


class Settle(Command, frozen=True):
    """Groups were trained on at `step` - 1, or will not be."""

    step: int
    trained: list[str]
    unused: list[str]


class Apply(Command, frozen=True):
    """Have the engine take a version and prove it; answered by `Applied`."""

    ticket: Ticket


class SampleProbe(Command, frozen=True):
    """Sample the probe from the version applied last; answered by `Probed`."""


class Fence(Command, frozen=True):
    """Pause the engine until the next `Apply`: its weights are about to be written in place."""


class Begin(Command, frozen=True):
    """Pause the engine as `Fence` does, and begin the batch of `step`: its requests wait in the engine for the next
    version, and so does the probe."""

    step: int


class GoOn(Command, frozen=True):
    """Compute with the weights written since the fence, as `version`."""

    version: Version
    timeout_s: float


class Release(Command, frozen=True):
    """Rollouts may be made with version `step`; `saved_step` is the step of the newest whole checkpoint."""

    step: int
    saved_step: int = 0
    change: tuple[int, list[float]] | None = None
    """A further change of a mixture's weights, see `MakeBatches`."""


class Evaluate(Command, frozen=True):
    """Evaluate version `step`, the one applied last; answered by `Evaluated`. `beside`: on one engine of several; it
    takes no other version until then, and the others go on."""

    step: int
    beside: bool = False


class RollOut(Command, frozen=True):
    """Make one rollout of each of these training tasks by version `step`, the one applied last, at `temperature`;
    answered by `RolledOut`. Seeds count from `seed`."""

    step: int
    items: list[int]
    seed: int
    temperature: float = 0.0


class AskHeld(Command, frozen=True):
    """Ask for the engine's verified version; answered by `Held`."""


class AskJoined(Command, frozen=True):
    """Wait until all of the engine's workers run; answered by `Joined`."""


class AskState(Command, frozen=True):
    """Ask if the engine runs; with `settles`, a dying one gets a moment to end. Answered by `EngineState`."""

    settles: bool = False


class AskTeacher(Command, frozen=True):
    """The digest of the teacher's weights; answered by `TeacherDigest`."""


class Share(Command, frozen=True):
    """Ask for handles of the engine's live weights; answered by `Shared`, or by `NotShared` with the problem."""

    parameters: tuple[ParameterSpec, ...]
    timeout_s: float


class Sleep(Command, frozen=True):
    """Free the engine's GPU memory."""

    timeout_s: float


class Wake(Command, frozen=True):
    """Take the engine's GPU memory back."""

    timeout_s: float


class Leave(Command, frozen=True):
    """Have the engines leave the process group of the weight broadcast: the trainer is about to end it."""

    timeout_s: float


class Close(Command, frozen=True):
    """The run ends, with the batches of steps before `step` trained on; answered when nothing is left to be written."""

    step: int
    reason: str = ""
    """Why, in a sentence."""


AnyCommand = (
    Start
    | OpenLedger
    | MakeBatches
    | MakeBatch
    | Settle
    | Apply
    | SampleProbe
    | Fence
    | Begin
    | GoOn
    | Release
    | Evaluate
    | RollOut
    | AskHeld
    | AskJoined
    | AskState
    | AskTeacher
    | Share
    | Sleep
    | Wake
    | Leave
    | Close
)


class Answer(msgspec.Struct, frozen=True, tag=True):
    """Base of all answers."""


class Done(Answer, frozen=True):
    """The command was carried out."""


class Made(Answer, frozen=True):
    """The batch for `MakeBatch`."""

    batch: Batch


class Applied(Answer, frozen=True):
    """The engine holds the version."""

    report: ApplyReport
    metrics: dict[str, float] = {}
    """Metrics of several engines since the last update."""


class Probed(Answer, frozen=True):
    """The sequences of the probe."""

    sequences: list[Sequence]


class Evaluated(Answer, frozen=True):
    """Results on the held-out tasks."""

    evaluation: Evaluation


class RolledOut(Answer, frozen=True):
    """One rollout for each item in order, with any outcome."""

    rollouts: list[Rollout]


class Held(Answer, frozen=True):
    """The engine's verified version; None without one."""

    version: Version | None


class Joined(Answer, frozen=True):
    """How often workers were replaced."""

    count: int


class Shared(Answer, frozen=True):
    """One for each worker."""

    workers: tuple[SharedWeights, ...]


class NotShared(Answer, frozen=True):
    """Why a living engine cannot share its weights."""

    problem: str


class EngineState(Answer, frozen=True):
    """See `RunEngine`."""

    is_up: bool
    is_in_memory_only: bool
    wants_weights: bool = False


class TeacherDigest(Answer, frozen=True):
    """The digest of the teacher's weights; empty without a teacher, or if a server is the teacher."""

    digest: str


AnyAnswer = (
    Done
    | Made
    | Applied
    | Probed
    | Evaluated
    | RolledOut
    | Held
    | Joined
    | Shared
    | NotShared
    | EngineState
    | TeacherDigest
)
