"""Settings of engines that are servers, and of how often weights are published."""

import pytest

from slipstream.config import RunConfig
from slipstream.config.checks import contradictions


def problems(servers=({"url": "unix:/x"},), staleness=0, **sections):
    config = RunConfig.model_validate(
        {
            "model": {"path": "m"},
            "environment": {"name": "e"},
            "algorithm": {"kind": "grpo"},
            "training": {"steps": 1, "prompts_per_batch": 4, "staleness": staleness},
            **sections,
            "inference": {"servers": servers, **sections.get("inference", {})},
        }
    )
    return [problem if isinstance(problem, str) else problem[1] for problem in contradictions(config)]


def test_servers_go_with_what_reaches_them():
    assert problems() == []
    assert problems(weights={"bridge": "disk"}) == []
    assert problems([{"url": "http://h:1", "token_variable": "T"}, {"url": "https://[::1]:2"}]) == []


@pytest.mark.parametrize(
    ("said", "options"),
    [
        ("needs a token", {"servers": [{"url": "http://h:1"}]}),
        ("has more than an address", {"servers": [{"url": "http://:secret@h:1", "token_variable": "T"}]}),
        ("is no address", {"servers": [{"url": "http://h"}]}),
        ("is no address", {"servers": [{"url": "unix:x"}]}),
        ("is no name of an environment variable", {"servers": [{"url": "http://h:1", "token_variable": "a b"}]}),
        ("one address twice", {"servers": [{"url": "unix:/x"}, {"url": "unix:/x"}]}),
        ("are started by it", {"inference": {"replicas": 2}}),
        ('"single_copy" does not reach them', {"weights": {"bridge": "single_copy"}}),
        ('"restart" does not reach them', {"weights": {"bridge": "restart"}}),
        ("would share them", {"run": {"streams": "files", "orchestrators": 2}}),
    ],
)
def test_others_are_refused(said, options):
    assert any(said in problem for problem in problems(**options)), problems(**options)


def test_versions_that_are_left_out_count_as_staleness():
    assert problems((), weights={"every": 3}, staleness=2) == []
    assert any("set it to 2 or more" in problem for problem in problems((), weights={"every": 3}, staleness=1))
