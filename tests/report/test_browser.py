"""Reports in a real browser: nothing fails, everything is drawn, nothing sticks out."""

from __future__ import annotations

import os
import re

from slipstream.report import write_report
from tests.report.browser import browser, find, needs_browser
from tests.system.conftest import Scripted, model, run_file  # noqa: F401 (fixtures)

pytestmark = needs_browser
DRAWN = """
[...document.querySelectorAll("figure.plot")].map(plot => {
  for (let node = plot; node; node = node.parentElement) if (node.tagName == "DETAILS") node.open = true;
  const marks = [...plot.querySelectorAll(".area .mark")];
  const title = plot.querySelector("h3").textContent;
  const visible = marks.filter(mark => {
    const box = mark.getBoundingClientRect(), style = getComputedStyle(mark);
    return box.width + box.height > 0 && (style.stroke != "none" || style.fill != "none");
  });
  const told = plot.querySelector("svg > title") && plot.querySelector("svg > desc") && plot.querySelector("table");
  return [title, visible.length, !!told];
})
"""
OVERFLOWING = """
[document.documentElement.scrollWidth - document.documentElement.clientWidth,
 [...document.querySelectorAll("body *")].filter(node => !node.closest(".scroll, svg, .hidden, .readout, .lane")
   && node.getClientRects().length && node.getBoundingClientRect().right > document.documentElement.clientWidth + 0.5)
   .map(node => node.tagName + "." + node.className)]
"""
HOVER = """
[...document.querySelectorAll("figure.plot")].map(plot => {
  const area = plot.querySelector(".area"), box = area.getBoundingClientRect();
  area.dispatchEvent(new PointerEvent("pointermove", {clientX: box.left + box.width - 1, clientY: box.top + 5}));
  const readout = area.querySelector(".readout");
  const shown = !readout.hidden && readout.querySelectorAll("b").length;
  const right = readout.getBoundingClientRect().right;
  area.dispatchEvent(new PointerEvent("pointerleave"));
  return [shown, right <= innerWidth, readout.hidden];
})
"""
KEYS = """
(() => {
  const plot = document.querySelector("figure.plot"), svg = plot.querySelector("svg");
  svg.focus();
  const press = key => svg.dispatchEvent(new KeyboardEvent("keydown", {key, bubbles: true}));
  const read = () => plot.querySelector(".readout").textContent;
  press("Home"); const first = read(); press("ArrowRight"); const second = read(); press("End"); const last = read();
  return [first, second, last];
})()
"""
BROWSE = """
(() => {
  const browser = document.querySelector(".browser"), [step, grade] = browser.querySelectorAll("select");
  const [back, next] = browser.querySelectorAll("button"), search = browser.querySelector("input");
  const told = () => browser.querySelector("output").textContent;
  const open = () => [...browser.querySelectorAll("[open]")].map(entry => entry.dataset.step);
  const choose = (field, value) => { field.value = value; field.dispatchEvent(new Event("change")); };
  const write = text => { search.value = text; search.dispatchEvent(new Event("input")); };
  const found = [told()];
  next.click(); next.click(); found.push(told(), open());
  back.click(); found.push(told(), open());
  choose(step, "3"); found.push(told(), open());
  choose(step, ""); choose(grade, "right"); found.push(told());
  choose(grade, ""); write("held/1"); found.push(told());
  write("nowhere"); next.click(); found.push(told(), open());
  return found;
})()
"""


TOKENS = """
(async () => {
  const browser = document.querySelector(".browser"), colour = browser.querySelector(".colour");
  const choose = (field, value) => { field.value = value; field.dispatchEvent(new Event("change")); };
  choose(browser.querySelector("select[data-by=kind]"), "training");
  choose(browser.querySelector("select[data-by=task]"), "set/1");
  browser.querySelectorAll("button")[1].click();
  await new Promise(done => setTimeout(done, 50));  // "toggle" is told later
  const entry = browser.querySelector("[open]"), tokens = entry.querySelector(".tokens");
  const found = [entry.dataset.task, entry.dataset.stop, tokens.hidden];
  for (const by of ["log-probability", "advantage", "loss mask", "version"]) {
    choose(colour, by);
    const painted = [...tokens.querySelectorAll("span:not(.given)")].map(span => span.style.background);
    const given = [...tokens.querySelectorAll(".given")].map(span => span.style.background);
    found.push([by, !tokens.hidden, painted.every(Boolean), given.every(each => !each),
                !browser.querySelector(".legend").hidden]);
  }
  const span = tokens.querySelector("span:not(.given)");
  span.dispatchEvent(new PointerEvent("pointerover", {bubbles: true}));
  found.push(span.textContent, span.title);
  choose(colour, "");
  found.push(tokens.hidden);
  return found;
})()
"""


