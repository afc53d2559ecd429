"""The commands `checkpoints` and `push`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from slipstream.cli.output import Json, print_json, print_table, tell


def checkpoints(
    run: Annotated[Path, Parameter(help="Name or folder of a submitted run.")], /, *, json: Json = False
) -> int:
    """List the checkpoints of a submitted run, in its folder and in its store.

    The column `model` is a name for model.path, lora.path, chat, eval, export and push.
    """
    import msgspec

    from slipstream.cli.service import queued_runs

    found = queued_runs().checkpoints(str(run))
    if json:
        print_json(msgspec.to_builtins(found))
    elif not found:
        tell(f"{run} has no whole checkpoint yet")
    else:
        print_table(
            [
                {
                    "model": each.name,
                    "weights": each.weights,
                    "MiB": round(each.size_bytes / (1 << 20), 2),
                    "resume": "yes" if each.can_resume else "no",
                    "best": "best" if each.is_best else "",
                    "where": ", ".join(each.places),
                }
                for each in found
            ]
        )
    return 0


def push(
    run: Annotated[str, Parameter(help="Name or folder of a run, a checkpoint, or run:ID/step-N.")],
    repo: Annotated[str, Parameter(help="Repository on the hub, as owner/name; it is made if it does not exist.")],
    /,
    *,
    step: Annotated[int | None, Parameter(help="Step of the checkpoint; default: the best, or else the last.")] = None,
    public: Annotated[bool, Parameter(negative="", help="Make a new repository public.")] = False,
    json: Json = False,
) -> int:
    """Push the model or adapter of a run to the Hugging Face hub, with a model card.

    The token is in HF_TOKEN, or as stored by `hf auth login`.
    """
    from slipstream.commands.push import push as push_to_hub

    pushed = push_to_hub(run, repo, step=step, is_public=public)
    if json:
        print_json({"repo": pushed.repo, "url": pushed.url, "commit": pushed.commit, "step": pushed.step})
    else:
        tell(f"pushed: {pushed.url} (commit {pushed.commit:.12})")
    return 0
