import contextlib
import io
import json
import os
import pickle
import random
import resource
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from checkpointed_run import Run, save_steps
from headway.errors import UserError
from headway.recipe import CheckpointRecipe
from headway.train.checkpoint_manifest import (
    checkpoints_in,
    hashed,
    newest_good,
    problems,
    read_manifest,
    write_manifest,
)
from headway.train.checkpoint_reading import read_full, read_values
from headway.train.checkpoints import Checkpoints
from ranks import _rank_main, fork, run_ranks
from shards import masters_of, shard


def file_size_limit_on_rank_1(directory: Path) -> list:
    run = Run(directory, steps=1)
    run.checkpoints.save(1, run.state(step=1), final=True)
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
    run.checkpoints.save(2, run.state(step=2))
    whole = run.checkpoints.finish()
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    run.checkpoints.save(3, run.state(step=3))
    return [whole, run.checkpoints.finish(), run.events]


def test_when_one_rank_cannot_write_all_ranks_say_so_and_training_goes_on(tmp_path):
    for whole, next_whole, events in run_ranks(2, file_size_limit_on_rank_1, tmp_path, timeout_s=60):
        assert not whole
        assert next_whole
        assert [kind for kind, _ in events] == ["checkpoint_saved", "checkpoint_failed", "checkpoint_saved"]
        failure = events[1][1]
        assert failure["step"] == 2
        assert "rank 1" in failure["message"]
        assert failure["bytes_needed"] > 1000
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001", "step-00000003"]


@contextlib.contextmanager
def small_disk(folder: Path, kibibytes: int):
    if os.geteuid() != 0:
        pytest.skip("mounting a small disk needs root")
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={kibibytes}k", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"a small disk can't be mounted here: {mounted.stderr.decode()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def fill_the_disk(directory: Path, state_of: str) -> list:
    events = []
    checkpoints = Checkpoints(directory, CheckpointRecipe(), lambda kind, fields: events.append((kind, fields)))
    checkpoints.save(1, {"model": {"small": torch.ones(4)}}, final=True)
    # The tiny ones are few numbers but many headers: more than the estimate, so that the disk fills while writing.
    states = {"large": {"large": torch.ones(10**6)}, "tiny": {f"tiny{i}": torch.ones(1) for i in range(600)}}
    checkpoints.save(2, {"model": states[state_of]})
    return [checkpoints.finish(), events]


@pytest.mark.parametrize("state_of", ["large", "tiny"])
def test_a_full_disk_leaves_the_old_checkpoint_and_tells_what_is_missing(tmp_path, state_of):
    with small_disk(tmp_path / "disk", 512) as disk:
        for whole, events in run_ranks(2, fill_the_disk, disk, state_of, timeout_s=60):
            assert not whole
            assert [kind for kind, _ in events] == ["checkpoint_saved", "checkpoint_failed"]
            failure = events[1][1]
            assert f"{failure['bytes_needed']:,} bytes" in failure["message"]
            assert f"{failure['bytes_free']:,} are free" in failure["message"]
            if state_of == "large":
                assert failure["bytes_needed"] >= 4_000_000
            else:
                assert "rank" in failure["reason"]
        assert [path.name for path in disk.iterdir()] == ["step-00000001"]
        assert problems(disk / "step-00000001") == []


def unwritable(directory: Path) -> str:
    with pytest.raises(UserError) as caught:
        Checkpoints(directory, CheckpointRecipe(), lambda kind, fields: None)
    return str(caught.value)


def test_a_directory_that_cannot_be_made_is_a_users_mistake_on_all_ranks(tmp_path):
    (tmp_path / "file").write_text("")
    messages = run_ranks(2, unwritable, tmp_path / "file" / "checkpoints")
    assert all(str(tmp_path / "file" / "checkpoints") in message for message in messages)


def peer_dies_while_saving(directory: Path) -> None:
    run = Run(directory, steps=1)
    run.checkpoints.save(1, run.state(), final=True)
    if dist.get_rank() == 1:
        os._exit(1)
    run.checkpoints.save(2, run.state())
    whole = run.checkpoints.finish()
    (directory / "told.json").write_text(json.dumps([whole, run.events[-1]]))
    os._exit(0)


