import random

import slipstream
from slipstream.envs import split_of


def tasks(split, num_tasks, seed):
    draw = random.Random(seed)
    # A task has one word. Draw 20 times as many: some repeat, and only one in ten is for "eval".
    words = dict.fromkeys("".join(draw.choices("abcdefgh", k=5)) for _ in range(20 * num_tasks))
    mine = [word for word in words if split_of(word) == split]
    return [{"prompt": f"Reverse: {word}", "answer": word[::-1]} for word in mine[:num_tasks]]


def reward(task, completion):
    return float(completion == task.answer)


if __name__ == "__main__":
    model = slipstream.new_model("models/small")  # 0.8M random weights; pretrained: model = "Qwen/Qwen3-0.6B"
    common = {"tasks": tasks, "environment": {"num_train_tasks": 5000}}
    schedule = {"schedule": "linear", "warmup_steps": 10}
    sft = slipstream.sft(model, steps=100, training={"learning_rate": 4e-3, **schedule}, **common)
    run = slipstream.train(sft.weights, reward=reward, steps=80, training={"learning_rate": 1e-3, **schedule}, **common)
    print(run)
    run.report("report.html")
