"""A StatefulToolEnv of verifiers up to 0.3: a tool with an argument that the environment supplies."""

import verifiers as vf
from datasets import Dataset


def price(item: str, shop: str) -> str:
    """The price of an item."""
    return f"{len(item) + len(shop)} in {shop}"


class Shop(vf.StatefulToolEnv):
    def __init__(self, supplies, **kwargs):
        super().__init__(**kwargs)
        self.supplies = supplies
        self.add_tool(price, args_to_skip=["shop"])

    async def setup_state(self, state, **kwargs):
        state["shop"] = "corner"
        return state

    def update_tool_args(self, tool_name, tool_args, messages, state, **kwargs):
        return {**tool_args, "shop": state["shop"]} if self.supplies else tool_args


def right(completion, answer, **kwargs):
    return float(completion[-1]["content"] == answer)


def load_environment(supplies=True):
    rows = [{"question": f"Price of {item}?", "answer": f"{len(item) + 6}"} for item in ("tea", "bread", "butter")]
    return Shop(supplies, dataset=Dataset.from_list(rows), rubric=vf.Rubric(funcs=[right]), max_turns=4)
