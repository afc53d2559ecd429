"""Arithmetic with a calculator: an environment whose policy may call a tool."""

import ast
import operator
import random

from slipstream.envs import Message, SingleTurn, Task, ToolCall, split_of

OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}


def calculator(expression: str) -> str:
    """Computes an arithmetic expression.

    Args:
        expression: Whole numbers with +, - and *.
    """
    if len(expression) > 100:
        raise ValueError("the expression has more than 100 characters")
    return str(value_of(ast.parse(expression, mode="eval").body))


def value_of(node):
    """The value of a parsed expression; unlike eval() it can do nothing else."""
    match node:
        case ast.Constant(value=int(number)):
            return number
        case ast.BinOp() if type(node.op) in OPERATORS:
            return OPERATORS[type(node.op)](value_of(node.left), value_of(node.right))
    raise ValueError("only whole numbers with +, - and * are allowed")


class Arithmetic(SingleTurn):
    tools = (calculator,)
    max_turns = 3

    def tasks(self, split, num_tasks):
        draw = random.Random(self.seed)
        found = {}
        for _ in range(20 * num_tasks):
            a, b, c = (draw.randint(10, 99) for _ in range(3))
            expression = f"{a}*{b}{draw.choice('+-')}{c}"
            if split_of(expression) == split:
                answer = calculator(expression)
                found[expression] = Task(
                    expression, (Message("user", f"{expression}=?"),), answer, {"expression": expression}
                )
        return list(found.values())[:num_tasks]

    def gold(self, task):
        """Half of the demonstrations do without the calculator: SFT imitates that too, RL finds out what it costs."""
        if sum(map(ord, task.info["expression"])) % 2:
            return task.answer
        call = ToolCall("calculator", {"expression": task.info["expression"]})
        return [
            Message("assistant", "", tool_calls=(call.as_chat(),)),
            Message("tool", task.answer),
            Message("assistant", task.answer),
        ]

    def reward(self, task, completion):
        return float(completion.strip() == task.answer)
