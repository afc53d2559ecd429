"use strict";
// The read-out of the plots: the nearest step under the pointer, or the next one by arrow key.
for (const plot of document.querySelectorAll("figure.plot")) {
  const { x0, x1, lines, heads } = JSON.parse(plot.querySelector("script").textContent);
  const area = plot.querySelector(".area"), svg = area.querySelector("svg");
  const cursor = area.querySelector(".cursor"), readout = area.querySelector(".readout");
  const steps = [...new Set(lines.flatMap((line) => line.x))].sort((a, b) => a - b);
  const places = lines.map((line) => new Map(line.x.map((x, place) => [x, place])));
  let at = -1;

  const show = (place) => {
    at = Math.max(0, Math.min(steps.length - 1, place));
    const x = steps[at], left = (x - x0) / (x1 - x0);
    const head = document.createElement("div");
    head.textContent = heads ? heads[at] : "step " + x;
    const rows = lines.flatMap((line, number) => {
      const found = places[number].get(x);
      if (found === undefined || !line.t[found]) return [];
      const row = document.createElement("div"), chip = document.createElement("i"), value = document.createElement("b");
      row.className = line.c;
      chip.className = "chip";
      value.textContent = line.t[found];
      row.append(chip, line.n, value);
      return [row];
    });
    readout.replaceChildren(head, ...rows);
    cursor.hidden = readout.hidden = false;
    cursor.style.left = 100 * left + "%";
    const width = readout.offsetWidth, room = area.clientWidth;
    const wanted = left * room + (left * room + width + 14 > room ? -width - 12 : 12);
    readout.style.left = Math.max(-40, Math.min(room - width, wanted)) + "px";
  };
  const hide = () => {
    cursor.hidden = readout.hidden = true;
    at = -1;
  };
  const follow = (event) => {
    const box = area.getBoundingClientRect();
    const x = x0 + ((event.clientX - box.left) / box.width) * (x1 - x0);
    let nearest = 0;
    steps.forEach((step, place) => {
      if (Math.abs(step - x) < Math.abs(steps[nearest] - x)) nearest = place;
    });
    show(nearest);
  };
  area.addEventListener("pointermove", follow);
  area.addEventListener("pointerdown", follow);
  area.addEventListener("pointerleave", hide);
  svg.addEventListener("blur", hide);
  svg.addEventListener("keydown", (event) => {
    const moves = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: steps.length - 1 };
    if (event.key === "Escape") hide();
    if (!(event.key in moves)) return;
    event.preventDefault();
    show(moves[event.key]);
  });
}
// The tokens of a rollout: coloured by what is chosen, and told under the pointer.
const colours = (colour, legend, list, entries) => {
  const tint = (pen, part) => `color-mix(in srgb, var(--${pen}) ${Math.round(100 * part)}%, transparent)`;
  const words = {
    "log-probability": "darker: less likely when it was sampled (full colour at \u22125 nats)",
    advantage: "green: above the baseline, orange: below (full at 2)",
    "loss mask": "blue: sampled by the policy and trained on, grey: sampled, without loss",
    version: "one colour for each version of the weights",
  };
  const of = (span, pre, pens) => {
    const advantage = span.dataset.a ?? pre.dataset.a;
    if (colour.value === "log-probability" && span.dataset.l) return tint("c1", Math.min(1, -span.dataset.l / 5));
    if (colour.value === "advantage" && advantage)
      return tint(advantage > 0 ? "c2" : "c1", Math.min(1, Math.abs(advantage) / 2));
    if (colour.value === "loss mask") return tint(pre.dataset.trained ? "c6" : "c0", 0.35);
    if (colour.value === "version" && span.dataset.v) {
      if (!pens.has(span.dataset.v)) pens.set(span.dataset.v, "c" + (pens.size % 7));
      return tint(pens.get(span.dataset.v), 0.4);
    }
    return "";
  };
  const paint = (entry) => {
    const pens = new Map();
    for (const pre of entry.querySelectorAll(".tokens")) {
      pre.hidden = !colour.value;
      for (const span of pre.querySelectorAll("span:not(.given)")) span.style.background = of(span, pre, pens);
    }
  };
  const choose = () => {
    legend.hidden = !colour.value;
    legend.textContent = words[colour.value] ?? "";
    entries.filter((entry) => entry.open).forEach(paint);
  };
  colour.addEventListener("change", choose);
  for (const entry of entries) entry.addEventListener("toggle", () => entry.open && paint(entry));
  list.addEventListener("pointerover", (event) => {
    const { l, v, a } = event.target.dataset ?? {};
    if (l === undefined && v === undefined) return;
    const gain = a ?? event.target.parentNode.dataset.a;
    event.target.title = [l && `log-probability ${l}`, gain && `advantage ${gain}`, v && `version ${v}`]
      .filter(Boolean)
      .join(", ");
  });
};
// The kept rollouts: filters, a search, and steps to the next and the previous entry.
for (const browser of document.querySelectorAll(".browser")) {
  const bar = browser.querySelector(".filters"), list = browser.querySelector(".entries");
  const search = bar.querySelector("input"), choices = [...bar.querySelectorAll("select[data-by]")];
  const entries = [...list.children], texts = entries.map((entry) => entry.textContent.toLowerCase());
  const shown = () => entries.filter((entry) => !entry.hidden);

  const tell = () => {
    const found = shown(), at = found.findIndex((entry) => entry.open);
    const all = found.length < entries.length ? found.length + " of " + entries.length : String(found.length);
    bar.querySelector("output").textContent = at < 0 ? all : at + 1 + " / " + all;
  };
  const filter = () => {
    const wanted = search.value.trim().toLowerCase();
    entries.forEach((entry, place) => {
      const differs = choices.some((choice) => choice.value && entry.dataset[choice.dataset.by] !== choice.value);
      entry.hidden = differs || !texts[place].includes(wanted);
      entry.open &&= !entry.hidden;
    });
    tell();
  };
  const move = (by) => {
    const found = shown(), at = found.findIndex((entry) => entry.open);
    const next = found[at < 0 ? (by > 0 ? 0 : found.length - 1) : at + by];
    if (!next) return;
    for (const entry of entries) entry.open = entry === next;
    list.scrollTop = next.offsetTop;
    tell();
  };
  for (const button of bar.querySelectorAll("button")) button.addEventListener("click", () => move(+button.dataset.move));
  for (const choice of choices) choice.addEventListener("change", filter);
  search.addEventListener("input", filter);
  for (const entry of entries) entry.addEventListener("toggle", tell);
  const colour = bar.querySelector(".colour");
  if (colour) colours(colour, bar.querySelector(".legend"), list, entries);
  bar.hidden = false;
  filter();
}
