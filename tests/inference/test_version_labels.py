"""Which version made which token of a request, as the versions change."""

from slipstream.inference.plugin.version_labels import TokenLabels


def test_a_request_has_a_span_for_each_version_that_made_a_token_of_it():
    labels = TokenLabels()
    labels.change("0.1", {})
    for id_ in "abc":
        labels.begin(id_)
    labels.change("0.2", {"a": 2})
    labels.change("0.3", {"a": 2, "b": 1})
    labels.begin("d")
    labels.change("0.4", {"a": 5, "b": 3, "d": 0})
    assert labels.running == ("a", "b", "c", "d")
    assert labels.end("a", 7) == [(0, "0.1"), (2, "0.3"), (5, "0.4")]
    assert labels.end("b", 3) == [(0, "0.2"), (1, "0.3")], "none of the last"
    assert labels.end("c", 1) == labels.end("d", 1) == [(0, "0.4")]
    assert labels.running == ()


def test_a_request_without_tokens_has_the_version_that_it_began_with():
    labels = TokenLabels()
    labels.begin("a")
    assert labels.end("a", 0) == [(0, "")]
    labels.change("0.1", {})
    labels.begin("b")
    labels.change("0.2", {"b": 4})
    assert labels.end("b", 0) == [(0, "0.1")]
