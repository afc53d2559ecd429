"""Is the text plain? Finds sentences that a reader of the field has to read twice, and refuses files that get worse.

    .venv/bin/python dev/prose.py                  # the check of `make check`
    .venv/bin/python dev/prose.py FILE...          # the sentences of these files to rewrite, worst first
    .venv/bin/python dev/prose.py --change BASE    # those in lines added since a commit
    .venv/bin/python dev/prose.py --update         # note today's numbers, where they are no worse

The density of a file is the number of relative words (what, which, that, who, where ...) in 100 words of its text:
documents, docstrings, comments and messages. `dev/prose.json` has both numbers of each file. The check fails if a file
has more relative words and a higher density than before, if a new file has a density above `NEW`, or if a table cell of
a new page has more than `LONG_CELL` characters. `PLAIN` lists pages with a lower bound. The rules are an editor's
guide: rewrite the sentence.
"""

from __future__ import annotations

import argparse
import ast
import json
import math
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BASELINE = ROOT / "dev/prose.json"
NEW = 1.5
PLAIN = {
    **dict.fromkeys(("README.md", "docs/glossary.md", "docs/tutorial.md", "CONTRIBUTING.md"), 1.4),
}
LONG_CELL = 200
MANY_WORDS, MANY_RELATIVES = 34, 3
STARTS = re.compile(
    r"^(What|Who|Whoever|Whatever|Where|Which|Whose|That|Those|Of|Than|Nobody who|Nothing that|All that)\b(?!.*\?$)"
)
RELATIVES = re.compile(r"\b(what|which|whose|that|those|where|who|whom|whatever|whoever)\b", re.IGNORECASE)
PROGRAM = re.compile(
    r"\{%|\{\{|<\w+[ >/]|redis\.call|\bSELECT\b|;\s*\n"
    r"|\n\s*(import|from|def|class|return|local|function|const|let|var) \S|^\s*(import|from \S+ import|def|class) "
)
ITEM = re.compile(r"^\s*([-*]|\d+\.|\(?[a-z0-9]\))\s+|^\s*[\w*`\[\]., ]{1,40}:(?=\s)")
LIST = re.compile(r"^\s*([-*]|\d+\.)\s")


@dataclass(slots=True)
class Text:
    """One paragraph, table cell, docstring part or message: its lines in the file, and whether these are exact."""

    first: int
    last: int
    text: str
    is_cell: bool = False
    is_heading: bool = False

    @property
    def is_exact(self) -> bool:
        """Whether the text has the file's own lines, and not joined or escaped ones."""
        return self.text.count("\n") == self.last - self.first


@dataclass(slots=True)
class Found:
    """What was found in one file."""

    words: int = 0
    relatives: int = 0
    sentences: list[tuple[int, str, int, str]] = field(default_factory=list)
    """(score, reasons, line, sentence)"""

    @property
    def density(self) -> float:
        """Relative words in 100."""
        return 100 * self.relatives / self.words if self.words else 0.0


def sentences(text: str) -> Iterator[tuple[int, int, str]]:
    """(offset of its first line, lines that it covers, sentence) of each sentence of a text, code left out."""
    text = re.sub(r"``[^`]*``|`[^`]*`", lambda hit: "CODE" + "\n" * hit.group(0).count("\n"), text)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    at = 0
    for piece in re.split(r"((?<=[.!?])\s+(?=[A-Z`\"(])|\n\s*\n)", text):
        part = " ".join(piece.split())
        if len(part.split()) > 3:
            yield at, piece.strip().count("\n") + 1, part
        at += piece.count("\n")


