from fastclip.run.metrics_file import MetricsFile, truncate_metrics


def test_records_with_wrong_types_are_dropped_with_a_warning_when_a_run_resumes(tmp_path, caplog):
    path = tmp_path / "metrics.jsonl"
    good = ['{"step": 1, "epoch": 1}', '{"step": 2, "epoch": 2, "evaluation": {"recall": null}}']
    wrong = ['{"step": "2"}', '{"step": [1]}', '{"step": 1, "evaluation": 3}', '{"evaluation": {"a": "x"}}']
    path.write_text("\n".join([good[0], *wrong, good[1]]) + "\n")
    truncate_metrics(path, 5)
    assert path.read_text().splitlines() == good
    assert [record.args[1] for record in caplog.records] == [2, 3, 4, 5]


def test_records_that_are_lost_at_the_end_are_counted(tmp_path):
    metrics = MetricsFile(tmp_path / "missing" / "metrics.jsonl")
    assert metrics.lost() is None
    metrics.write({"step": 1})
    assert str(metrics.path) in metrics.lost()
    metrics.path.parent.mkdir()
    metrics.write({"step": 2})
    assert metrics.lost() is None
