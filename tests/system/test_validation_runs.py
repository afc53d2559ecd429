"""Runs that validate with several samples a task, with a scripted engine."""

from slipstream.runlog import read_metrics, read_samples


def test_a_run_writes_the_figures_of_several_samples(scripted):
    assert scripted.run("--evaluation.samples_per_task", "4", "--run.save_samples", "3").status == "finished"
    rows = [row for row in read_metrics(scripted.folder) if "eval/accuracy" in row]
    assert [row["step"] for row in rows] == [0, 3]
    for row in rows:
        assert row["eval/samples_per_task"] == 4
        assert row["eval/accuracy"] == row["eval/mean@4"]
        ordered = [row[f"eval/{name}"] for name in ("worst@4", "worst@2", "mean@4", "best@2", "best@4", "pass@4")]
        assert ordered == sorted(ordered)
        assert row["eval/mean@4_low"] < row["eval/mean@4"] < row["eval/mean@4_high"]
        assert row["eval/num_tasks"] == 8
    held_out = [sample for sample in read_samples(scripted.folder) if sample.get("split") == "eval"]
    assert [sample["id"] for sample in held_out] == [f"eval.{step}.{n}-0" for step in (0, 3) for n in range(3)]


def test_one_sample_a_task_has_the_metrics_of_always(scripted):
    assert scripted.run().status == "finished"
    names = {name for row in read_metrics(scripted.folder) for name in row if name.startswith("eval/")}
    kinds = ("accuracy", "accuracy_low", "accuracy_high", "num_tasks", "num_failed", "reward", "length")
    assert names == {f"eval/{name}" for name in (*kinds, "truncated_fraction")}
