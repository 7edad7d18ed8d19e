"""Schedules that can be worked out by hand are played exactly, and all others keep what every schedule must."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headway.cluster import cluster_named
from headway.errors import UserError
from headway.rehearse.predicted_timeline import timeline_of
from headway.rehearse.prediction import collectives_table, operators_table, predict
from headway.rehearse.program import program_of
from headway.rehearse.record import COMPUTE, Group, Product, Record
from headway.rehearse.simulate import simulate
from headway.timeline import Kind, breakdown, read_chrome_trace, write_chrome_trace
from rehearsed_steps import Step, exact_cluster, played

moderate = settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
SHARD = {"shard": Group("shard", tuple(range(8)))}


def starts(step: Step, **host: float) -> list[int]:
    return played([step.record()], exact_cluster(**host)).ranks[0].start_ns.tolist()


def test_lanes_run_beside_each_other_and_wait_for_what_they_need():
    step = Step()
    first = step.run(10)
    copied = step.run(20, "fsdp copy-in", (first,))
    step.run(5)
    step.run(7, after=(copied,))
    assert starts(step) == [0, 10, 10, 30]


def test_a_device_never_starts_what_the_host_has_not_launched():
    step = Step()
    for _ in range(4):
        step.run(1_000)
    step.run(20_000)
    step.run(1_000)
    assert starts(step, launch_us=5) == [5_000, 10_000, 15_000, 20_000, 25_000, 45_000]
    shares = predict([step.record()], exact_cluster(launch_us=5)).shares
    assert shares.host == pytest.approx(5e-6 + 4 * 4e-6)
    assert shares.compute == pytest.approx(25e-6)
    assert shares.bubble == 0


def test_the_host_launches_nothing_while_it_waits_for_the_device():
    step = Step()
    loss = step.run(50_000)
    step.run(10_000)
    step.host_read(loss)
    step.run(1_000)
    step.run(1_000)
    assert starts(step, launch_us=2) == [2_000, 52_000, 62_000, 63_000]
    record = step.record()
    record.host_reads[0] = replace(record.host_reads[0], after=(1,))
    assert played([record], exact_cluster(launch_us=2)).ranks[0].start_ns.tolist() == [2_000, 52_000, 64_000, 66_000]


def fsdp_forward(prefetched: bool) -> Step:
    """Four blocks, each gathered in 70 ns and computed in 100."""
    step = Step(world=8, groups=SHARD)
    computed: tuple[int, ...] = ()
    for _ in range(4):
        gathered = step.talk("all_gather", 70, "shard", "fsdp all-gather", () if prefetched else computed)
        computed = (step.run(100, after=(gathered,)),)
    return step


def test_prefetching_hides_all_gathers_but_the_first():
    ahead, late = (predict([fsdp_forward(kind).record()], exact_cluster()) for kind in (True, False))
    assert ahead.simulation.step_ns == 70 + 4 * 100
    assert ahead.shares.exposed_communication == {"dp_shard": pytest.approx(70e-9)}
    assert late.simulation.step_ns == 4 * 170
    assert late.shares.exposed_communication == {"dp_shard": pytest.approx(280e-9)}


def test_tables_count_what_ran():
    prediction = predict([fsdp_forward(prefetched=True).record()], exact_cluster())
    (row,) = collectives_table(prediction.timeline, prediction.simulation)
    assert (row["axis"], row["collective"], row["ranks"], row["count"]) == ("dp_shard", "all_gather", 8, 4)
    assert row["gb"] == pytest.approx(4 * 10e-9)  # a rank's eighth of 80 bytes
    assert (row["time_s"], row["exposed_s"]) == (pytest.approx(280e-9), pytest.approx(70e-9))
    (kernels,) = operators_table(prediction.timeline)
    assert (kernels["operator"], kernels["count"], kernels["share"]) == ("aten.copy_.default", 4, 1)
    assert kernels["gb_moved"] == pytest.approx(400e-9)


def test_a_communicator_runs_one_collective_after_the_other_whatever_the_stream():
    step = Step(world=8, groups=SHARD)
    step.talk("all_gather", 70, "shard", "fsdp all-gather")
    step.talk("reduce_scatter", 140, "shard", "fsdp reduce-scatter")
    step.talk("all_gather", 70, "shard", "fsdp all-gather")
    assert starts(step) == [0, 70, 210]
    own = Step(world=8, groups=SHARD | {"shard 2": Group("shard", tuple(range(8)))})
    own.talk("all_gather", 70, "shard", "fsdp all-gather")
    own.talk("reduce_scatter", 140, "shard 2", "fsdp reduce-scatter")
    assert starts(own) == [0, 0]


def test_compute_is_slower_beside_communication_and_only_there():
    step = fsdp_forward(prefetched=True)
    simulation = played([step.record()], exact_cluster(slowdown=0.2))
    times = simulation.ranks[0]
    # Gathers of 70 ns run from 0 to 280: 100 ns of each of the first two blocks from 70 on, 10 of the third's.
    computed = (times.end_ns - times.start_ns)[[1, 3, 5, 7]].tolist()
    assert computed == [120, 120, 102, 100]


def test_two_groups_that_use_the_network_at_once_share_it():
    groups = {"a": Group("dp_replicate", (0, 8)), "b": Group("shard", (0, 16))}
    step = Step(world=24, groups=groups)
    step.talk("broadcast", 100, "a", "comm a")
    step.talk("broadcast", 100, "b", "comm b")
    both = played([step.record()], exact_cluster()).ranks[0].end_ns.tolist()
    assert both == [200, 200]
    beside = Step(world=24, groups=groups)
    first = beside.talk("broadcast", 100, "a", "comm a")
    beside.talk("broadcast", 100, "b", "comm b", (first,))
    assert starts(beside) == [0, 100]


# Pipelines


def one_f_one_b(places: int, micro_batches: int, forward: int, backward: int, message: int = 0) -> list[Record]:
    """The 1F1B schedule of each place, with the messages between them."""
    records = []
    for place in range(places):
        step = Step(world=places, rank=place, pp=places, groups={"pp": Group("pp", tuple(range(places)))})
        last: tuple[int, ...] = ()
        warm = min(micro_batches, places - place - 1)
        order = ["F"] * warm + ["F", "B"] * (micro_batches - warm) + ["B"] * warm
        for action in order:
            away, to = (-1, 1) if action == "F" else (1, -1)
            if 0 <= place + away < places:
                last = (step.talk("recv", message, "pp", f"comm pp from {place + away}", last, peer=place + away),)
            nanoseconds = forward if action == "F" else backward
            last = (step.run(nanoseconds, after=last, phase="forward" if action == "F" else "backward"),)
            if 0 <= place + to < places:
                step.talk("send", message, "pp", f"comm pp to {place + to}", last, peer=place + to)
        records.append(step.record())
    return records


@pytest.mark.parametrize(("places", "micro_batches"), [(2, 1), (2, 8), (4, 4), (4, 8), (8, 3)])
def test_the_bubble_of_1f1b_is_that_of_the_formula(places, micro_batches):
    prediction = predict(one_f_one_b(places, micro_batches, 1_000, 2_000), exact_cluster())
    assert prediction.simulation.step_ns == 3_000 * (micro_batches + places - 1)
    bubble = prediction.shares.bubble / prediction.step_time_s.value
    assert bubble == pytest.approx((places - 1) / (micro_batches + places - 1))
    assert prediction.shares.total == pytest.approx(prediction.step_time_s.value)


def test_a_message_is_there_after_its_transfer_and_no_sooner():
    first, second = one_f_one_b(2, 1, 1_000, 2_000, message=300)
    times = played([first, second], exact_cluster()).ranks
    # 0: forward to 1,000; message to 1,300; forward to 2,300, backward to 4,300 on 1; message to 4,600; backward.
    assert times[1].start_ns[1] == 1_300
    assert times[0].end_ns.max() == 6_600
    received = timeline_of(played([first, second], exact_cluster())).matching("collective", ["recv"])
    assert received.sum() == 2


def test_a_collective_of_several_stages_starts_when_the_last_of_them_has_come():
    groups = {"world": Group("world", (0, 1))}
    slow, fast = (Step(world=2, rank=rank, pp=2, groups=groups) for rank in (0, 1))
    for step, nanoseconds in ((slow, 500), (fast, 100)):
        done = step.run(nanoseconds)
        step.talk("broadcast", 50, "world", COMPUTE, (done,))
    times = played([slow.record(), fast.record()], exact_cluster()).ranks
    assert [one.start_ns[1] for one in times] == [500, 500]


def test_ranks_that_have_met_send_each_other_messages_in_the_same_group():
    """Without sharding the pipeline's group is that of all ranks: the step's sums go through it too."""
    first, second = (Step(world=2, rank=rank, pp=2, groups={"pp": Group("pp", (0, 1))}) for rank in (0, 1))
    met = [step.talk("broadcast", 50, "pp", COMPUTE) for step in (first, second)]
    first.talk("send", 30, "pp", "comm pp to 1", (met[0],), peer=1)
    came = second.talk("recv", 30, "pp", "comm pp from 0", (met[1],), peer=0)
    times = played([first.record(), second.record()], exact_cluster()).ranks
    assert (times[1].start_ns[came], times[1].end_ns[came]) == (50, 80)


def test_records_that_are_not_of_one_step_are_refused():
    first, second = one_f_one_b(2, 2, 10, 10)
    with pytest.raises(ValueError, match="places"):
        played([first], exact_cluster())
    second.operators = [operator for operator in second.operators if operator.collective is None]
    second.operators = [replace(operator, after=()) for operator in second.operators]
    with pytest.raises(ValueError, match="wait for each other"):
        played([first, second], exact_cluster())


# Any schedule

LANES = [COMPUTE, "fsdp copy-in", "fsdp all-gather", "fsdp reduce-scatter", "comm shard"]
operators = st.lists(
    st.tuples(st.sampled_from(LANES), st.integers(0, 50).map(lambda n: n * 7), st.lists(st.integers(0, 8), max_size=2)),
    min_size=1,
    max_size=30,
)


def step_of(items, reads=()) -> Step:
    step = Step(world=8, groups=SHARD)
    for number, (lane, nanoseconds, back) in enumerate(items):
        after = tuple({number - 1 - distance for distance in back if distance < number})
        if number in reads and number:
            step.host_read(number - 1)
        if lane in (COMPUTE, "fsdp copy-in"):
            step.run(nanoseconds, lane, after)
        else:
            step.talk("all_gather" if "gather" in lane else "reduce_scatter", nanoseconds, "shard", lane, after)
    return step


def one_by_one(record: Record, durations: np.ndarray, launch: int) -> list[int]:
    """End of each operator, played plainly."""
    ends: list[int] = []
    free: dict[str, int] = {}
    host = 0
    reads = {read.before: read for read in record.host_reads}
    for number, operator in enumerate(record.operators):
        if number in reads:
            host = max([host, *(ends[one] for one in reads[number].after)])
        host += launch
        begin = max([host, *(ends[one] for one in operator.after)])
        if operator.collective is not None:
            begin = max(begin, free.get("shard", 0))
        ends.append(begin + int(durations[number]))
        if operator.collective is not None:
            free["shard"] = ends[-1]
    return ends


@moderate
@given(operators, st.sets(st.integers(1, 29), max_size=3), st.sampled_from([0, 20, 300]))
def test_runs_of_operators_end_as_if_they_were_played_one_by_one(items, reads, launch):
    record = step_of(items, reads).record()
    cluster = exact_cluster(launch_us=launch / 1000 or 1e-9)
    times = played([record], cluster).ranks[0]
    durations = np.rint(program_of(record, cluster).durations.value)
    assert times.end_ns.tolist() == one_by_one(record, durations, launch)


@moderate
@given(operators)
def test_a_step_is_no_shorter_than_any_lane_or_any_path(items):
    record = step_of(items).record()
    simulation = played([record], exact_cluster())
    times = simulation.ranks[0]
    durations = times.end_ns - times.start_ns
    for lane in LANES:
        on_lane = [number for number, operator in enumerate(record.operators) if operator.lane == lane]
        assert simulation.step_ns >= durations[on_lane].sum()
    longest = [0] * len(record.operators)
    for number, operator in enumerate(record.operators):
        longest[number] = int(durations[number]) + max((longest[one] for one in operator.after), default=0)
    assert simulation.step_ns >= max(longest)
    assert simulation.step_ns <= durations.sum()


@moderate
@given(operators, st.sampled_from([0, 40]))
def test_where_the_time_goes_adds_up_to_the_step(items, launch):
    prediction = predict([step_of(items).record()], exact_cluster(launch_us=launch / 1000 or 1e-9, slowdown=0.1))
    assert prediction.shares.total == pytest.approx(prediction.step_time_s.value, abs=1e-12)
    if prediction.simulation.step_ns:
        whole = breakdown(prediction.timeline, (0, prediction.simulation.step_ns))
        exposed = sum(prediction.shares.exposed_communication.values())
        assert exposed == pytest.approx(whole.exposed_communication_ns / 1e9, abs=1e-12)


# Durations


def test_a_chain_of_a_compiled_block_is_one_kernel_that_moves_what_goes_in_and_out():
    def chain(compiled: bool) -> Record:
        step = Step(compiled=compiled)
        step.run(0, reads=((1, 100), (2, 30)), writes=((3, 100),), fusible=True)
        step.run(0, reads=((3, 100), (4, 7)), writes=((5, 100),), fusible=True)
        step.run(0, reads=((5, 100), (1, 100)), writes=((6, 100),), fusible=True)
        step.run(0, reads=((6, 100), (3, 100)), writes=((7, 100),))
        return step.record()

    eager, compiled = (played([chain(kind)], exact_cluster(launch_us=1)) for kind in (False, True))
    assert (eager.ranks[0].end_ns - eager.ranks[0].start_ns).tolist() == [230, 207, 300, 300]
    # In: 1, 2 and 4. Out: 6, and 3, which is read later too.
    assert (compiled.ranks[0].end_ns - compiled.ranks[0].start_ns).tolist() == [337, 0, 0, 300]
    assert timeline_of(compiled).kinds(Kind.COMPUTE).sum() == 2
    assert compiled.ranks[0].issued_ns.tolist() == [1000, 1000, 1000, 2000]


def test_a_host_that_computes_does_one_thing_after_the_other():
    known = exact_cluster(launch_us=1)
    cpu = known.model_copy(update={"accelerator": known.accelerator.model_copy(update={"form": "CPU"})})
    step = fsdp_forward(prefetched=True)
    step.talk("all_gather", 7_000, "shard", "comm shard")
    step.run(3_000)
    prediction = predict([step.record()], cpu)
    times = prediction.simulation.ranks[0]
    assert times.start_ns[:8].tolist() == np.cumsum([0, *[1_070, 1_100] * 4])[:8].tolist()
    assert times.start_ns[8:].tolist() == [times.end_ns[7]] * 2  # gloo's thread, beside
    assert prediction.shares.host == 0
    assert not prediction.timeline.kinds(Kind.RUNTIME).any()


def test_errors_of_one_source_move_together_and_those_of_several_do_not():
    cluster = cluster_named("dgx-h100")
    step = Step()
    for _ in range(10):
        number = step.run(10**7)
        operator = step.operators[number]
        operator.kind, operator.work = "product", Product(4096, 4096, 4096, 1, "bfloat16")
    for _ in range(10):
        step.run(10**8)
    simulation = simulate([program_of(step.record(), cluster)])
    products, memory = (simulation.errors_ns[source] for source in ("matrix products", "memory-bound operators"))
    rate = cluster.achieved.matrix["bfloat16"].efficiency
    time = sum(simulation.ranks[0].end_ns[:10] - simulation.ranks[0].start_ns[:10])
    assert products[1] == pytest.approx((rate.value / rate.low - 1) * time, rel=0.02)
    assert products[0] == pytest.approx((1 - rate.value / rate.high) * time, rel=0.02)
    left_out = simulation.errors_ns["what the model leaves out"][1]
    up = simulation.range_ns.high - simulation.range_ns.value
    host = simulation.errors_ns["host"][1]
    assert up == pytest.approx((products[1] ** 2 + memory[1] ** 2 + left_out**2 + host**2) ** 0.5)


def test_float32_products_are_charged_where_no_rate_of_theirs_is_known():
    step = Step()
    for dtype in ("bfloat16", "float32", "float8_e4m3fn"):
        operator = step.operators[step.run(0)]
        operator.kind, operator.work = "product", Product(4096, 4096, 4096, 1, dtype)
    times = played([step.record()], cluster_named("dgx-h100")).ranks[0]
    brain, single, eight = (times.end_ns - times.start_ns).tolist()
    assert 10 < single / brain < 15
    assert eight < brain


def test_more_ranks_than_devices_are_refused():
    step = Step(world=8, groups=SHARD)
    step.run(1)
    record = step.record()
    record.facts = replace(record.facts, world=16)
    cluster = cluster_named("dgx-h100")
    node = cluster.model_copy(update={"levels": cluster.levels[:1]})
    with pytest.raises(UserError, match="joins 8 devices and 16"):
        played([record], node)


def test_a_predicted_timeline_is_written_and_read_like_a_measured_one(tmp_path):
    prediction = predict(one_f_one_b(2, 2, 1_000, 2_000, message=10), exact_cluster(launch_us=0.1))
    write_chrome_trace(prediction.timeline, tmp_path / "trace.json.gz")
    read = read_chrome_trace(tmp_path / "trace.json.gz").timeline
    assert read.ranks() == [0, 1]
    assert sorted(read.start_ns.tolist()) == sorted(prediction.timeline.start_ns.tolist())
    whole = breakdown(prediction.timeline.of_rank(0))
    assert breakdown(read.of_rank(0)) == whole
