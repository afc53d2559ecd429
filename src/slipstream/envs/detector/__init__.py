"""The environment `detection`: images whose objects are to be named and located."""

NAME = "detection"
"""In the run file; the module itself needs numpy, which other environments' reward workers do without."""
MATCHING = "matching"
"""In a task's info: how its objects are matched (`slipstream_matching.matching.MatchSettings`), where a run says it."""