def of_markdown(text: str) -> Iterator[Text]:
    """Paragraphs, headings and table cells of a document; code is left out."""
    is_code, buffer, start, is_heading = False, list[str](), 0, False
    for number, line in enumerate([*text.splitlines(), ""], 1):
        if line.lstrip().startswith("```"):
            is_code = not is_code
            continue
        if is_code or (line.startswith("    ") and not buffer and not LIST.match(line)):
            continue
        if line.lstrip().startswith("|"):
            for cell in line.strip().strip("|").split("|"):
                yield Text(number, number, cell.strip(), is_cell=True)
            continue
        if not line.strip() or re.match(r"\s*([-*#>]|\d+\.)\s", line) or line.startswith("#"):
            if buffer:
                yield Text(start, start + len(buffer) - 1, "\n".join(buffer), is_heading=is_heading)
            buffer, start, is_heading = [], number, line.startswith("#")
            line = re.sub(r"^\s*([-*#>]+|\d+\.)\s", "", line)
        if line.strip():
            start = start if buffer else number
            buffer.append(line.strip())


def of_string(string: str, first: int, last: int, *, is_docstring: bool) -> Iterator[Text]:
    """Parts of a string: paragraphs, and list items or "name: text" lines by themselves."""
    if not is_docstring and PROGRAM.search(string):
        return
    lines = string.split("\n")
    is_exact = len(lines) == last - first + 1
    margin = min((len(each) - len(each.lstrip()) for each in lines[1:] if each.strip()), default=0)
    buffer, start, is_code = list[str](), 0, False
    for number, each in enumerate([*lines, ""]):
        indent = len(each) - len(each.lstrip()) - margin if number else 0
        if each.strip().startswith("```"):
            is_code, each = not is_code, ""
        elif (
            is_code or each.strip().startswith((">>>", "...")) or (indent >= 4 and not buffer and not ITEM.match(each))
        ):
            continue
        if not each.strip() or (buffer and ITEM.match(each) and len(lines) > 1):
            if buffer:
                place = (first + start, first + start + len(buffer) - 1) if is_exact else (first, last)
                yield Text(*place, "\n".join(buffer))
            buffer, start = [], number
        if each.strip():
            start = start if buffer else number
            buffer.append(LIST.sub("", each, count=1))


def of_python(text: str) -> Iterator[Text]:
    """Docstrings, messages and comments of a program."""
    tree = ast.parse(text)
    bare = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    inside = {
        id(part)
        for node in ast.walk(tree)
        if isinstance(node, ast.JoinedStr)
        for part in ast.walk(node)
        if part is not node
    }
    for node in ast.walk(tree):
        if id(node) in inside:
            continue
        if isinstance(node, ast.JoinedStr):
            string = "".join(str(part.value) if isinstance(part, ast.Constant) else "CODE" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            string = node.value
        else:
            continue
        if len(string.split()) >= 6:
            yield from of_string(string, node.lineno, node.end_lineno or node.lineno, is_docstring=id(node) in bare)
    yield from of_comments(text)


def of_comments(text: str) -> Iterator[Text]:
    """Comments: lines that follow one another are one text."""
    block, start, last = list[str](), 0, -1
    for number, line in enumerate([*text.splitlines(), ""], 1):
        found = re.match(r"\s*#\s(.*)", line)
        if block and not (found and last == number - 1):
            if len(" ".join(block).split()) > 4:
                yield Text(start, last, "\n".join(block))
            block = []
        if found:
            start, block, last = (start if block else number), [*block, found.group(1)], number
        elif (tail := re.search(r"\S.*\s\s#\s(.*)", line)) and len(tail.group(1).split()) > 4:
            yield Text(number, number, tail.group(1))


def reasons(sentence: str, *, is_heading: bool) -> list[str]:
    """Why a sentence has to be read twice."""
    found = []
    if not is_heading and STARTS.match(sentence):
        found.append(f"begins with '{sentence.split()[0]}'")
    if (count := len(sentence.split())) > MANY_WORDS:
        found.append(f"{count} words")
    if (relatives := len(RELATIVES.findall(sentence))) >= MANY_RELATIVES:
        found.append(f"{relatives} relative words")
    return found


def look(path: Path, only: set[int] | None = None) -> Found:
    """What is found in a file; `only`: in these lines."""
    text = path.read_text(encoding="utf-8")
    found = Found()
    for part in of_markdown(text) if path.suffix == ".md" else of_python(text):
        if part.is_cell and len(part.text) > LONG_CELL and (only is None or part.first in only):
            found.sentences.append((2, f"table cell of {len(part.text)} characters", part.first, part.text))
        for offset, height, sentence in sentences(part.text):
            first, last = part.first, part.last
            if part.is_exact:
                first, last = part.first + offset, part.first + offset + height - 1
            if only is not None and only.isdisjoint(range(first, last + 1)):
                continue
            found.words += len(sentence.split())
            found.relatives += len(RELATIVES.findall(sentence))
            if why := reasons(sentence, is_heading=part.is_heading):
                found.sentences.append((len(why), "; ".join(why), first, sentence))
    return found


def files() -> dict[str, Path]:
    """The documents and modules that the check looks at, by their names from the root."""
    paths = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "src").rglob("*.py")]
    return {str(path.relative_to(ROOT)): path for path in sorted(paths)}


