from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.envs.answers import final_answer, is_number, last_number, until_stop
from slipstream.envs.split import split_of


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        ("4", "4"),
        ("  4 ", "  4 "),
        ("", ""),
        ("<think>2+2</think>\n\n4", "4"),
        ("<think></think>4\n", "4\n"),
        ("<think>a</think>no<think>b</think> 5", "5"),
        ("opened by the prompt</think>4", "4"),
        ("<think>is it 4", None),
        ("<think>a</think>4<think>or 5", None),
        ("4<think>", None),
        ("<think>a</think>", ""),
    ],
)
def test_the_answer_follows_the_last_thought(completion, answer):
    assert final_answer(completion) == answer


@given(thought=st.text(), answer=st.text(alphabet="ab <"))
def test_nothing_inside_a_thought_is_graded(thought, answer):
    assert final_answer(f"<think>{thought}</think>{answer}") == answer.lstrip()


def test_one_text_in_ten_is_held_out_and_always_the_same_ones():
    splits = [split_of(f"question {i}") for i in range(5000)]
    assert 400 < splits.count("eval") < 600
    assert [split_of(f"question {i}") for i in range(20)] == splits[:20]
    # Fixed for good: another division would put questions that were trained on into evaluations of the same model.
    assert [i for i, split in enumerate(splits[:40]) if split == "eval"] == [16, 25, 32, 33]


NUMBERS = [
    ("$10,\\!000$", 10_000),
    ("$10{,}\\!000{,}\\!000$", 10_000_000),
    ("$12\\;345$", 12_345),
    ("$12\\ 345$", 12_345),
    ("10~100", 100),
    ("\\frac{-1}{2}", Fraction(-1, 2)),
    ("-\\frac{1}{\u22122}", Fraction(1, 2)),
    ("\\cfrac{1.5}{2}", Fraction(3, 4)),
    ("\u00bd", Fraction(1, 2)),
    ("It is 3\u00bd.", Fraction(7, 2)),
    ("It is -3 \u00bd.", Fraction(-7, 2)),
    ("2 \u2154 cups", Fraction(8, 3)),
    ("7", 7),
    ("-7", -7),
    ("It is \u22127.", -7),
    ("It is \u20137.", -7),
    ("$-5", -5),
    ("-$5", -5),
    ("-$5.", -5),
    ("-\\$5", -5),
    ("\\$-5", -5),
    ("\u2212\u20ac5", -5),
    ("\u20ac 5", 5),
    ("- 7", 7),
    ("x = - 7", -7),
    ("$9{,}500$", 9500),
    ("$9\\,500$", 9500),
    ("1,234,567", 1234567),
    ("1,234.50", Fraction(2469, 2)),
    ("12 345", 345),
    ("1\u202f234", 1234),
    ("1'234", 1234),
    ("1_000", 1000),
    ("1,23", 23),
    ("1.5e3", 1500),
    ("1.5E-3", Fraction(3, 2000)),
    ("2e+4", 20000),
    ("1.5 \\times 10^3", 1500),
    ("1.5\xd710^{3}", 1500),
    ("1.5 * 10^-3", Fraction(3, 2000)),
    ("1.5\xd710\xb3", 1500),
    ("1.5\xb710\u207b\xb3", Fraction(3, 2000)),
    ("10^3", 1000),
    ("2^{10}", 1024),
    ("x^2", None),
    ("5 m^2", 5),
    ("101_2", 101),
    ("50%", 50),
    ("-50 %", -50),
    ("3/4", Fraction(3, 4)),
    ("3/4.", Fraction(3, 4)),
    ("-3/4", Fraction(-3, 4)),
    ("\\frac{3}{4}", Fraction(3, 4)),
    ("-\\frac{3}{4}", Fraction(-3, 4)),
    ("-\\dfrac34", Fraction(-3, 4)),
    ("1 1/2", Fraction(3, 2)),
    ("-1\\frac{1}{2}", Fraction(-3, 2)),
    ("7-3", 3),
    ("10-20", 20),
    ("a-5", 5),
    ("(3)-5", 5),
    ("7\u22123", 3),
    ("10%-15%", 15),
    ("$5-$10", 10),
    ("5 - 3", 3),
    ("negative 5", -5),
    ("minus 5", -5),
    ("no number", None),
    (".5", Fraction(1, 2)),
    ("-.5", Fraction(-1, 2)),
    ("5.", 5),
    ("\\boxed{-5}", -5),
    ("= -5", -5),
    ("e3", 3),
    ("1e", 1),
    ("1e999999999999", None),
    ("2^99999999", None),
    ("0^-1", None),
    ("3/0", 3),
    ("v1.2.3", 3),
    ("+5", 5),
    ("US$-5", -5),
    ("-US$5", -5),
    ("(-$5)", -5),
    ("**-$5**", -5),
    ("-5 dollars", -5),
    ("$-5$", -5),
    ("${-5}$", -5),
    ("\\(-5\\)", -5),
    ("x=-5", -5),
    ("x:\u22125", -5),
    ("- 5 apples", 5),
    ("1. first\n- 7 items", 7),
    ("7 minus 5", 5),
    ("x^25", None),
    ("x^{25} y", None),
    ("x^2.5", None),
    ("step_5", None),
    ("$5$-$7$", 7),
    ("x = - $5$", -5),
    ("x =-5", -5),
    ("(- 5)", -5),
    ("= \u2212\\frac{1}{2}", Fraction(-1, 2)),
    ("5\u20137", 7),
    ("5 \u2013 7", 7),
    ("(5)", 5),
    ("-$\\frac{1}{2}$", Fraction(-1, 2)),
]
"""Texts and the last number in them: signs, currency, thousands, exponents, fractions, percent."""


@pytest.mark.parametrize(("text", "number"), NUMBERS)
def test_the_last_number_of_a_text(text, number):
    assert last_number(text) == number
    if number is not None and not text[-1].isalpha():
        assert last_number(f"First 1, then {'x' * 2000} 2. So: {text}") == number, "in a long text"


@given(
    st.fractions(max_denominator=1),
    st.sampled_from(["{}", "-{}", "\u2212{}", "-${}", "$-{}$", "-\u20ac{}", "x = - {}"]),
)
def test_no_sign_is_lost_or_found(number, form):
    text = form.format(f"{abs(int(number)):,}")
    assert last_number(f"It is {text}.") == (-1 if form != "{}" else 1) * abs(number)


@pytest.mark.parametrize("text", ["9" * 401, "2^99999999", "1e999999999999"])
def test_a_number_of_too_many_digits_is_none(text):
    assert last_number(text) is None


def test_a_text_that_is_a_number_alone():
    assert all(map(is_number, ["7", " -3 ", "1,234.5", "3/4", "-$5", "1.5e3", r"\frac{1}{2}"]))
    assert not any(map(is_number, ["x", "7 km", "", "^2", "1 2", "7."]))


def test_a_completion_ends_with_the_first_stop_string():
    assert until_stop("a</x> b</y> c", ["</y>", "</x>"]) == "a</x>"
    assert until_stop("abc", ["x"]) == until_stop("abc", []) == "abc"
