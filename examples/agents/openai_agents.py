"""An agent on the package `openai-agents`, unchanged but for its model; its requests are OpenAI's responses."""

import arithmetic
from agents import Agent, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
from agents.exceptions import AgentsException
from chat import shared

set_tracing_disabled(True)  # it would send them to its maker
tool = function_tool(arithmetic.calc)


async def solve(task, policy):
    client = shared.with_options(base_url=policy.base_url, api_key=policy.api_key)
    agent = Agent("solver", tools=[tool], model=OpenAIResponsesModel(policy.model, client))
    try:
        return (await Runner.run(agent, task.prompt[-1].content, max_turns=4)).final_output
    except AgentsException as error:  # too many turns, say
        return f"no answer: {error}"
