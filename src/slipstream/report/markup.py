"""Builds HTML in which text cannot become markup: every string is escaped."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterable
from typing import Any

NONE = "\u2013"
"""Shown in the place of a missing number."""
_VOID = frozenset({"meta", "br", "wbr", "line", "rect", "polyline", "path", "input"})
# Control characters are shown by their Unicode pictures, and lone surrogates cannot be written as UTF-8.
_SHOWN = {
    **{code: chr(0x2400 + code) for code in range(0x20) if chr(code) not in "\n\t"},
    **dict.fromkeys(range(0xD800, 0xE000), "\ufffd"),
    0x7F: "\u2421",
}


class Html(str):
    """Text that is already markup."""

    __slots__ = ()


Child = Html | str | int | None | Iterable["Child"]


def h(name: str, /, *children: Child, **attributes: str | int | float | bool | None) -> Html:
    """An element; `p.note` is a `p` of the class `note`. An attribute `class_` is `class`, `data_x` is `data-x`; one
    that is None or False is left out."""
    name, *classes = name.split(".")
    parts: list[str] = []
    for key, value in (attributes | ({"class": " ".join(classes)} if classes else {})).items():
        if value is None or value is False:
            continue
        key = key.rstrip("_").replace("_", "-") if key != "viewBox" else key
        parts.append(f" {key}" if value is True else f' {key}="{text(str(value))}"')
    if name in _VOID:
        return Html(f"<{name}{''.join(parts)}/>")
    return Html(f"<{name}{''.join(parts)}>{join(*children)}</{name}>")


def join(*children: Child) -> Html:
    """Concatenates children: strings are escaped, markup stays, None is skipped."""
    parts: list[str] = []
    for child in children:
        if child is None:
            continue
        if isinstance(child, Html):
            parts.append(child)
        elif isinstance(child, str):
            parts.append(text(child))
        elif isinstance(child, int):
            parts.append(str(child))
        else:
            parts.append(join(*child))
    return Html("".join(parts))


def text(value: str) -> Html:
    """Escapes the characters of `value`."""
    return Html(html.escape(value.translate(_SHOWN), quote=True))


def key(name: str) -> Html:
    """The name of a setting, with line breaks allowed only between words."""
    return h("code.name", breakable(name, "._"))


def breakable(value: str, after: str = "/._-") -> Html:
    """Text such as a path, with line breaks preferred between its parts."""
    parts = re.split(f"(?<=[{re.escape(after)}])", value)
    return join([join(h("wbr") if place else None, part) for place, part in enumerate(parts)])


def data(value: Any) -> Html:
    """`value` as JSON that is safe inside a script element."""
    dumped = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return Html(dumped.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))


def table(head: Iterable[Child], rows: Iterable[Iterable[Child]], *, numbers: bool = True, caption: str) -> Html:
    """A table that scrolls sideways; its first column names the row."""
    body = [h("tr", [h("th" if i == 0 else "td", cell, scope="row" if i == 0 else None) for i, cell in enumerate(row)])
            for row in rows]  # fmt: skip
    return h(
        "div.scroll",
        h(
            "table",
            h("caption.hidden", caption),
            h("thead", h("tr", [h("th", cell, scope="col") for cell in head])),
            h("tbody", body),
            class_="numbers" if numbers else "words",
        ),
        tabindex=0,
        role="region",
        aria_label=caption,
    )


def details(summary: Child, *children: Child) -> Html:
    """A collapsible element."""
    return h("details", h("summary", summary), *children)


def number(value: float | None, unit: str = "") -> str:
    """Formats a number: four significant digits, thousands separated; `%` formats a fraction."""
    if value is None:
        return NONE
    if unit == "%":
        return f"{100 * value:.1f}\u00a0%"
    size = abs(value)
    if value == 0 or (float(value).is_integer() and size < 1e6):
        shown = f"{value:,.0f}"
    elif size >= 1e6 or size < 1e-3:
        mantissa, _, exponent = f"{value:.2e}".partition("e")
        shown = f"{mantissa}e{int(exponent)}"
    else:
        digits = 0 if size >= 1000 else 1 if size >= 100 else 2 if size >= 10 else 3 if size >= 1 else 4
        shown = f"{value:,.{digits}f}"
    return f"{shown}\u00a0{unit}".rstrip().replace(",", "\u202f").replace("-", "\u2212", 1 if value < 0 else 0)


def duration(seconds: float) -> str:
    """`4.2 s`, `3 min 05 s` or `1 h 02 min`."""
    if seconds < 60:
        return f"{seconds:.1f}\u00a0s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}\u00a0h {minutes:02}\u00a0min" if hours else f"{minutes}\u00a0min {rest:02}\u00a0s"
