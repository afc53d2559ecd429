"""Programs on a session: `python -m tests.system.loops NAME RUN_FILE FOLDER [ARGUMENT]`."""

import asyncio
import json
import sys
import time
from pathlib import Path

import slipstream
from slipstream.errors import ConfigError

from . import own_losses


def order_of_a_run(run_file, folder, steps="6"):
    """The order of `slipstream train`."""
    with slipstream.session(run_file, folder=folder, steps=int(steps)) as s:
        s.evaluate()
        while s.step < int(steps):
            s.train(s.rollouts())
            s.sync()
        s.evaluate()
        s.save()


def chosen_losses(run_file, folder):
    """Groups that are left out, tasks of the caller's, losses of his, and what is refused."""
    refused = []
    with slipstream.session(run_file, folder=folder, steps=4, evaluation=False) as s:
        before = s.forward(s.rollouts()[:1]).logprobs[0].tolist()  # three groups are not trained on
        groups = s.rollouts([{"prompt": "say it", "answer": "a", **s.tasks[0].info}, s.tasks[1]], n=3)
        sizes = [len(group) for group in groups]
        names = sorted({rollout.group_id for group in groups for rollout in group})
        s.train(groups, own_loss)
        try:
            s.rollouts()
        except ConfigError as error:
            refused.append(str(error))
        s.sync()
        group = s.rollouts(s.tasks[:1], n=4)
        s.train([group[0][0].sequences[0]], "sft")
        for bad in (no_gradient, raises, "no_such_loss", 3):
            try:
                s.train(group, bad)
            except ConfigError as error:
                refused.append(str(error))
        s.sync()
        advantages = s.credit(s.rollouts(n=2))
        s.state["seen"] = [len(advantages), s.step]
        weights = s.save()
    print(json.dumps({"logprobs": before, "sizes": sizes, "names": names, "refused": refused, "weights": str(weights)}))


def stream_in_two_parts(run_file, folder, last="2"):
    """Batches made ahead of training, up to a step; it goes on where the folder is."""
    with slipstream.session(run_file, folder=folder, steps=4, training={"staleness": 1}, evaluation=False) as s:
        begun, known = s.resume(), dict(s.state)
        for groups in s.stream():
            s.train(groups)
            s.sync()
            if s.step == int(last):
                break
        s.state["step"] = s.step
        s.save()
    print(json.dumps({"begun": begun, "known": known}))


def own_loss(inputs):
    return -(inputs.advantages_N + 0.1) * inputs.logprobs_N


def no_gradient(inputs):
    return inputs.logprobs_N.detach()


def raises(inputs):
    return inputs.logprobs_N / inputs.none


def caller_fails(run_file, folder):
    """An exception of the caller's, while a group waits."""
    with slipstream.session(run_file, folder=folder) as s:
        s.rollouts()
        Path(f"{folder}.ready").touch()
        raise KeyError("the caller's own")


def nan_at_step(run_file, folder, step="2"):
    """A loss that is wrong from a step on."""
    with slipstream.session(run_file, folder=folder) as s:

        def late(inputs):
            return inputs.logprobs_N * (float("nan") if s.step >= int(step) and len(inputs.logprobs_N) > 0 else 1.0)

        while True:
            groups = s.rollouts()
            for group in groups:
                for place, rollout in enumerate(group):
                    rollout.reward = float(place % 2)
            s.train(groups, late)
            s.sync()


def by_coroutines(run_file, folder):
    """The same calls with `async with`, while the event loop goes on."""

    async def main():
        ticks = 0

        async def tick():
            nonlocal ticks
            while True:
                ticks += 1
                await asyncio.sleep(0.01)

        ticking = asyncio.create_task(tick())
        async with slipstream.session(run_file, folder=folder, steps=2) as s:
            while s.step < 2:
                await s.train(await s.rollouts())
                await s.sync()
            await s.save()
        ticking.cancel()
        return ticks

    print(json.dumps({"ticks": asyncio.run(main())}))


def waits(run_file, folder):
    """Until somebody ends it."""
    with slipstream.session(run_file, folder=folder) as s:
        s.rollouts()
        Path(f"{folder}.ready").touch()
        time.sleep(600)


def on_two_ranks(run_file, folder):
    """A loss of a file, and one of the program."""
    settings = {"training": {"ranks": 2}, "run": {"threads": 2}, "evaluation": False}
    refused = ""
    with slipstream.session(run_file, folder=folder, steps=2, **settings) as s:
        s.train(s.rollouts(), f"{Path(__file__).with_name('own_losses.py')}:half")
        s.sync()
        groups = s.rollouts()
        try:
            s.train(groups, own_loss)
        except ConfigError as error:
            refused = str(error)
        s.train(groups, own_losses.half)
        s.save()
    print(json.dumps({"refused": refused}))


if __name__ == "__main__":
    name, *arguments = sys.argv[1:]
    globals()[name](*arguments)