def test_a_dead_peer_ends_the_save_with_a_message_and_not_in_a_hang(tmp_path):
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            fork.Process(target=_rank_main, args=(rank, 2, folder, peer_dies_while_saving, (tmp_path,), 60.0))
            for rank in range(2)
        ]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join(30)
            rank.kill()
    whole, (kind, fields) = json.loads((tmp_path / "told.json").read_text())
    assert not whole
    assert kind == "checkpoint_failed"
    assert "step 2 could not be saved" in fields["message"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001", "told.json"]


# Damage


@pytest.fixture(scope="module")
def two_checkpoints(tmp_path_factory):
    directory = tmp_path_factory.mktemp("two")
    run_ranks(2, save_steps, directory, [1, 2])
    return directory


def damage(path: Path, kind: str) -> str:
    """Damage a checkpoint; gives the name of the file that must be named."""
    file = path / {"no_manifest": "manifest.json", "torn_manifest": "manifest.json"}.get(kind, "__1_0.distcp")
    content = bytearray(file.read_bytes())
    if kind in ("missing", "no_manifest"):
        file.unlink()
    elif kind in ("truncated", "torn_manifest"):
        file.write_bytes(content[: len(content) // 2])
    elif kind == "empty":
        file.write_bytes(b"")
    else:
        content[len(content) // 2] ^= 4
        file.write_bytes(content)
    return file.name


def resumed(directory: Path) -> list:
    run = Run(directory)
    path = run.checkpoints.newest_good()
    step = run.load(path)["step"] if path else None
    run.checkpoints.save(3, run.state(step=3), final=True)
    return [step, run.events]


@pytest.mark.parametrize("kind", ["missing", "truncated", "empty", "flipped", "no_manifest", "torn_manifest"])
def test_a_damaged_checkpoint_is_named_and_passed_over(two_checkpoints, tmp_path, kind):
    directory = tmp_path / "checkpoints"
    shutil.copytree(two_checkpoints, directory)
    named = damage(directory / "step-00000002", kind)
    for step, events in run_ranks(2, resumed, directory):
        assert step == 1
        assert [event for event, _ in events] == ["checkpoint_damaged", "checkpoint_saved", "checkpoint_removed"]
        assert "step-00000002" in events[0][1]["message"]
        assert named in events[0][1]["message"]
        assert len(events[0][1]["problems"]) == 1
    assert list(checkpoints_in(directory)) == [1, 3]  # the damaged one does not count among the two that are kept


def test_nothing_is_resumed_when_every_checkpoint_is_damaged(two_checkpoints, tmp_path):
    directory = tmp_path / "checkpoints"
    shutil.copytree(two_checkpoints, directory)
    for step in (1, 2):
        damage(directory / f"step-{step:08d}", "flipped")
    told = []
    assert newest_good(directory, lambda path, wrong: told.append((path.name, wrong))) is None
    assert [name for name, _ in told] == ["step-00000002", "step-00000001"]
    assert run_ranks(1, resumed, directory)[0][0] is None
    assert newest_good(tmp_path / "nowhere", lambda path, wrong: None) is None


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_flipped_bit_in_any_file_is_found(two_checkpoints, data):
    path = two_checkpoints / "step-00000002"
    file = path / data.draw(st.sampled_from(sorted(child.name for child in path.iterdir())))
    original = file.read_bytes()
    position = data.draw(st.integers(0, len(original) - 1))
    flipped = bytearray(original)
    flipped[position] ^= 1 << data.draw(st.integers(0, 7))
    try:
        file.write_bytes(flipped)
        assert file.name in problems(path)[0]
    finally:
        file.write_bytes(original)
    assert problems(path) == []


def misfit(directory: Path) -> list[str]:
    run = Run(directory, steps=1)
    run.checkpoints.save(1, run.state(), final=True)
    messages = []
    wrong = {"model": {"0.weight": torch.zeros(5, 7), "other": torch.zeros(1), "0.bias": torch.zeros(5).bfloat16()}}
    for state in (wrong, {"model": run.masters.whole}):
        with pytest.raises(UserError) as caught:
            run.checkpoints.load(directory / "step-00000001", state)
        messages.append(str(caught.value))
    return messages


def test_a_state_of_other_names_shapes_or_dtypes_is_refused(tmp_path):
    wrong, partial = run_ranks(2, misfit, tmp_path)[0]
    assert "more" in wrong
    assert "ema.0.5.0.bias is only in the checkpoint" in partial


# Nothing that is read runs code


class Evil:
    """Unpickling it makes a file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self):
        return (Path.touch, (self.file,))


def resign(path: Path) -> None:
    """Make the manifest fit what now lies in the checkpoint, as an attacker would."""
    manifest = read_manifest(path)
    write_manifest(path, manifest | {"files": hashed(path, manifest["files"])})


def load_refused(directory: Path) -> str:
    run = Run(directory)
    path = run.checkpoints.newest_good()
    assert path is not None
    with pytest.raises(UserError) as caught:
        run.load(path)
    return str(caught.value)


@pytest.mark.parametrize("where", ["index", "bytes_entry", "tensors", "elsewhere"])
def test_a_malicious_checkpoint_is_refused_and_runs_nothing(tmp_path, where):
    directory, made = tmp_path / "checkpoints", tmp_path / "made"
    run_ranks(1, save_steps, directory, [1])
    path = directory / "step-00000001"
    index = pickle.loads((path / ".metadata").read_bytes())
    if where == "index":
        index.planner_data = Evil(made)
    elif where == "bytes_entry":  # DCP would unpickle such an entry without restriction
        index.state_dict_metadata["model.0.weight"] = BytesStorageMetadata()
    elif where == "elsewhere":
        next(iter(index.storage_data.values())).relative_path = "../../secret"
    else:
        evil = io.BytesIO()
        torch.save(Evil(made), evil)
        (path / "__0_0.distcp").write_bytes(evil.getvalue())
        for entry in index.storage_data.values():
            entry.offset, entry.length = 0, len(evil.getvalue())
    (path / ".metadata").write_bytes(pickle.dumps(index))
    resign(path)
    for message in run_ranks(2, load_refused, directory):
        assert "step-00000001" in message
    with pytest.raises(UserError):
        read_full(path, "model")
    assert not made.exists()


# Killed runs


def save_until_killed(directory: Path) -> None:
    model = shard(torch.nn.Sequential(torch.nn.Linear(300, 300), torch.nn.Linear(300, 300)))
    checkpoints = Checkpoints(directory, CheckpointRecipe(), lambda kind, fields: None)
    newest = checkpoints.newest_good()
    state = {"model": masters_of(model).whole, "trainer": {"step": 0}}
    if newest:
        checkpoints.load(newest, state)
        assert all(bool((p.to_local() == state["trainer"]["step"]).all()) for p in model.parameters())
    for step in range(state["trainer"]["step"] + 1, 10_000):
        for parameter in model.parameters():
            parameter.to_local().detach().fill_(float(step))
        checkpoints.save(step, state | {"trainer": {"step": step}})


def test_a_run_killed_at_any_moment_of_saving_leaves_a_loadable_checkpoint(tmp_path):
    moments = random.Random(0)
    newest_step = 0
    for world in (2, 1, 2, 2, 1):
        with tempfile.TemporaryDirectory() as folder:
            ranks = [
                fork.Process(target=_rank_main, args=(rank, world, folder, save_until_killed, (tmp_path,), 60.0))
                for rank in range(world)
            ]
            for rank in ranks:
                rank.start()
            deadline = time.monotonic() + 60
            while max(checkpoints_in(tmp_path), default=0) <= newest_step:
                assert time.monotonic() < deadline
                assert all(rank.is_alive() for rank in ranks), Path(folder).glob("error-*")
                time.sleep(0.01)
            time.sleep(moments.uniform(0, 0.3))
            for rank in ranks:
                rank.kill()
            for rank in ranks:
                rank.join()
        damaged = []
        path = newest_good(tmp_path, lambda path, wrong: damaged.append(wrong))  # noqa: B023
        assert damaged == []
        step = read_values(path)["trainer"]["step"]
        assert step > newest_step
        assert all(bool((tensor == step).all()) for tensor in read_full(path, "model").values())
        newest_step = step


def started(directory: Path) -> list:
    run = Run(directory)
    return [run.events, run.checkpoints.newest_good()]


def test_what_a_killed_run_left_is_cleared_and_what_it_was_replacing_comes_back(two_checkpoints, tmp_path):
    directory = tmp_path / "checkpoints"
    shutil.copytree(two_checkpoints, directory)
    (directory / "step-00000002").rename(directory / ".step-00000002.replaced")
    (directory / ".step-00000003.partial").mkdir()
    (directory / ".step-00000000.deleting").mkdir()
    for events, newest in run_ranks(2, started, directory):
        assert events[0][1]["names"] == [".step-00000003.partial", ".step-00000000.deleting"]
        assert newest == directory / "step-00000002"
    assert sorted(path.name for path in directory.iterdir()) == ["step-00000001", "step-00000002"]
