"""Draws rectangles for a detector and writes its rows, with the images beside them. docs/detection.md goes through it:

python examples/detection/rectangles.py runs/boxes 2000
"""

import json
import random
import sys
from pathlib import Path

from PIL import Image, ImageDraw

COLOURS = ("red", "green", "blue", "black")
SIZE, CELLS, MOST = 64, 2, 4


def draw(number):
    """A picture of one to four rectangles, each in a quarter of its own, and its objects."""
    numbers = random.Random(number)
    picture = Image.new("RGB", (SIZE, SIZE), "white")
    pen, cell, objects = ImageDraw.Draw(picture), SIZE // CELLS, []
    for place in numbers.sample(range(CELLS**2), numbers.randint(1, MOST)):
        left, top = place % CELLS * cell + numbers.randint(1, 8), place // CELLS * cell + numbers.randint(1, 8)
        right, bottom = left + numbers.randint(12, cell - 10), top + numbers.randint(12, cell - 10)
        colour = numbers.choice(COLOURS)
        pen.rectangle((left, top, right - 1, bottom - 1), fill=colour)
        bins = [round(999 * edge / SIZE) for edge in (left, top, right, bottom)]
        objects.append({"desc": colour, "bbox_2d": bins})
    return picture, objects


def write(folder, num_rows, first=0):
    (folder / "images").mkdir(parents=True, exist_ok=True)
    with (folder / "rows.jsonl").open("w") as rows:
        for number in range(first, first + num_rows):
            picture, objects = draw(number)
            picture.save(folder / f"images/{number}.png")
            row = {"images": [f"images/{number}.png"], "objects": objects, "width": SIZE, "height": SIZE}
            rows.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    write(Path(sys.argv[1]), int(sys.argv[2]))
