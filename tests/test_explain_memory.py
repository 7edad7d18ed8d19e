"""Memory snapshots: what holds the peak, holes, errors, growth and cache flushes, and history that is missing."""

import pickle
import random
from pathlib import Path

import pytest

from headway.errors import UserError
from headway.explain import Input, InputKind
from headway.explain.memory_snapshot import explain_memory_snapshot
from soak import soak

FORWARD = Path(__file__).parent.parent.parent / "shared" / "traces" / "memory" / "forward_bf16.pickle"
MIB = 1 << 20
needs_traces = pytest.mark.skipif(not FORWARD.is_file(), reason="the published snapshot is not here")


def stack(*frames):
    """Innermost first: ``("model.py", "forward")``."""
    return [{"filename": file, "name": name, "line": 7} for file, name in frames]


TRAIN = ("train.py", "<module>")
STACKS = {
    "parameters": stack(("torch/nn/modules/module.py", "_apply"), TRAIN),
    "activations": stack(("model.py", "forward"), ("torch/nn/modules/module.py", "_call_impl"), TRAIN),
    "recomputed": stack(("model.py", "forward"), ("torch/utils/checkpoint.py", "unpack_hook"), TRAIN),
    "optimizer": stack(("torch/optim/adamw.py", "_init_group"), TRAIN),
    "gradients": stack(("", "torch::autograd::AccumulateGrad::apply"), ("", "torch::autograd::Engine::thread_main")),
    "communication": stack(("torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py", "unshard"), TRAIN),
    "backward": [],
}


class RecordedDevice:
    """An allocator's history, and the segments that it leaves; blocks lie one after the other in one segment."""

    def __init__(self, reserved_mib: int = 1000) -> None:
        self.reserved = reserved_mib * MIB
        self.trace: list[dict] = []
        self.live: dict[int, tuple[int, list]] = {}
        self._next = 0

    def act(self, action, address=0, mib=0.0, frames=(), **more):
        entry = {"action": action, "addr": address, "size": int(mib * MIB), "stream": 0, "frames": list(frames), **more}
        self.trace.append(entry | {"time_us": 1000 * len(self.trace)})

    def alloc(self, kind, mib, recorded=True):
        """Allocate and return the address."""
        address, self._next = self._next, self._next + int(mib * MIB)
        self.live[address] = int(mib * MIB), STACKS[kind]
        if recorded:
            self.act("alloc", address, mib, STACKS[kind])
        return address

    def free(self, *addresses):
        """Free what was allocated at the addresses."""
        for address in addresses:
            size, frames = self.live.pop(address)
            for action in ("free_requested", "free_completed"):
                self.act(action, address, size / MIB, frames)

    def content(self, **more):
        """What the snapshot holds."""
        blocks, place = [], 0
        for address, (size, frames) in sorted(self.live.items()):
            if address > place:
                blocks.append({"address": place, "size": address - place, "state": "inactive", "frames": []})
            blocks.append({"address": address, "size": size, "state": "active_allocated", "frames": frames})
            place = address + size
        if place < self.reserved:
            blocks.append({"address": place, "size": self.reserved - place, "state": "inactive", "frames": []})
        segment = {"device": 0, "address": 0, "total_size": self.reserved, "blocks": blocks}
        return {"segments": [segment], "device_traces": [self.trace], "allocator_settings": {}, **more}


def explained(tmp_path, recorded, **more):
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(pickle.dumps(recorded.content(**more), protocol=4))
    return explain_memory_snapshot([Input(path, InputKind.MEMORY_SNAPSHOT)])


def ids(said):
    return [finding.id for finding in said.findings]


@needs_traces
def test_the_published_snapshots_peak_is_that_of_its_history_added_up():
    content = pickle.loads(FORWARD.read_bytes())
    in_use = [0]
    for entry in content["device_traces"][0]:
        change = {"alloc": entry["size"], "free_completed": -entry["size"]}.get(entry["action"], 0)
        in_use.append(in_use[-1] + change)
    at_the_end = sum(segment["active_size"] for segment in content["segments"])
    said = explain_memory_snapshot([Input(FORWARD, InputKind.MEMORY_SNAPSHOT)])
    (memory,) = said.details["memory"]
    assert memory["peak_gib"] * 2**30 == at_the_end - in_use[-1] + max(in_use)
    assert memory["reserved_at_peak_gib"] * 2**30 == sum(segment["total_size"] for segment in content["segments"])
    assert set(memory["held_by"]) == {"before recording", "activations"}
    assert memory["held_by"]["activations"] * 2**30 == max(in_use)
    assert ids(said) == ["memory-peak-activations"]
    assert "swiglu.py" in "".join(event for evidence in said.findings[0].evidence for event in evidence.events)
    assert [message.id for message in said.health] == ["allocated-before-recording"]


