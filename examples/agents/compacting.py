"""An agent with a sub-agent: another conversation reads the tool's result. Then a short history replaces the long one.
The agent asks for another temperature; the run overrides it."""

from arithmetic import TOOL
from chat import run, shared


async def solve(task, policy):
    client = shared.with_options(base_url=policy.base_url, api_key=policy.api_key)

    async def ask(text, **options):
        messages = [{"role": "user", "content": text}]
        reply = await client.chat.completions.create(model=policy.model, messages=messages, **options)
        return reply.choices[0].message

    question = task.prompt[-1].content
    message = await ask(question, tools=[TOOL], temperature=0.2)
    if not message.tool_calls:
        return message.content
    report = await ask(f"Read: {run(message.tool_calls[0].function)}")
    return (await ask(f"{question} Found: {report.content}")).content
