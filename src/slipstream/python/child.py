"""The process that a Python call runs in: `python -m slipstream.python.child `.

It reads one `Call` and writes one `Outcome`, as msgpack. It ends with its caller.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from slipstream.config import load_settings
from slipstream.config.python_objects import give
from slipstream.errors import Interrupted, SlipstreamError, StartsAgain
from slipstream.processes import lifeline
from slipstream.processes.exits import leave
from slipstream.python.protocol import Call, Outcome
from slipstream.records import Rollout, without_surrogates
from slipstream.runlog import sample_of
from slipstream.runlog.redaction import hide_userinfo

_OF_A_RUN = ("step", "version", "sequences")

if TYPE_CHECKING:
    from slipstream.progress import Progress


def main() -> None:
    """Read the call, carry it out, write the outcome, and end."""
    parent = lifeline.Parent()

    def tell(outcome: Outcome) -> None:
        parent.send(msgspec.msgpack.encode(outcome))

    outcome = _carry_out(msgspec.msgpack.decode(parent.receive(), type=Call), lambda error: tell(_failed(error)))
    tell(outcome)
    leave(outcome.exit_code)


def _failed(error: SlipstreamError) -> Outcome:
    return Outcome(error=type(error).__name__, message=hide_userinfo(str(error)), exit_code=error.exit_code)


def _carry_out(call: Call, last_words: Callable[[SlipstreamError], None]) -> Outcome:
    try:
        for item in call.objects:
            give(item)
        algorithm = "sft" if call.command == "sft" else None
        loaded = load_settings(call.settings, algorithm=algorithm)
        if call.command == "evaluate":
            from slipstream.commands.evaluate import evaluate_model
            from slipstream.launch.prepare import prepare

            found = evaluate_model(prepare(loaded), _progress(call))
            return Outcome(found.metrics(), [_sample(rollout) for rollout in found.rollouts])
        from slipstream.launch.start import run_training

        _, summary = run_training(
            loaded,
            "run",
            resume=call.resume,
            make_progress=lambda: _progress(call),
            last_words=last_words,
            owns_process=True,
        )
        return Outcome(summary)
    except StartsAgain:
        return Outcome(again=True)
    except SlipstreamError as error:
        return _failed(error)
    except KeyboardInterrupt:
        return Outcome(error="Interrupted", message="interrupted", exit_code=Interrupted.exit_code)


def _sample(rollout: Rollout) -> dict[str, Any]:
    """As in `samples.jsonl`, without what says which step and tokens of a run it is of."""
    whole = msgspec.to_builtins(sample_of(rollout, 0, ""))
    return without_surrogates({name: value for name, value in whole.items() if name not in _OF_A_RUN})


def _progress(call: Call) -> Progress:
    from slipstream.view import make_view

    return make_view(call.view)


if __name__ == "__main__":
    main()
