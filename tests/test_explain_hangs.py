"""Hangs: flight-recorder dumps name the ranks at the root, their class, collective and group, and no victim."""

import os
import pickle
import random
import shutil
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from flight_dumps import as_json, recorded_job, write_dumps
from headway.errors import UserError
from headway.explain import Input, InputKind
from headway.explain.flight_recorder import explain_flight_recorder
from headway.explain.flight_recorder.job import axis_named
from ranks import run_ranks
from soak import soak

TRACES = Path(__file__).parent.parent.parent / "shared" / "traces" / "flight_recorder"
needs_traces = pytest.mark.skipif(not TRACES.is_dir(), reason="the published dumps are not here")
WORLD = {"default_pg": range(4)}


def explained(paths):
    return explain_flight_recorder([Input(Path(path), InputKind.FLIGHT_RECORDER) for path in paths])


def hang(paths):
    """Roots, class of the first finding, and ids of all findings."""
    said = explained(paths)
    return said.details["hang"]["root_ranks"], said.details["hang"]["class"], [finding.id for finding in said.findings]


def dumps_of(name):
    return sorted((TRACES / name).iterdir())


@needs_traces
def test_both_ranks_whose_interpreter_was_locked_are_named_and_no_victim():
    said = explained(dumps_of("lock_gil_a"))
    assert said.details["hang"]["root_ranks"] == [9, 14]
    (finding,) = said.findings
    assert finding.id == "hang-never-joined"
    assert "all_to_all 45265" in finding.title
    assert "EXPERT_MODEL_PARALLEL_GROUP), axis ep" in finding.title
    assert finding.evidence[0].ranks == (8, 10, 11, 12, 13, 15)
    assert not said.health


@needs_traces
def test_both_ranks_with_an_injected_gpu_error_are_named_the_isolated_one_first():
    said = explained(dumps_of("gpu_error_a"))
    assert said.details["hang"]["root_ranks"] == [12, 14]
    assert [finding.id for finding in said.findings] == ["hang-device-stopped"] * 2
    assert "never joined" in said.findings[0].claim
    assert "never joined" not in said.findings[1].claim


@needs_traces
@pytest.mark.parametrize("fault", ["lock_gil_a", "gpu_error_a"])
@pytest.mark.parametrize(
    "name",
    [
        "nccl_trace_rank_{rank}",
        "node7/{rank}.pkl",
        "{rank}/dump_2026-01-05.pkl",
        "fr-{rank}-of-16.trace",
        "job4711_rank{rank}_20260105_101112",
    ],
)
def test_files_of_any_name_are_told_apart(fault, name, tmp_path):
    paths = []
    for path in dumps_of(fault):
        rank = path.name.removeprefix("_dump_")
        copy = tmp_path / name.format(rank=rank)
        copy.parent.mkdir(parents=True, exist_ok=True)
        paths.append(shutil.copy(path, copy))
    random.Random(0).shuffle(paths)
    assert explained(paths).details["hang"] == explained(dumps_of(fault)).details["hang"]


@needs_traces
@pytest.mark.parametrize("fault", ["lock_gil_a", "gpu_error_a"])
def test_the_json_form_says_the_same(fault, tmp_path):
    for path in dumps_of(fault):
        (tmp_path / f"{path.name}.json").write_text(as_json(pickle.loads(path.read_bytes())))
    assert hang(tmp_path.iterdir())[:2] == hang(dumps_of(fault))[:2]


@needs_traces
def test_a_dump_that_is_missing_is_a_dead_peer_only_where_all_others_came():
    dumps = {int(path.name.removeprefix("_dump_")): path for path in dumps_of("lock_gil_a")}
    without_root = hang(path for rank, path in dumps.items() if rank not in (9, 14))
    assert without_root == ([9, 14], "dead-peer", ["hang-dead-peer"])
    said = explained(path for rank, path in dumps.items() if rank not in (3, 12))
    assert said.details["hang"]["root_ranks"] == [9, 14]
    assert said.details["hang"]["class"] == "never-joined"
    assert [message.id for message in said.health] == ["dumps-missing"]


