"""What stragglers cost a pipelined job is what was published for it; of planted jobs the planted part is to blame."""

from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from headway.errors import UserError
from headway.explain import explain
from headway.explain.pipeline_events import slowdown_of
from headway.explain.pipeline_job import BACKWARD, FORWARD
from headway.explain.pipeline_table import read_job

STRAGGLERS = Path(__file__).parents[2] / "shared" / "traces" / "stragglers"
SEND_S = 0.001


@pytest.mark.skipif(not STRAGGLERS.exists(), reason="the public tables are not here")
@pytest.mark.parametrize(
    ("name", "slowdown", "stage_share", "worker_share", "cause"),
    [
        ("ST", 1.1787, 1.2194, 0.0314, "pipeline-stage-imbalance"),
        ("SE", 1.5374, 0.6877, 0.0251, "sequence-length-imbalance"),
    ],
)
def test_published_slowdowns_and_their_causes(name, slowdown, stage_share, worker_share, cause):
    path = STRAGGLERS / f"trace-{name}.parquet"
    report = explain([path])
    (pipeline,) = report.explained.details["pipelines"]
    assert pipeline["S"] == pytest.approx(slowdown, abs=0.001)
    assert pipeline["M_S"] == pytest.approx(stage_share, abs=0.001)
    assert pipeline["M_W"] == pytest.approx(worker_share, abs=0.001)
    assert report.explained.findings[0].id == cause
    other = {"pipeline-stage-imbalance", "sequence-length-imbalance", "slow-worker"} - {cause}
    assert not other & {finding.id for finding in report.explained.findings}


def planted(
    path: Path,
    stages: int = 2,
    batches: int = 4,
    data_ranks: int = 2,
    steps: int = 3,
    time_s=lambda stage, rank, step, batch: 0.1,
    gc_s: float = 0.0,
) -> Path:
    """A table of a job that runs all forward passes and then all backward passes (GPipe), played by hand here."""
    rows = []
    numbers = {(r, s): r * stages + s for r in range(data_ranks) for s in range(stages)}

    def row(rank, stage, step, kind, start, end, number, batch=-1):
        rows.append(
            {
                "dp_rank": rank, "stage": stage, "rank": numbers[rank, stage], "step": step, "optype": kind,
                "start_ts": start, "duration": end - start, "seq_id": number, "mc": 0 if batch >= 0 else -1,
                "mb_id": batch, "gmc": stage if batch >= 0 else -1,
            }
        )  # fmt: skip

    for step in range(steps):
        ends = []
        for rank in range(data_ranks):
            free = [0.0] * stages
            for kind, order in ((FORWARD, range(stages)), (BACKWARD, range(stages - 1, -1, -1))):
                sent = [0.0] * batches
                for place, stage in enumerate(order):
                    for batch in range(batches):
                        posted = free[stage]
                        ready = posted if place == 0 else max(posted, sent[batch])
                        direction = kind.split("-")[0]
                        if place:
                            row(rank, stage, step, f"{direction}-recv", posted, ready, batch)
                        factor = 1 if kind == FORWARD else 2
                        end = ready + factor * time_s(stage, rank, step, batch)
                        row(rank, stage, step, kind, ready, end, batch, batch)
                        free[stage] = end
                        if place < stages - 1:
                            sent[batch] = end + SEND_S
                            row(rank, stage, step, f"{direction}-send", end, end + SEND_S, batch)
            for stage in range(stages):
                row(rank, stage, step, "gc", free[stage], free[stage] + gc_s, 0)
                free[stage] += gc_s
            ends.append(free)
        for stage in range(stages):
            last = max(free[stage] for free in ends)
            for rank in range(data_ranks):
                row(rank, stage, step, "grads-reduce-scatter", ends[rank][stage], last + 0.05, 0)
                ends[rank][stage] = last + 0.05
        last = max(max(free) for free in ends)
        for rank in range(data_ranks):
            for stage in range(stages):
                row(rank, stage, step, "optimizer-clip-main-grad", ends[rank][stage], last + 0.01, 0)
                row(rank, stage, step, "optimizer", last + 0.01, last + 0.03, 0)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


def test_an_even_job_has_no_slowdown_and_is_played_as_it_ran(tmp_path):
    job, left_out = read_job(planted(tmp_path / "even.parquet"))
    found = slowdown_of(job)
    assert left_out == 0
    assert found.simulated_s == pytest.approx(found.measured_s, rel=0.01)
    assert found.slowdown == pytest.approx(1, abs=0.002)  # a message's transfer is in the first of its pair only
    assert {finding.id for finding in explain([tmp_path / "even.parquet"]).explained.findings} == {"pipeline-bubble"}


def test_the_bubble_of_many_micro_batches_is_no_finding(tmp_path):
    planted(tmp_path / "many.parquet", batches=24)
    assert not explain([tmp_path / "many.parquet"]).explained.findings


PLANTED = {
    "pipeline-stage-imbalance": lambda stage, rank, step, batch: 0.16 if stage == 1 else 0.1,
    "slow-worker": lambda stage, rank, step, batch: 0.2 if (stage, rank) == (0, 1) else 0.1,
    "sequence-length-imbalance": lambda stage, rank, step, batch: (
        0.1 + 0.2 * ((7 * rank + 3 * step + 5 * batch) % 4 == 0)
    ),
}


@pytest.mark.parametrize("cause", PLANTED)
def test_what_was_planted_is_to_blame(tmp_path, cause):
    planted(tmp_path / "job.parquet", time_s=PLANTED[cause], batches=8)
    found = {finding.id: finding for finding in explain([tmp_path / "job.parquet"]).explained.findings}
    assert cause in found
    assert not (set(PLANTED) - {cause}) & set(found)


def test_differences_within_what_steps_vary_by_are_no_stragglers(tmp_path):
    random = np.random.default_rng(3)
    planted(tmp_path / "noisy.parquet", time_s=lambda *_: 0.1 * (1 + 0.01 * random.standard_normal()), batches=24)
    assert not explain([tmp_path / "noisy.parquet"]).explained.findings


@pytest.mark.parametrize("seconds", [0.3, 0.001])
def test_collections_are_told_when_they_cost_something(tmp_path, seconds):
    planted(tmp_path / "job.parquet", gc_s=seconds, batches=24)
    found = {finding.id for finding in explain([tmp_path / "job.parquet"]).explained.findings}
    assert ("garbage-collection" in found) == (seconds > 0.1)


def test_a_step_that_lacks_events_is_left_out_and_told(tmp_path):
    path = planted(tmp_path / "job.parquet")
    table = pyarrow.parquet.read_table(path)
    pyarrow.parquet.write_table(table.slice(0, len(table) - 1), path)
    report = explain([path])
    assert report.verdict == "caveats"
    assert report.explained.details["pipelines"][0]["steps"] == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda table: table.drop_columns(["stage"]), "no column stage"),
        (lambda table: table.set_column(0, "dp_rank", pyarrow.array(["x"] * len(table))), "dp_rank is no int64"),
        (lambda table: table.slice(0, 0), "no rows"),
        (lambda table: table.slice(0, 1), "no event is called"),
    ],
)
def test_a_table_that_is_no_such_job_s_is_refused_in_a_line(tmp_path, change, message):
    path = planted(tmp_path / "job.parquet")
    pyarrow.parquet.write_table(change(pyarrow.parquet.read_table(path)), path)
    with pytest.raises(UserError, match=message):
        explain([path])
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(UserError, match="cannot be read as parquet"):
        explain([path])