def added_since(base: str) -> dict[Path, set[int]]:
    """The lines of each file that were added since a commit."""
    command = ["git", "diff", "-U0", base, "--", "*.md", "*.py"]
    diff = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout
    added: dict[Path, set[int]] = {}
    lines: set[int] = set()
    for line in diff.splitlines():
        if line.startswith("+++ "):
            lines = added.setdefault(ROOT / line[6:], set())
        elif hunk := re.match(r"@@ -\S+ \+(\d+)(?:,(\d+))? @@", line):
            first, num = int(hunk.group(1)), int(hunk.group(2) or 1)
            lines.update(range(first, first + num))
    return {path: lines for path, lines in added.items() if path.exists() and "tests" not in path.parts}


def complaints(baseline: dict[str, list[int]]) -> list[str]:
    """What the check refuses, a line for each. `baseline`: the relative words and all words of each file."""
    lines = []
    for name, path in files().items():
        found = look(path)
        relatives, words = baseline.get(name, (2, 0))
        most = 100 * relatives / words if words else NEW
        if found.relatives <= relatives:
            most = math.inf  # it may have lost other text
        if found.density > (most := min(most, PLAIN.get(name, most))):
            lines.append(f"{name}: {found.density:.2f} relative words in 100, at most {most:.2f}: rewrite sentences")
        if name.endswith(".md") and name not in baseline:
            cells = [(line, why) for _, why, line, _ in found.sentences if why.startswith("table cell")]
            lines += [f"{name}:{line}: {why}, at most {LONG_CELL}" for line, why in cells]
    return lines


def update(baseline: dict[str, list[int]]) -> None:
    """Note today's numbers of each file that got no worse."""
    worse = {line.partition(":")[0] for line in complaints(baseline)}
    now = {name: look(path) for name, path in files().items()}
    kept = {name: baseline[name] if name in worse else [found.relatives, found.words] for name, found in now.items()}
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(numbers)}" for name, numbers in kept.items())
    BASELINE.write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")


def main() -> None:
    """Check, or show what to rewrite."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--change", metavar="BASE")
    parser.add_argument("--update", action="store_true")
    parser.add_argument("--most", type=int, default=20, help="sentences to show")
    options = parser.parse_args()
    baseline = json.loads(BASELINE.read_text(encoding="utf-8")) if BASELINE.exists() else {}
    if options.update:
        update(baseline)
        return
    if not options.files and options.change is None:
        if lines := complaints(baseline):
            sys.exit("\n".join([*lines, "python dev/prose.py FILE shows the sentences"]))
        return
    chosen: dict[Path, set[int] | None] = {}
    if options.change is not None:
        chosen.update(added_since(options.change))
    chosen.update(dict.fromkeys(options.files))
    found = {path: look(path, only) for path, only in chosen.items()}
    words, relatives = (sum(getattr(each, name) for each in found.values()) for name in ("words", "relatives"))
    rows = [(*row, path) for path, each in found.items() for row in each.sentences]
    print(
        f"{words} words, {100 * relatives / max(1, words):.1f} relative words in 100, {len(rows)} sentences to rewrite"
    )
    for _, why, line, sentence, path in sorted(rows, key=lambda row: -row[0])[: options.most]:
        print(f"{path}:{line}: {why}\n    {sentence[:260]}")


if __name__ == "__main__":
    main()