def test_a_rank_that_never_joins_is_named_with_the_line_where_others_wait(tmp_path):
    ranks = recorded_job(4, WORLD)
    for rank in ranks:
        rank.call("default_pg").call("default_pg", "all_gather")
        if rank.rank != 2:
            rank.call("default_pg", "_reduce_scatter_base", done=False, at_ms=5)
    said = explained(write_dumps(tmp_path, ranks))
    assert said.details["hang"]["root_ranks"] == [2]
    (finding,) = said.findings
    assert finding.id == "hang-never-joined"
    assert "train.py:12" in finding.claim  # the third call
    assert "train.py:11" in finding.evidence[-1].text  # the last that the rank made


def test_what_waits_in_another_group_for_a_victim_is_no_root(tmp_path):
    """Rank 3 is stuck; 2 waits for it in tp; 0 and 1 wait in dp and by a message for 2 and 3."""
    ranks = recorded_job(4, {"default_pg": range(4), "mesh_tp": [2, 3], "mesh_dp": [0, 2], "mesh_pp": [1, 2]})
    ranks[2].call("mesh_tp", done=False)
    ranks[0].call("mesh_dp", done=False, at_ms=1)
    ranks[1].message("mesh_pp", "recv", 2, done=False, at_ms=2)
    said = explained(write_dumps(tmp_path, ranks))
    assert said.details["hang"]["root_ranks"] == [3]
    assert "axis tp" in said.findings[0].title
    assert "Waiting for those in turn: ranks 0-1" in said.findings[0].claim


def test_a_rank_whose_data_ended_and_went_on_to_a_barrier_is_the_one_that_left(tmp_path):
    ranks = recorded_job(4, {"default_pg": range(4), "mesh_dp_shard": range(4)})
    for rank in ranks:
        rank.call("mesh_dp_shard", "_all_gather_base")
        if rank.rank == 1:
            rank.call("default_pg", "barrier", done=False, at_ms=1)
        else:
            rank.call("mesh_dp_shard", "_all_gather_base", done=False, at_ms=2)
    said = explained(write_dumps(tmp_path, ranks))
    assert said.details["hang"]["root_ranks"] == [1]
    assert said.details["hang"]["class"] == "fewer-collectives"
    assert "same number of batches" in said.findings[0].fix.text
    assert "barrier" in said.findings[0].evidence[1].text


@pytest.mark.parametrize(
    ("odd", "what"),
    [
        ({"size": [17]}, "size"),
        ({"dtype": "Float"}, "element type"),
        ({"name": "all_gather"}, "operation"),
    ],
)
def test_a_call_that_differs_from_the_others_names_the_rank_that_made_it(odd, what, tmp_path):
    ranks = recorded_job(4, WORLD)
    for rank in ranks:
        rank.call("default_pg").call("default_pg", **({"done": False} | (odd if rank.rank == 3 else {})))
    roots, likely, findings = hang(write_dumps(tmp_path, ranks))
    assert (roots, likely, findings) == ([3], "mismatch", ["hang-mismatch"])
    said = explained(tmp_path.iterdir())
    assert what in said.findings[0].title


@pytest.mark.parametrize("name", ["all_to_all", "gather", "scatter"])
def test_sizes_that_may_differ_are_no_mismatch(name, tmp_path):
    """Near miss: rows per rank of an all-to-all differ; the totals agree."""
    ranks = recorded_job(2, {"default_pg": range(2)})
    uneven = {"all_to_all": [(8, 4), (4, 8)], "gather": [(4, 8), (4, 0)], "scatter": [(8, 4), (0, 4)]}[name]
    for rank, (given, taken) in zip(ranks, uneven, strict=True):
        rank.call("default_pg", name, size=[given], out=[taken], done=False)
    assert "hang-mismatch" not in hang(write_dumps(tmp_path, ranks))[2]


def test_splits_of_an_all_to_all_name_the_pair_only_where_the_dump_tells_them(tmp_path):
    """Rank 0 sends 3 elements to rank 1, which takes 1; rank 2 takes 3 of its own 1: the totals agree."""
    ranks = recorded_job(3, {"default_pg": range(3)})
    sent = [[1, 3, 1], [1, 1, 1], [1, 1, 1]]
    taken = [[1, 1, 1], [1, 1, 1], [1, 1, 3]]
    for number, rank in enumerate(ranks):
        splits = {"input_split_sizes": sent[number], "output_split_sizes": taken[number]}
        rank.call("default_pg", "all_to_all", size=[sum(sent[number])], out=[sum(taken[number])], done=False, **splits)
    roots, likely, _ = hang(write_dumps(tmp_path, ranks))
    assert (roots, likely) == ([0, 1, 2], "mismatch")
    assert "sends 3 elements to rank 1, which takes 1" in explained(tmp_path.iterdir()).findings[0].claim
    for rank in ranks:
        for entry in rank.entries:
            del entry["input_split_sizes"], entry["output_split_sizes"]
    assert "hang-mismatch" not in hang(write_dumps(tmp_path, ranks))[2]


