"""``headway explain``: one line for what is wrong, JSON as contracted, several ranks and runs, a trace for Perfetto."""

import gzip
import json
import os
import shutil
from pathlib import Path

import pytest

from commands import run
from generated_traces import GEMM, GeneratedTrace, finish
from headway.explain import InputKind, find_inputs, kind_of
from headway.timeline import Kind, read_chrome_trace

TRACES = Path(__file__).parents[2] / "shared" / "traces"
DLRM = TRACES / "kineto" / "dlrm_8rank"
RANK_KEYS = {
    "rank",
    "window_us",
    "busy_us",
    "idle_us",
    "compute_us",
    "communication_us",
    "exposed_communication_us",
    "memory_us",
    "overlap_percent",
}
FINDING_KEYS = {
    "id",
    "title",
    "claim",
    "cause_class",
    "confidence",
    "evidence",
    "recoverable",
    "fix",
    "verify",
    "falsified_by",
}


def steps(path: Path, work_us: float = 500, loader_us: float = 200, jitter: float = 0.0, rank: int = 0) -> Path:
    trace = GeneratedTrace(rank=rank)
    for number in range(8):
        with trace.step(number):
            with trace.scope("enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"):
                trace.work(loader_us * (1 + jitter * (-1) ** number))
            for _ in range(10):
                trace.launch(GEMM, work_us * (1 + jitter * (-1) ** number))
            trace.synchronise()
    finish(trace)
    return trace.write(path)


def known_answers_of_the_eight_ranks(result) -> None:
    """Who came last, waiting and transfer as the traces' README has them; a masked straggler is called one."""
    found = result["collectives"]
    in_order = sorted(found["instances"], key=lambda one: (one["collective"], one["number"]))
    reduces, sends = in_order[:3], in_order[3:]
    assert [one["last_rank"] for one in sends + reduces] == [7, 7, 7, 7, 5, 7, 5, 4]
    assert [round(one["transfer_us"]) for one in sends + reduces] == [11, 8, 8, 8, 11, 87, 23, 69]
    assert [round(us) for us in found["wait_us"].values()] == [5580, 11125, 3280, 9571, 6370, 6041, 3342, 1534]
    assert set(found["clock_offset_us"].values()) == {0}
    straggler = next(one for one in result["findings"] if one["cause_class"] == "straggler")
    assert straggler["id"] == "straggler-masked-as-communication"
    assert straggler["evidence"][0]["ranks"] == [7]
    assert straggler["evidence"][0]["count"] == 5
    assert "96.5 % of the time in collectives is waiting" in straggler["claim"]
    assert not [one["id"] for one in result["findings"] if one["id"].startswith("exposed-a")]


@pytest.mark.skipif(not DLRM.exists(), reason="the public traces are not here")
def test_a_folder_of_ranks_becomes_one_report(monkeypatch, capsys, tmp_path):
    out = tmp_path / "report.json"
    code, text, _ = run(monkeypatch, capsys, "explain", str(DLRM), "--json", str(out))
    assert (code, text) == (0, "")
    result = json.loads(out.read_text())
    assert set(result) >= {"inputs", "health", "ranks", "findings", "collectives"}
    assert [rank["rank"] for rank in result["ranks"]] == list(range(8))
    assert all(set(rank) >= RANK_KEYS for rank in result["ranks"])
    assert all(set(finding) >= FINDING_KEYS for finding in result["findings"])
    shares = [finding["recoverable"]["share"] for finding in result["findings"]]
    assert shares == sorted(shares, reverse=True)
    assert result["health"]["verdict"] == "caveats"
    known_answers_of_the_eight_ranks(result)
    assert {one["kind"] for one in result["inputs"]} == {"kineto"}


def test_the_terminal_tells_health_budget_and_findings(monkeypatch, capsys, tmp_path):
    path = steps(tmp_path / "trace.json", loader_us=4_000)
    code, text, _ = run(monkeypatch, capsys, "explain", str(path))
    assert code == 0
    assert "health: sound" in text
    assert "The data loader stalls the step" in text
    assert "--set data.workers=8" in text
    assert text.index("health") < text.index("where the time") < text.index("1. ")


