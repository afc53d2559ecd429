"""An agent on the package `openai-agents`, which has an interpreter of its own; its requests are OpenAI's responses."""

import json
import os
import sys

import arithmetic
from agents import Agent, Runner, function_tool, set_tracing_disabled
from agents.exceptions import AgentsException

set_tracing_disabled(True)  # it would send them to its maker
question = json.load(sys.stdin)["prompt"][-1]["content"]
tool = function_tool(arithmetic.calc)
agent = Agent("solver", tools=[tool], model=os.environ["OPENAI_MODEL"])
try:
    print(Runner.run_sync(agent, question, max_turns=4).final_output)
except AgentsException as error:  # too many turns, say
    print(f"no answer: {error}")