@pytest.mark.parametrize(
    ("kind", "id"),
    [
        ("activations", "memory-peak-activations"),
        ("recomputed", "memory-peak-recomputed-activations"),
        ("optimizer", "memory-peak-optimizer"),
        ("gradients", "memory-peak-gradients"),
        ("communication", "memory-peak-communication"),
        ("backward", "memory-peak-backward"),
        ("parameters", "memory-peak-parameters"),
    ],
)
def test_the_purpose_that_holds_most_of_the_peak_is_named(kind, id, tmp_path):
    device = RecordedDevice(420)
    for part in STACKS:
        for _ in range(10):
            device.alloc(part, 10 if part == kind else 5)
    device.free(*list(device.live)[::2])
    said = explained(tmp_path, device)
    assert ids(said)[0] == id
    assert said.details["memory"][0]["peak_gib"] * 1024 == 400


def test_activations_of_a_step_inside_an_optimizers_closure_are_none_of_the_optimizer(tmp_path):
    """As Lightning runs its steps."""
    device = RecordedDevice(10)
    inside = [*STACKS["activations"][:2], *stack(("loop.py", "closure"), ("torch/optim/adamw.py", "step"), TRAIN)]
    for place in range(10):
        device.act("alloc", place * MIB, 1, inside)
    device.live = {place * MIB: (MIB, inside) for place in range(10)}
    assert ids(explained(tmp_path, device)) == ["memory-peak-activations"]


@pytest.mark.parametrize(("mib", "found"), [(120, True), (60, False)])
def test_one_tensor_that_stands_out_is_told_with_its_place(mib, found, tmp_path):
    device = RecordedDevice(400)
    for _ in range(30):
        device.alloc("activations", 10)
    device.alloc("activations", mib)
    said = explained(tmp_path, device)
    assert ("memory-one-tensor" in ids(said)) is found


@pytest.mark.parametrize(("every", "found"), [(2, True), (20, False)])
def test_holes_between_blocks_in_use_are_fragmentation(every, found, tmp_path):
    device = RecordedDevice(1000)
    blocks = [device.alloc("activations", 10) for _ in range(100)]
    device.trace.clear()  # the history begins after the blocks were made
    device.free(*blocks[::every])
    device.trace.clear()
    device.alloc("activations", 1, recorded=False)
    said = explained(tmp_path, device)
    assert ("memory-fragmentation" in ids(said)) is found


def test_an_error_of_the_allocator_says_whether_memory_was_scattered(tmp_path):
    device = RecordedDevice(1000)
    blocks = [device.alloc("activations", 10) for _ in range(100)]
    device.free(*blocks[::2])
    device.act("oom", mib=300, frames=STACKS["activations"], device_free=10 * MIB)
    claim = next(f.claim for f in explained(tmp_path, device).findings if f.id == "memory-out-of-memory")
    assert "There is not enough unused memory" in claim  # at the peak all blocks were in use
    device.trace = [entry for entry in device.trace if entry["action"] == "oom"]
    claim = next(f.claim for f in explained(tmp_path, device).findings if f.id == "memory-out-of-memory")
    assert "this is fragmentation" in claim


@pytest.mark.parametrize(("kept_mib", "found"), [(4, True), (0, False)])
def test_memory_that_is_kept_from_step_to_step_is_growth(kept_mib, found, tmp_path):
    device = RecordedDevice(2000)
    for _ in range(32):
        step = [device.alloc("activations", 10) for _ in range(6)]
        if kept_mib:
            device.alloc("activations", kept_mib)
        device.free(*step)
    assert ("memory-growth" in ids(explained(tmp_path, device))) is found


