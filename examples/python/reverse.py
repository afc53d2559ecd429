import random

import slipstream


def tasks(split, num_tasks, seed):
    draw = random.Random(f"{split} {seed}")
    words = ["".join(draw.choices("abcdefgh", k=4)) for _ in range(num_tasks)]
    return [{"prompt": f"Reverse: {word}", "answer": word[::-1]} for word in words]


def reward(task, completion):
    return float(completion.strip() == task.answer)


if __name__ == "__main__":
    model = slipstream.new_model("models/small")  # 0.8 M random parameters; or "Qwen/Qwen3-0.6B"
    sft = slipstream.sft(model, tasks=tasks, steps=100)
    run = slipstream.train(sft.weights, tasks, reward, steps=40)
    print(run)
    run.report("report.html")
