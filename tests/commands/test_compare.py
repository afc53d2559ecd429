"""`slipstream compare`: pairs, verdicts, refusals."""

import msgspec
import numpy as np
import pytest

from slipstream.commands.compare import compare
from slipstream.errors import ConfigError, DataError
from slipstream.records import Media, Message
from slipstream.runlog.evaluations import keep_evaluation, prompt_digest
from tests.test_evaluations import evaluation


@pytest.fixture
def compared(tmp_path):
    def of(a, b):
        for name, each in (("a", a), ("b", b)):
            (tmp_path / name).unlink(missing_ok=True)
            keep_evaluation(tmp_path / name, each)
        return compare(tmp_path / "a", tmp_path / "b")

    return of


def solved(chances, num_samples=1, seed=0):
    rng = np.random.default_rng(seed)
    return [(rng.random(num_samples) < chance).astype(int).tolist() for chance in chances]


def test_a_difference_is_found(compared):
    chances = np.random.default_rng(3).uniform(0, 0.9, 500)
    found = compared(evaluation(*solved(chances, 4)), evaluation(*solved(chances + 0.1, 4, seed=1)))
    assert found.accuracy.low > 0
    assert found.verdict.startswith("B is better than A by ")
    assert "points on 500 tasks (B - A 95 % interval +" in found.verdict
    assert found.verdict.count(". ") == 0
    back = compared(evaluation(*solved(chances + 0.1, 4, seed=1)), evaluation(*solved(chances, 4)))
    assert back.verdict.startswith("A is better than B by ")
    assert back.accuracy.value == pytest.approx(-found.accuracy.value)
    assert back.as_json()["better"] == "A"
    assert back.as_json()["accuracy"]["num_tasks"] == 500
    assert back.as_json()["samples_per_task"] == [4, 4]


def test_no_difference_says_what_could_have_been_found(compared):
    chances = np.random.default_rng(4).uniform(0, 1, 200)
    found = compared(evaluation(*solved(chances)), evaluation(*solved(chances, seed=1)))
    assert not found.accuracy.differs
    assert found.verdict.startswith("A and B cannot be told apart on 200 tasks: B - A is ")
    assert f"a difference of {100 * found.accuracy.detectable:.1f} points would have been found" in found.verdict
    assert found.as_json()["better"] == "none"


def test_tasks_are_paired_by_id_and_the_others_counted(compared):
    a, b = evaluation([1], [0], [1], [0]), evaluation([1], [0], [1])
    b = msgspec.structs.replace(b, tasks=b.tasks[::-1])
    found = compared(a, b)
    assert (found.accuracy.value, found.accuracy.num_tasks) == (0.0, 3)
    assert found.num_unpaired == (1, 0)
    assert found.notes == ("tasks in A only: 1, in B only: 0; they are left out",)


def test_differences_by_source_and_failures(compared):
    a, b = evaluation([1], [0], [1], [0]), evaluation([1], [1], [0], [0])
    sources = ("x", "x", "y", "")

    def sourced(each):
        tasks = [msgspec.structs.replace(t, source=s) for t, s in zip(each.tasks, sources, strict=True)]
        return msgspec.structs.replace(each, tasks=tasks)

    b = sourced(b)
    failed = msgspec.structs.replace(b.tasks[3].samples[0], outcome="reward_error")
    b.tasks[3] = msgspec.structs.replace(b.tasks[3], samples=[failed])
    found = compared(sourced(a), b)
    assert {source: each.value for source, each in found.by_source.items()} == {"x": 0.5}
    assert found.reward.num_tasks == 3
    assert found.notes == ("samples of B that failed and count as wrong: 1",)


@pytest.mark.parametrize(
    ("other", "problem"),
    [
        (evaluation([1], [0], settings={"environment.name": "digits"}), "environment.name is 'letters' in A and 'digi"),
        (evaluation([1], [0], settings={"evaluation.threshold": 0.5}), "evaluation.threshold is 1.0 in A and 0.5 in B"),
        (evaluation([1]), "have 1 tasks in common"),
    ],
)
def test_what_cannot_be_compared(compared, other, problem):
    with pytest.raises(DataError, match=problem):
        compared(evaluation([1], [0]), other)


def test_an_evaluation_is_not_compared_with_itself(compared, tmp_path):
    compared(evaluation([1], [0]), evaluation([1], [1]))
    with pytest.raises(ConfigError, match=r"A and B are both .*a: name two evaluations"):
        compare(tmp_path / "a", tmp_path / "a")


def test_another_prompt_is_another_task(compared):
    other = evaluation([1], [0])
    other.tasks[1] = msgspec.structs.replace(other.tasks[1], prompt_digest="0")
    with pytest.raises(DataError, match=r"task eval/1 has one prompt in .*environment\.seed"):
        compared(evaluation([1], [0]), other)


def test_other_sampling_is_a_note(compared):
    found = compared(*(evaluation([1], [0], settings={"sampling.temperature": each}) for each in (1.0, 0.6)))
    assert found.notes == ("sampling.temperature is 1.0 in A and 0.6 in B",)


def test_a_folder_of_images_or_of_an_environment_may_move(compared):
    def of(folder, digest):
        image = Media("image", f"{folder}/1.png", digest, width=8, height=8)
        given = evaluation([1], [0], settings={"environment.name": f"{folder}/letters.py"})
        digest = prompt_digest([Message("user", "q", (image,))])
        return msgspec.structs.replace(
            given, tasks=[msgspec.structs.replace(each, prompt_digest=digest) for each in given.tasks]
        )

    found = compared(of("/one", "1" * 64), of("/two", "1" * 64))
    assert found.notes == ("environment.name is '/one/letters.py' in A and '/two/letters.py' in B",)
    with pytest.raises(DataError, match="has one prompt in"):
        compared(of("/one", "1" * 64), of("/one", "2" * 64))