def test_a_rank_that_skips_a_collective_is_said_to_have_left_it_out(tmp_path):
    ranks = recorded_job(4, WORLD)
    for rank in ranks:
        rank.call("default_pg", "all_gather")
        if rank.rank != 1:
            rank.call("default_pg", "broadcast", done=False)
        rank.call("default_pg", "all_reduce", done=False).call("default_pg", "reduce_scatter", done=False)
    said = explained(write_dumps(tmp_path, ranks))
    assert said.details["hang"]["root_ranks"] == [1]
    assert [finding.id for finding in said.findings] == ["hang-mismatch"]
    assert "Rank 1 left out broadcast" in said.findings[0].claim


def test_a_device_that_stopped_is_told_by_what_its_peers_finished(tmp_path):
    ranks = recorded_job(4, WORLD)
    for rank in ranks:
        for step in range(3):
            rank.call("default_pg", done=rank.rank != 1, at_ms=step)
        if rank.rank != 1:
            rank.call("default_pg", done=False, at_ms=9)
    roots, likely, findings = hang(write_dumps(tmp_path, ranks))
    assert (roots, likely, findings) == ([1], "device-stopped", ["hang-device-stopped"])


def test_one_collective_not_yet_noticed_as_finished_is_no_stopped_device(tmp_path):
    """Near miss: the library looks every 100 ms."""
    ranks = recorded_job(4, WORLD)
    for rank in ranks:
        rank.call("default_pg").call("default_pg", done=rank.rank != 1)
    said = explained(write_dumps(tmp_path, ranks))
    assert said.details["hang"]["root_ranks"] == []


def test_a_collective_that_all_joined_and_none_finished_is_left_to_the_transport(tmp_path):
    ranks = recorded_job(4, WORLD)
    for rank in ranks:
        rank.call("default_pg").call("default_pg", done=False)
    said = explained(write_dumps(tmp_path, ranks))
    assert [finding.id for finding in said.findings] == ["hang-transport"]
    assert said.findings[0].confidence == "low"


def test_a_job_that_does_not_hang_has_no_finding(tmp_path):
    ranks = recorded_job(4, WORLD)
    for rank in ranks:
        rank.call("default_pg").message("default_pg", "send" if rank.rank % 2 else "recv", rank.rank ^ 1)
    said = explained(write_dumps(tmp_path, ranks))
    assert said.findings == ()
    assert [message.id for message in said.health] == ["no-hang"]


def test_a_broadcast_that_its_root_has_left_keeps_nobody_waiting(tmp_path):
    ranks = recorded_job(4, WORLD)
    for rank in ranks[:2]:
        rank.call("default_pg", "broadcast", done=rank.rank == 0)
    assert hang(write_dumps(tmp_path, ranks))[0] == []


def test_dumps_that_tell_no_rank_give_a_caveat(tmp_path):
    ranks = recorded_job(4, WORLD)
    for rank in ranks:
        if rank.rank:
            rank.call("default_pg", done=False)
    names = ["left", "right", "up", "down"]
    paths = [path.rename(tmp_path / name) for path, name in zip(write_dumps(tmp_path, ranks), names, strict=True)]
    assert "ranks-unknown" in [message.id for message in explained(paths).health]


@pytest.mark.parametrize(
    ("description", "axis"),
    [
        ("TENSOR_MODEL_PARALLEL_GROUP", "tp"),
        ("PIPELINE_MODEL_PARALLEL_GROUP", "pp"),
        ("DATA_PARALLEL_GROUP_WITH_CP", "dp"),
        ("TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP", "dp_tp"),
        ("EXPERT_MODEL_PARALLEL_GROUP", "ep"),
        ("EXPERT_DATA_PARALLEL_GROUP", "ep_dp"),
        ("CONTEXT_PARALLEL_GROUP", "cp"),
        ("mesh_dp_shard", "dp_shard"),
        ("default_pg", "world"),
        ("undefined", ""),
    ],
)
def test_the_mesh_axis_is_read_of_the_groups_description(description, axis):
    assert axis_named(description) == axis


