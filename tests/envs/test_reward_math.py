"""The reward `math`, against math-verify itself; right answers that cannot be parsed; sympy that never ends."""

import json
import logging
import sys
import time

import pytest
from math_verify import parse, verify
from tests.envs.environments import shorten

from slipstream.config.schema import EnvironmentConfig
from slipstream.envs.base import RewardTimeout
from slipstream.envs.registry import load_environment
from slipstream.envs.rewards import math_answers, named
from slipstream.envs.rewards.contract import Checked
from slipstream.envs.scoring.pool import ScorerPool
from slipstream.errors import ConfigError, DataError
from slipstream.records import Message, Task

GOLDS = ["72", r"\frac{1}{2}", "x^2+3x", "(1,2)", r"\{1,2\}", r"50\%", "1,000", "[0,1)", r"2\sqrt{3}", "-3", "x=5"]
SAID = [
    "72",
    "So it is $72$.",
    r"The answer is \boxed{\frac{2}{4}}",
    "0.5",
    r"$$3x + x^2$$",
    r"\boxed{(1, 2)}",
    r"\boxed{\{2, 1\}}",
    r"\(\frac12\)",
    "0.500",
    "1000",
    r"\boxed{[0,1)}",
    r"\boxed{\sqrt{12}}",
    "the answer is -3",
    r"\boxed{x=5}",
    r"\boxed{5}",
    "nothing here",
    "",
    r"\boxed{",
    r"\boxed{\foo}",
]


@pytest.fixture(scope="module")
def math():
    return named("math")


def task(answer):
    return Task("t", (Message("user", "?"),), None, {"ground_truth": answer})


@pytest.mark.parametrize("gold", GOLDS)
def test_it_grades_as_math_verify_does(math, gold):
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    theirs = [float(verify(parse(f"${gold}$"), parse(text))) for text in SAID]
    ours = [math(task(gold), text).reward for text in SAID]
    assert ours == theirs
    assert sum(ours) >= 1


FORMS = [
    ("So 70 + 2.\n#### 72", r"\boxed{72}", 1.0),
    (r"It follows that \boxed{\frac{1}{2}}.", "0.5", 1.0),
    ("$x$ is $\\frac{3}{4}$", r"$\frac{6}{8}$", 1.0),
    (["7", r"\frac{1}{2}"], "1/2", 1.0),
    (["7", "8"], "9", 0.0),
    (72, "72.0", 1.0),
    (r"\text{Evelyn}", r"\boxed{\text{Evelyn}}", 1.0),
    ("72", r"<think>\boxed{72}</think>It is 5.", 0.0),
    ("72", r"<think>5</think>\boxed{72}", 1.0),
]


def test_forms_of_right_answers(math):
    math.check([Checked(f"row {number}", task(gold)) for number, (gold, _, _) in enumerate(FORMS)])
    assert [math(task(gold), text).reward for gold, text, _ in FORMS] == [reward for _, _, reward in FORMS]


def test_metrics_say_whether_there_was_an_answer(math):
    assert math(task("72"), "72").metrics == {"answer_found": 1.0}
    assert math(task("72"), "I do not know").metrics == {"answer_found": 0.0}
    assert math(task("72"), "<think>72").metrics == {"unclosed_thinking": 1.0}


ROWS = [Checked(f"row {n} of math.jsonl", task(str(n))) for n in range(40)]
ROWS += [Checked(f"row {n} of math.jsonl", task(f"\\frac{{{n}}}{{7}}")) for n in range(40, 120)]


def test_right_answers_that_can_be_parsed(math):
    math.check(ROWS)


@pytest.mark.parametrize(
    ("gold", "said"),
    [
        (r"\frac{", "is not mathematics that math-verify can parse"),
        ("because it is so", "is not mathematics that math-verify can parse"),
        (True, "is a bool"),
        ({"a": 1}, "is a dict"),
        (None, "has no answer"),
    ],
)
def test_a_right_answer_that_cannot_be_parsed_is_named(math, gold, said):
    with pytest.raises(DataError, match=rf"row 120 of math.jsonl.*{said}"):
        math.check([ROWS[0], ROWS[-1], Checked("row 120 of math.jsonl", task(gold))])


@pytest.mark.parametrize("hangs", [r"$\binom{10^{9}}{500000000}$", r"(10^9)!"], ids=["parse", "compare"])
def test_a_right_answer_that_takes_for_ever_is_named(math, monkeypatch, hangs):
    monkeypatch.setattr(math_answers, "PARSE_S", 2.0)
    start = time.monotonic()
    with pytest.raises(DataError, match=r"row 7: the answer .* takes more than 2 s to parse and compare"):
        math.check([Checked("row 6", task(r"\frac{1}{3}")), Checked("row 7", task(hangs))])
    assert time.monotonic() - start < 100


HANGS = r"$\binom{10^{9}}{500000000}$"


@pytest.mark.full
async def test_an_answer_on_which_sympy_hangs_is_killed(tmp_path):
    rows = [{"question": f"{n} / 7 = ?", "answer": f"\\frac{{{n}}}{{7}}"} for n in range(30)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {"path": str(tmp_path / "rows.jsonl"), "reward": "math"}
    config = EnvironmentConfig(name="rows", settings=settings, reward_timeout_s=60.0)
    found = load_environment(config).tasks("train", 1)[0]
    async with ScorerPool(config) as scorer:
        assert (await scorer.score(found, f"\\boxed{{{found.answer}}}")).reward == 1.0
        shorten(scorer, 4.0)
        start = time.monotonic()
        with pytest.raises(RewardTimeout):
            await scorer.score(found, HANGS)
        assert time.monotonic() - start < 25
        shorten(scorer, 60.0)
        assert (await scorer.score(found, f"${found.answer}$")).reward == 1.0


def test_without_the_package_it_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(ConfigError, match=r"pip install 'slipstream\[math\]'") as caught:
        named("math", setting="environment.settings.reward")
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("text", "right", "wrong"),
    [
        ("It is \u22127.", "-7", "7"),
        ("It is -$5.", "-5", "5"),
        ("It is -$5$.", "-5", "5"),
        ("It is \u2212$5$.", "-5", "5"),
        (r"-\$5", "-5", "5"),
        ("-\u20ac5", "-5", "5"),
        ("It is $9{,}500$.", "9500", "500"),
        ("It is 1.5e3.", "1500", "1.5"),
        (r"\boxed{1.5E-3}", "0.0015", "1.5"),
        ("-7", "\u22127", "7"),
        ("1500", "1.5e3", "1.5"),
    ],
)
def test_signs_currency_and_exponents(math, text, right, wrong):
    assert [math(task(gold), text).reward for gold in (right, wrong)] == [1.0, 0.0]