async def check(page, path, width, *, dark=False):
    await page.open(path, width, dark=dark)
    drawn = await page.ask(DRAWN)
    assert len(drawn) >= 2
    assert [plot for plot in drawn if not plot[1]] == []
    assert all(told for _, _, told in drawn)
    beyond, sticking_out = await page.ask(OVERFLOWING)
    assert beyond <= 0
    assert sticking_out == []
    hovered = await page.ask(HOVER)
    assert all(shown and inside and gone for shown, inside, gone in hovered), hovered
    assert page.errors == []
    assert await page.ask("window.hacked === undefined")
    assert {url.partition(":")[0] for url in page.requests} <= {"file", "data", "about"}
    if folder := os.environ.get("SLIPSTREAM_SCREENSHOTS"):
        await page.picture(f"{folder}/{path.stem}-{width}{'-dark' if dark else ''}.png")
    return [title for title, _, _ in drawn]


TWO_SOURCES = """
def tasks(split, num_tasks, seed):
    return [
        {"prompt": f"{split} {i}", "answer": "a", "data_source": f"set/{i % 2}"} for i in range(min(num_tasks, 40))
    ]

def reward(task, completion):
    return float(completion == "a")
"""


async def test_a_real_run_in_a_real_browser(model, run_file, tmp_path, write):  # noqa: F811
    (tmp_path / "two.py").write_text(TWO_SOURCES)
    run = Scripted(model, run_file, tmp_path / "run")
    options = ("--environment.name", str(tmp_path / "two.py"), "--training.steps", "4", "--run.save_samples", "16")
    assert run.run(*options, "--evaluation.every", "2").status == "finished", run.error
    reports = {
        "one": [run.folder],
        "crafted": [write("crafted")],
        "several": [run.folder, write("second", steps=300, total=400, ends=False), write("third", learns=False)],
    }
    async with browser(find()) as page:
        for name, folders in reports.items():
            path = write_report(folders, tmp_path / f"{name}.html")
            for width in (1280, 400):
                titles = await check(page, path, width)
                assert {"Reward", "Held-out accuracy", "Every step"} <= set(titles)
            if name == "one":
                assert "Reward by task" in titles
                tokens_are_coloured_and_rollouts_filtered_by_task(await page.ask(TOKENS))
            if name == "crafted":
                first, second, last = await page.ask(KEYS)
                assert first.startswith("step 1")
                assert second.startswith("step 2")
                assert last.startswith("step 6")
                assert await page.ask(BROWSE) == [
                    "6", "2 / 6", ["0"], "1 / 6", ["0"], "2 of 6", [], "0 of 6", "3 of 6", "0 of 6", []
                ]  # fmt: skip
        await check(page, tmp_path / "crafted.html", 1280, dark=True)
        colors = set()
        for dark in (False, True):
            await page.open(tmp_path / "one.html", 1280, dark=dark)
            colors.add(await page.ask("getComputedStyle(document.body).backgroundColor"))
        assert len(colors) == 2


def tokens_are_coloured_and_rollouts_filtered_by_task(found):
    assert found[:3] == ["set/1", "answer", True], "hidden until a colour is chosen"
    assert [tuple(row) for row in found[3:7]] == [
        (by, True, True, True, True) for by in ("log-probability", "advantage", "loss mask", "version")
    ]
    assert found[7] in "ab"
    assert re.fullmatch(r"log-probability -\d+\.\d+, advantage -?\d\.?\d*, version 0\.\d", found[8])
    assert found[9] is True
