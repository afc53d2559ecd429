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


NUMBERS = {
    10_000: ("$10,\\!000$",),
    10_000_000: ("$10{,}\\!000{,}\\!000$",),
    12_345: ("$12\\;345$", "$12\\ 345$"),
    100: ("10~100",),
    Fraction(-1, 2): ("\\frac{-1}{2}", "-.5", "= \u2212\\frac{1}{2}", "-$\\frac{1}{2}$"),
    Fraction(1, 2): ("-\\frac{1}{\u22122}", "\u00bd", ".5"),
    Fraction(3, 4): ("\\cfrac{1.5}{2}", "3/4", "3/4.", "\\frac{3}{4}"),
    Fraction(7, 2): ("It is 3\u00bd.",),
    Fraction(-7, 2): ("It is -3 \u00bd.",),
    Fraction(8, 3): ("2 \u2154 cups",),
    7: ("7", "- 7", "1. first\n- 7 items", "$5$-$7$", "5\u20137", "5 \u2013 7"),
    -7: ("-7", "It is \u22127.", "It is \u20137.", "x = - 7"),
    -5: ("$-5", "-$5", "-$5.", "-\\$5", "\\$-5", "\u2212\u20ac5", "negative 5", "minus 5", "\\boxed{-5}", "= -5",
        "US$-5", "-US$5", "(-$5)", "**-$5**", "-5 dollars", "$-5$", "${-5}$", "\\(-5\\)", "x=-5", "x:\u22125",
        "x = - $5$", "x =-5", "(- 5)"),
    5: ("\u20ac 5", "5 m^2", "a-5", "(3)-5", "5.", "+5", "- 5 apples", "7 minus 5", "(5)"),
    9500: ("$9{,}500$", "$9\\,500$"),
    1234567: ("1,234,567",),
    Fraction(2469, 2): ("1,234.50",),
    345: ("12 345",),
    1234: ("1\u202f234", "1'234"),
    1000: ("1_000", "10^3"),
    23: ("1,23",),
    1500: ("1.5e3", "1.5 \\times 10^3", "1.5\xd710^{3}", "1.5\xd710\xb3"),
    Fraction(3, 2000): ("1.5E-3", "1.5 * 10^-3", "1.5\xb710\u207b\xb3"),
    20000: ("2e+4",),
    1024: ("2^{10}",),
    None: ("x^2", "no number", "1e999999999999", "2^99999999", "0^-1", "x^25", "x^{25} y", "x^2.5", "step_5"),
    101: ("101_2",),
    50: ("50%",),
    -50: ("-50 %",),
    Fraction(-3, 4): ("-3/4", "-\\frac{3}{4}", "-\\dfrac34"),
    Fraction(3, 2): ("1 1/2",),
    Fraction(-3, 2): ("-1\\frac{1}{2}",),
    3: ("7-3", "7\u22123", "5 - 3", "e3", "3/0", "v1.2.3"),
    20: ("10-20",),
    15: ("10%-15%",),
    10: ("$5-$10",),
    1: ("1e",),
}  # fmt: skip
"""The last number in texts: signs, currency, thousands, exponents, fractions, percent."""


@pytest.mark.parametrize(("text", "number"), [(text, number) for number, texts in NUMBERS.items() for text in texts])
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
