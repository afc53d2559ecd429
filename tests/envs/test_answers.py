import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.envs.answers import final_answer
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