def test_a_forward_pass_alone_is_no_growth(tmp_path):
    """Near miss: it rises from beginning to end."""
    device = RecordedDevice(2000)
    for _ in range(100):
        device.alloc("activations", 10)
        device.free(device.alloc("activations", 1))
    assert "memory-growth" not in ids(explained(tmp_path, device))


@pytest.mark.parametrize(
    ("cycles", "frames", "fix"),
    [
        (4, [], "expandable_segments"),
        (4, stack(("torch/cuda/memory.py", "empty_cache"), TRAIN), "out of the loop"),
        (2, [], None),
    ],
)
def test_segments_given_back_and_taken_again_are_cache_flushes(cycles, frames, fix, tmp_path):
    device = RecordedDevice(1000)
    for cycle in range(cycles):
        device.act("segment_free", 5000 * MIB, 200, frames)
        device.act("segment_alloc", (6000 + cycle) * MIB, 300)
        for _ in range(20):
            device.free(device.alloc("activations", 10))
    said = [finding for finding in explained(tmp_path, device).findings if finding.id == "memory-cache-flushes"]
    assert bool(said) is (fix is not None)
    if fix:
        assert fix in said[0].fix.text
        assert said[0].recoverable.high_us > 0


def test_what_the_history_does_not_hold_is_told(tmp_path):
    device = RecordedDevice(100)
    device.free(device.alloc("activations", 10, recorded=False))
    device.alloc("activations", 1)
    assert "history-begins-late" in [message.id for message in explained(tmp_path, device).health]
    overflowed = explained(tmp_path, device, trace_alloc_overflowed=[True])
    assert "history-overflowed" in [message.id for message in overflowed.health]
    device.trace = []
    assert [message.id for message in explained(tmp_path, device).health] == ["no-history"]


def test_a_whole_history_with_stacks_needs_no_caveat(tmp_path):
    device = RecordedDevice(100)
    device.free(device.alloc("activations", 10))
    assert explained(tmp_path, device, trace_alloc_overflowed=[False]).health == ()


@pytest.mark.parametrize("content", [{}, {"segments": 3}, {"segments": [], "device_traces": [[]]}, []])
def test_what_is_no_snapshot_is_told_in_one_line(content, tmp_path):
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(pickle.dumps(content))
    with pytest.raises(UserError) as error:
        explain_memory_snapshot([Input(path, InputKind.MEMORY_SNAPSHOT)])
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("mutations", [100, soak(5000)])
def test_mutated_snapshots_end_in_a_message_and_never_in_a_traceback(mutations, tmp_path):
    device = RecordedDevice(100)
    device.free(*[device.alloc(kind, 4) for kind in STACKS])
    device.alloc("activations", 4)
    whole = pickle.dumps(device.content(), protocol=4)
    generator = random.Random(6)
    path = tmp_path / "snapshot.pickle"
    told = []
    for _ in range(mutations):
        mutated = bytearray(whole if generator.random() < 0.9 else whole[: generator.randrange(1, len(whole))])
        for _ in range(generator.randint(1, 3)):
            mutated[generator.randrange(len(mutated))] = generator.randrange(256)
        path.write_bytes(mutated)
        try:
            explain_memory_snapshot([Input(path, InputKind.MEMORY_SNAPSHOT)])
        except UserError as error:
            told.append(str(error))
    assert told
    assert not [line for line in told if "\n" in line]


@pytest.mark.parametrize("values", [100, soak(3000)])
def test_entries_of_the_wrong_type_are_left_out_and_counted(values, tmp_path):
    generator = random.Random(7)
    strange = [None, -1, 2**70, "x", [], {}, [None], 0.5, True]
    path = tmp_path / "snapshot.pickle"
    for _ in range(values):
        device = RecordedDevice(100)
        device.free(device.alloc("activations", 4))
        device.alloc("optimizer", 4)
        content = device.content()
        segment = content["segments"][0]
        for place in generator.sample([content, segment, segment["blocks"][0], content["device_traces"][0][0]], 2):
            place[generator.choice(list(place))] = generator.choice(strange)
        path.write_bytes(pickle.dumps(content))
        try:
            explain_memory_snapshot([Input(path, InputKind.MEMORY_SNAPSHOT)])
        except UserError as error:
            assert "snapshot" in str(error)  # noqa: PT017
