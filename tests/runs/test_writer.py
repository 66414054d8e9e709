"""The writer of metrics.jsonl."""

import json

from exvae.runs.writer import MetricsWriter


def test_writer_removes_lines_after_the_step_and_an_incomplete_line(tmp_path):
    writer = MetricsWriter(tmp_path, 0)
    for step in (10, 20, 30):
        writer.write(step, step // 10, "valid", {"elbo": -float(step)})
    writer.write(10, 1, "test", {"elbo": -9.0})  # the line of the best epoch is written again at the end of the run
    writer.close()
    path = tmp_path / "metrics.jsonl"
    path.write_text(path.read_text() + '{"step": 40, "epo')
    writer = MetricsWriter(tmp_path, 20)
    writer.write(30, 3, "valid", {"elbo": -31.0})
    writer.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(line["step"], line["elbo"]) for line in lines] == [(10, -10.0), (20, -20.0), (30, -31.0)]
    assert lines[0] == {"step": 10, "epoch": 1, "split": "valid", "elbo": -10.0}