def _record_a_hang(folder: Path, kind: str) -> None:
    """What a rank of a real job does, and its dump while it hangs."""
    rank = dist.get_rank()
    pair = dist.new_group([0, 1], group_desc="mesh_tp")
    for _ in range(2):
        dist.all_reduce(torch.ones(8))
    works = []
    if kind == "never joined" and rank != 2:
        works.append(dist.all_reduce(torch.ones(8), async_op=True))
    elif kind == "through another group":
        if rank == 0:
            works.append(dist.all_reduce(torch.ones(4), group=pair, async_op=True))
        if rank == 2:
            works.append(dist.all_reduce(torch.ones(8), async_op=True))
        if rank == 0:
            works.append(dist.all_reduce(torch.ones(8), async_op=True))
    elif kind == "none":
        dist.all_reduce(torch.ones(8))
    time.sleep(0.3)
    (folder / f"dump_{rank}").write_bytes(torch._C._distributed_c10d._dump_fr_trace(True, True, False))
    for ready in range(dist.get_world_size()):
        while not (folder / f"dump_{ready}").exists():
            time.sleep(0.01)
    os._exit(0)


@pytest.mark.parametrize(
    ("kind", "roots"),
    [("never joined", [2]), ("through another group", [1]), soak("none", [])],
)
def test_real_ranks_that_hang_on_gloo_are_told_apart(kind, roots, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "100")
    with pytest.raises(FileNotFoundError):  # the ranks leave without a result: they hang
        run_ranks(3, _record_a_hang, tmp_path, kind)
    said = explained(sorted(tmp_path.iterdir()))
    assert said.details["hang"]["root_ranks"] == roots
    if roots:
        assert "test_explain_hangs.py" in said.findings[0].claim


@pytest.mark.parametrize("content", [b"", b"\x80\x02}.", b"[1, 2]", b'{"pg_config": 3, "entries": []}', b"\x80\x02]."])
def test_what_is_no_dump_is_told_in_one_line(content, tmp_path):
    (tmp_path / "dump_0").write_bytes(content)
    with pytest.raises(UserError) as error:
        explained([tmp_path / "dump_0"])
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("mutations", [100, soak(5000)])
def test_mutated_dumps_end_in_a_message_and_never_in_a_traceback(mutations, tmp_path):
    ranks = recorded_job(3, {"default_pg": range(3), "mesh_tp": [1, 2]})
    for rank in ranks:
        rank.call("default_pg").call("default_pg", "all_gather", done=rank.rank == 2)
        if rank.rank:
            rank.call("mesh_tp", done=False).message("mesh_tp", "send", 3 - rank.rank, done=False)
    paths = write_dumps(tmp_path, ranks)
    whole = [path.read_bytes() for path in paths]
    generator = random.Random(3)
    for _ in range(mutations):
        for path, content in zip(paths, whole, strict=True):
            mutated = bytearray(content if generator.random() < 0.8 else content[: generator.randrange(len(content))])
            for _ in range(generator.choice([0, 1, 3]) if mutated else 0):
                mutated[generator.randrange(len(mutated))] = generator.randrange(256)
            path.write_bytes(mutated)
        try:
            said = explained(paths)
        except UserError:
            continue
        assert all("\n" not in message.text for message in said.health)


@pytest.mark.parametrize("values", [50, soak(3000)])
def test_entries_of_the_wrong_type_are_left_out_and_counted(values, tmp_path):
    generator = random.Random(4)
    strange = [None, -1, 2**70, "x", [], {}, [[None]], 0.5, True, "9" * 30]
    for _ in range(values):
        (rank,) = recorded_job(1, {"default_pg": range(1)})
        rank.call("default_pg", done=False)
        content = rank.content()
        for place in [content, content["entries"][0], content["pg_config"]["0"], content["pg_status"]["0"]]:
            place[generator.choice(list(place))] = generator.choice(strange)
        (tmp_path / "_dump_0").write_bytes(pickle.dumps(content, 2))
        try:
            explained([tmp_path / "_dump_0"])
        except UserError as error:
            assert "dump" in str(error)  # noqa: PT017
