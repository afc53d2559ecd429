"""Questions on drawn rectangles: how many, and of which colour. docs/images.md goes through it.

An environment, `environment.name = "examples/vision/rectangles.py"`; and a program that writes demonstrations for SFT,
rows with their images beside them:

    python examples/vision/rectangles.py runs/rectangles 4000
"""

import io
import json
import random
import sys
from pathlib import Path

from PIL import Image, ImageDraw

from slipstream.envs import split_of

COLOURS = ("red", "green", "blue", "yellow", "black", "purple")
SIZE, CELLS, MOST = 64, 4, 4


def draw(seed, index):
    """A picture of one to four rectangles of one colour, each in a cell of its own; its number and its colour."""
    numbers = random.Random(f"{seed}.{index}")
    picture = Image.new("RGB", (SIZE, SIZE), "white")
    pen, cell = ImageDraw.Draw(picture), SIZE // CELLS
    number, colour = numbers.randint(1, MOST), numbers.choice(COLOURS)
    for place in numbers.sample(range(CELLS**2), number):
        left, top = place % CELLS * cell + numbers.randint(1, 4), place // CELLS * cell + numbers.randint(1, 4)
        width, height = numbers.randint(7, cell - 5), numbers.randint(7, cell - 5)
        pen.rectangle((left, top, left + width, top + height), fill=colour)
    return picture, number, colour


def questions(seed, split):
    """Pictures of a split without end, each with a question and its answer."""
    index = 0
    while True:
        if split_of(f"rectangles {index}") == split:
            picture, number, colour = draw(seed, index)
            yield picture, *(("How many?", str(number)) if index % 2 else ("Which colour?", colour))
        index += 1


def tasks(split, num_tasks, seed):
    found = []
    for _, (picture, question, answer) in zip(range(num_tasks), questions(seed, split), strict=False):
        content = [{"type": "image", "image": picture}, {"type": "text", "text": question}]
        prompt = [{"role": "user", "content": content}]
        found.append({"prompt": prompt, "answer": answer, "data_source": question.split()[-1].rstrip("?")})
    return found


def reward(task, completion):
    return float(completion.strip() == task.answer)


def write(folder, num_rows, seed=0):
    """Demonstrations for SFT."""
    (folder / "images").mkdir(parents=True, exist_ok=True)
    with (folder / "rows.jsonl").open("w") as rows:
        for number, (picture, question, answer) in zip(range(num_rows), questions(seed, "train"), strict=False):
            file = io.BytesIO()
            picture.save(file, "PNG")
            (folder / f"images/{number}.png").write_bytes(file.getvalue())
            messages = [{"role": "user", "content": f"<image>{question}"}, {"role": "assistant", "content": answer}]
            rows.write(json.dumps({"messages": messages, "images": [f"images/{number}.png"]}) + "\n")


if __name__ == "__main__":
    write(Path(sys.argv[1]), int(sys.argv[2]))
