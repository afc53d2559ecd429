"""`slipstream orchestrator` and `slipstream engine`: parts of a run in terminals, units or containers of their own."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from slipstream.cli.output import tell

Run = Annotated[Path, Parameter(help="The run folder, which the trainer creates; it may not be there yet.")]
Number = Annotated[int, Parameter(help="Which one of several, from 0 on.")]
Patience = Annotated[float, Parameter(help="Seconds to wait for the trainer, at the start and between two attempts.")]


def orchestrator(run: Run, /, *, number: Number = 0, patience: Patience = 600.0) -> int:
    """Generate the rollouts of a run whose trainer is another command's.

    The run needs run.elsewhere = ["orchestrator"], and run.streams = "files" or "redis". Give its trainer this folder:

        slipstream train grpo.toml --run.folder RUN --run.streams files --run.elsewhere '["orchestrator"]'

    Environment variables, such as a judge's key, are those of this command. It serves one attempt of the run after the
    other, and ends with the exit code of the run. When it is killed, the run goes on from its checkpoint as soon as it
    is started again.
    """
    return _serve(run, "orchestrator", number, patience)


def engine(run: Run, /, *, number: Number = 0, patience: Patience = 600.0) -> int:
    """Serve vLLM for a run whose other parts are other commands'.

    The run needs run.elsewhere = ["engine"]. The engine listens on a private socket in the temporary folder, and so
    shares a host with the run. It serves one attempt of the run after the other, and ends with the run's exit code.
    """
    return _serve(run, "engine", number, patience)


def _serve(run: Path, kind: str, number: int, patience: float) -> int:
    from slipstream.launch.parts.separate import serve_part

    return serve_part(
        Path(run), kind, number, patience_s=patience, say=lambda text: tell(text, file=sys.stderr, flush=True)
    )
