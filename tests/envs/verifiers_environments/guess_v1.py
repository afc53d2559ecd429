"""An environment of verifiers.v1 (0.4): a taskset, a harness, and an environment that answers between turns."""

import httpx
import verifiers.v1 as vf
from openai import AsyncOpenAI, OpenAIError
from verifiers.v1.runtimes import ProgramResult


class GuessData(vf.TaskData):
    answer: str


class GuessConfig(vf.TasksetConfig):
    size: int = 40
    offset: int = 0


class GuessTask(vf.Task[GuessData, vf.State, vf.TaskConfig]):
    @vf.reward(weight=2.0)
    async def right(self, trace) -> float:
        if trace.last_reply == "boom":
            raise KeyError("a reward that raises")
        return float(trace.last_reply == self.data.answer)

    @vf.metric
    async def turns(self, trace) -> float:
        return float(trace.num_turns)


class GuessTaskset(vf.Taskset[GuessTask, GuessConfig]):
    def load(self):
        for n in range(self.config.offset, self.config.offset + self.config.size):
            yield GuessTask(
                GuessData(prompt=f"Guess {n}", system_prompt="Be brief.", answer=str(n % 7)), self.config.task
            )


class GuessHarness(vf.Harness[vf.HarnessConfig]):
    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, **_):
        system, prompt = self.resolve_prompt(data)
        messages = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages += [
                {"role": message.role, "content": message.content}
                for message in prompt or []
                if not (system and message.role == "system")
            ]
        http = httpx.AsyncClient(verify=False, timeout=60)  # without certificates, which take long to read
        async with AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0, http_client=http) as client:
            try:
                await client.chat.completions.create(model=ctx.model, messages=messages)
            except OpenAIError as error:
                return ProgramResult(exit_code=1, stdout="", stderr=str(error))
        return ProgramResult(exit_code=0, stdout="", stderr="")


class GuessEnvConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig(max_turns=3)


class GuessEnv(vf.Env[GuessEnvConfig]):
    async def run(self, task, agents):
        async with agents.player.interaction(task) as interaction:
            segment = await interaction.turn()
            while not segment.terminated and segment.last_reply not in (task.data.answer, "boom"):
                segment = await interaction.turn("No. Again.")


__all__ = ["GuessEnv", "GuessHarness", "GuessTaskset"]