def test_a_gzip_of_another_name_is_told_by_its_content(monkeypatch, capsys, tmp_path):
    packed = tmp_path / "profile.bin"
    packed.write_bytes(gzip.compress(steps(tmp_path / "trace.json").read_bytes()))
    code, text, _ = run(monkeypatch, capsys, "explain", str(packed), "--json", "-")
    assert code == 0
    assert json.loads(text)["ranks"][0]["window_us"] > 40_000


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "does not exist"),
        (b"", "the file is empty"),
        (b"hello, this is prose", "not recognised by its content"),
        (b'{"traceEvents": 5}', "not a Chrome or PyTorch-profiler trace"),
        (b"\x1f\x8b\x08\x00broken", "not recognised by its content"),
    ],
)
def test_bad_input_is_told_in_a_line(monkeypatch, capsys, tmp_path, content, message):
    path = tmp_path / "input"
    if content is not None:
        path.write_bytes(content)
    code, out, err = run(monkeypatch, capsys, "explain", str(path))
    assert (code, out) == (2, "")
    assert len(err.strip().splitlines()) == 1
    assert str(path) in err
    assert message in err


def test_folders_that_lead_back_to_themselves_and_pipes_are_no_trap(monkeypatch, capsys, tmp_path):
    folder = tmp_path / "traces"
    folder.mkdir()
    steps(folder / "rank0.json")
    (folder / "again").symlink_to(folder)
    os.mkfifo(folder / "pipe")
    code, text, _ = run(monkeypatch, capsys, "explain", str(folder), "--json", "-")
    assert code == 0
    assert len(json.loads(text)["inputs"]) == 1
    code, _, err = run(monkeypatch, capsys, "explain", str(folder / "pipe"))
    assert code == 2
    assert "no regular file" in err


def test_files_of_many_ranks_are_read_in_processes_beside_each_other(monkeypatch, capsys, tmp_path):
    for rank in range(3):
        steps(tmp_path / f"rank{rank}.json", rank=rank)
    _, alone, _ = run(monkeypatch, capsys, "explain", str(tmp_path), "--json", "-")
    monkeypatch.setattr("headway.explain.kineto.WORTH_A_PROCESS_BYTES", 0)
    _, beside, _ = run(monkeypatch, capsys, "explain", str(tmp_path), "--json", "-")
    assert json.loads(beside) == json.loads(alone)


def test_a_trace_that_ends_at_once_is_inconclusive(monkeypatch, capsys, tmp_path):
    path = tmp_path / "trace.json"
    path.write_text('{"traceEvents": [')
    code, out, _ = run(monkeypatch, capsys, "explain", str(path))
    assert code == 0
    assert "inconclusive" in out
    assert "ends in the middle" in " ".join(out.split())


def test_one_unreadable_rank_of_several_is_a_health_message(monkeypatch, capsys, tmp_path):
    steps(tmp_path / "rank0.json")
    (tmp_path / "rank1.json").write_text('{"traceEvents": 5}')
    code, text, _ = run(monkeypatch, capsys, "explain", str(tmp_path), "--json", "-")
    result = json.loads(text)
    assert code == 0
    assert result["health"]["verdict"] == "inconclusive"
    assert [message["id"] for message in result["health"]["messages"]] == ["unreadable"]
    assert len(result["ranks"]) == 1


def test_ranks_that_files_do_not_name_are_told_by_their_names_or_numbered(monkeypatch, capsys, tmp_path):
    for name in ("worker3.json", "other.json"):
        steps(tmp_path / name)
        members = json.loads((tmp_path / name).read_text())
        del members["distributedInfo"]
        (tmp_path / name).write_text(json.dumps(members))
    code, text, _ = run(monkeypatch, capsys, "explain", str(tmp_path), "--json", "-")
    assert code == 0
    assert {rank["rank"] for rank in json.loads(text)["ranks"]} == {0, 3}


def test_two_traces_of_one_rank_are_told_apart(monkeypatch, capsys, tmp_path):
    steps(tmp_path / "a.json")
    steps(tmp_path / "b.json")
    _, text, _ = run(monkeypatch, capsys, "explain", str(tmp_path), "--json", "-")
    result = json.loads(text)
    assert [rank["rank"] for rank in result["ranks"]] == [0, 1]
    assert "rank-twice" in {message["id"] for message in result["health"]["messages"]}


