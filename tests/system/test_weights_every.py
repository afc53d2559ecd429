"""`weights.every`: versions are left out, and the tokens' ages count them."""

import pytest


@pytest.mark.parametrize("order", ["data", "ready"])
def test_versions_are_published_after_each_third_step_and_the_last(scripted, order):
    options = ("--weights.every", "3", "--training.staleness", "2", "--training.order", order, "--evaluation", "false")
    scripted.finish(8, "--training.steps", "8", *options)
    published = [event["version"] for event in scripted.events("publish")]
    assert published == ["0.0", "0.3", "0.6", "0.8"]
    ages = [row["staleness/max"] for row in scripted.metrics if "staleness/max" in row]
    assert len(ages) == 8
    assert max(ages) == 2
    if order == "data":
        assert ages == [0, 1, 2, 0, 1, 2, 0, 1]


def test_an_evaluation_has_its_version_beside(scripted):
    options = ("--weights.every", "3", "--training.staleness", "2", "--training.order", "data")
    scripted.finish(4, "--training.steps", "4", *options, "--evaluation.every", "2")
    assert [event["version"] for event in scripted.events("publish")] == ["0.0", "0.2", "0.3", "0.4"]
