"""An environment on `atroposlib` alone: say the letter a. Of each answer the part of a's is the score.

`--env.sizes '[3, 5]'` makes groups of these sizes in turn. It runs with an interpreter that has atroposlib.
"""

import os
import random

from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig


class LetterConfig(BaseEnvConfig):
    max_tokens: int = 8
    sizes: str = ""
    fields: str = ""


class Letter(BaseEnv):
    name = "letter"
    env_config_cls = LetterConfig

    @classmethod
    def config_init(cls):
        env = LetterConfig(use_wandb=False, max_batches_offpolicy=1, wandb_name="letter", steps_per_eval=0)
        return env, [APIServerConfig(server_type="vllm", model_name="model", num_max_requests_at_once=64)]

    async def setup(self):
        self.number = 0
        self.sizes = [int(size) for size in self.config.sizes.split(",") if size] or [self.config.group_size]

    async def get_next_item(self):
        self.number += 1
        return {"prompt": f"say {self.number % 7}", "size": self.sizes[self.number % len(self.sizes)]}

    async def ask(self, prompt, size, split="train"):
        async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
            await managed.chat_completion(
                messages=[{"role": "user", "content": prompt}],
                n=size,
                max_tokens=self.config.max_tokens,
                temperature=1.0,
            )
            return managed.get_state()["nodes"]

    def score(self, node):
        answer = [token for token, label in zip(node.tokens, node.masked_tokens, strict=True) if label != -100]
        text = self.tokenizer.decode(answer, skip_special_tokens=True)
        return text.count("a") / self.config.max_tokens

    async def collect_trajectories(self, item):
        nodes = await self.ask(item["prompt"], item["size"])
        group = {
            "tokens": [node.tokens for node in nodes],
            "masks": [node.masked_tokens for node in nodes],
            "inference_logprobs": [node.logprobs for node in nodes],
            "scores": [self.score(node) for node in nodes],
            "group_overrides": {"group_size": len(nodes)},
        }
        if "advantages" in self.config.fields:
            mean = sum(group["scores"]) / len(nodes)
            both = zip(group["scores"], nodes, strict=True)
            group["advantages"] = [[score - mean] * len(node.tokens) for score, node in both]
        return group, []

    async def evaluate(self, *args, **kwargs):
        scores = [self.score(node) for number in range(4) for node in await self.ask(f"say {number}", 4, "eval")]
        await self.evaluate_log({"score": sum(scores) / len(scores)}, verbose=False)


if __name__ == "__main__":
    random.seed(0)
    os.environ.setdefault("WANDB_MODE", "disabled")
    Letter.cli()
