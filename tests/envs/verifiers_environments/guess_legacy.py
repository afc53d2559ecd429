"""An environment of verifiers up to 0.3: a MultiTurnEnv with a rubric."""

import asyncio
import os
import time

import verifiers as vf
from datasets import Dataset


class Guess(vf.MultiTurnEnv):
    async def env_response(self, messages, state, **kwargs):
        said = messages[-1]["content"]
        if said == state["answer"]:
            state["final_env_response"] = [{"role": "user", "content": "Yes."}]
            return state["final_env_response"]
        if said == "hang":
            time.sleep(1000)
        if said == "sleep":
            await asyncio.sleep(1000)
        if said == "die":
            os._exit(7)
        if said == "raise":
            raise ValueError("an environment that raises")
        return [{"role": "user", "content": "No. Again."}]


def right(completion, answer, **kwargs):
    said = [message["content"] for message in completion if message["role"] == "assistant"]
    if "boom" in said:
        raise KeyError("a reward that raises")
    return float(said[-1] == answer)


async def num_guesses(completion, **kwargs):
    return float(sum(message["role"] == "assistant" for message in completion))


def load_environment(size, offset=0, max_turns=3, held_out=0):
    def rows(first, count):
        numbers = range(first, first + count)
        return Dataset.from_list([{"question": f"Guess {n}", "answer": str(n % 7)} for n in numbers])

    rubric = vf.Rubric(funcs=[right, num_guesses], weights=[2.0, 0.0])
    return Guess(
        dataset=rows(offset, size),
        eval_dataset=rows(10_000, held_out) if held_out else None,
        system_prompt="Be brief.",
        rubric=rubric,
        max_turns=max_turns,
    )