def test_a_second_run_is_compared_by_cause(monkeypatch, capsys, tmp_path):
    first, second = steps(tmp_path / "a.json"), steps(tmp_path / "b.json", loader_us=3_200)
    _, text, _ = run(monkeypatch, capsys, "explain", str(first), "--against", str(second), "--json", "-")
    comparison = json.loads(text)["comparison"]
    assert comparison["is_beyond_spread"]
    assert comparison["change_us"] == pytest.approx(3_000, rel=0.01)
    assert comparison["causes"][0]["cause"] == "idle_data_wait"
    assert sum(cause["change_us"] for cause in comparison["causes"]) == pytest.approx(comparison["change_us"])
    code, text, _ = run(monkeypatch, capsys, "explain", str(first), "--against", str(second))
    assert code == 0
    assert "most of it by idle data wait" in text


@pytest.mark.parametrize("second", [{"jitter": 0.04, "work_us": 512}, {"work_us": 503}])
def test_a_difference_within_the_spread_is_none(monkeypatch, capsys, tmp_path, second):
    first = steps(tmp_path / "a.json", jitter=0.04)
    steps(tmp_path / "b.json", **second)
    _, text, _ = run(monkeypatch, capsys, "explain", str(first), "--against", str(tmp_path / "b.json"), "--json", "-")
    comparison = json.loads(text)["comparison"]
    assert not comparison["is_beyond_spread"]
    assert "no difference" in comparison["text"]


@pytest.mark.skipif(not DLRM.exists(), reason="the public traces are not here")
def test_perfetto_gets_all_ranks_and_the_findings(monkeypatch, capsys, tmp_path):
    out = tmp_path / "all.json.gz"
    folder = tmp_path / "ranks"
    folder.mkdir()
    for rank in (4, 7):
        shutil.copy(next(DLRM.glob(f"worker{rank}_*")), folder)
    code, _, _ = run(monkeypatch, capsys, "explain", str(folder), "--perfetto", str(out))
    assert code == 0
    timeline = read_chrome_trace(out).timeline
    assert {4, 7} <= set(timeline.ranks())
    lanes = set(timeline.text("lane"))
    assert "findings" in lanes
    assert timeline.of_rank(7).kinds(Kind.COMMUNICATION).sum() == 8


@pytest.mark.skipif(not TRACES.exists(), reason="the public files are not here")
def test_every_public_file_is_told_by_its_content():
    inputs, passed_over = find_inputs([TRACES])
    of_folder = {
        "kineto": InputKind.KINETO,
        "flight_recorder": InputKind.FLIGHT_RECORDER,
        "memory": InputKind.MEMORY_SNAPSHOT,
        "nsys": InputKind.NSYS,
        "logs": InputKind.TABLE,
        "stragglers": InputKind.PIPELINE_EVENTS,
    }
    assert {path.name for path in passed_over} == {"README.md", "expected.json"}
    for one in inputs:
        assert one.kind is of_folder[one.path.relative_to(TRACES).parts[0]], one.path


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("[titan] step:  10  loss:  8.1  tps: 2,200\n", InputKind.LOG),
        ("{'loss': 2.31, 'grad_norm': 1.2, 'learning_rate': 5e-05, 'epoch': 0.02}\n", InputKind.LOG),
        (" iteration 20/ 100 | elapsed time per iteration (ms): 812.1 | lm loss: 9.1E+00 |\n", InputKind.LOG),
        ('[{"ph": "X", "name": "a", "ts": 1, "dur": 2}]', InputKind.KINETO),
        ("commit\ttps\tstatus\nabc\t12\tkeep\n", InputKind.TABLE),
        ('{"version": "2.9", "pg_config": {}, "entries": []}', InputKind.FLIGHT_RECORDER),
        ('{"distributedInfo": {"pg_config": []}, "traceEvents": []}', InputKind.KINETO),
        ("# A title\n\nSome prose about training.\n", None),
        ('{"a": 1}', None),
    ],
)
def test_text_is_told_by_its_content(tmp_path, text, kind):
    (tmp_path / "file").write_text(text)
    assert kind_of(tmp_path / "file") is kind
