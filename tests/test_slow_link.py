"""The benchmark of slow links, short: two hosts as network namespaces are joined, shaped, used and taken down."""

import json
import subprocess
import sys

import pytest

import slow_link
from headway.cluster import Cluster
from test_calibrate_from_run import cpu


def test_ranks_of_a_host_share_its_link_and_gloo_reduces_twice():
    machine: Cluster = cpu(ranks=4)
    kinds = {kind: {"startup_us": 50.0, "efficiency": 1.0} for kind in slow_link.PASSES}
    level = machine.levels[0]
    level = level.model_validate(level.model_dump() | {"achieved": level.achieved.model_dump() | {"kinds": kinds}})
    found = slow_link.cluster_with_link(machine.model_copy(update={"levels": (level,)}), 2, 1e9)
    assert [(one.name, one.devices) for one in found.levels] == [("link", 2), ("link", 4)]
    across = found.levels[1]
    assert across.gb_per_s_unidirectional == pytest.approx(0.125 / 2)
    assert across.achieved.kinds["reduce_scatter"].efficiency.value == pytest.approx(
        across.achieved.kinds["all_reduce"].efficiency.value / 2
    )


@pytest.mark.soak
def test_a_step_across_a_slow_link_takes_at_least_its_bytes(tmp_path):
    lacking = slow_link.missing()
    if lacking:
        pytest.skip(lacking)
    result = tmp_path / "result.json"
    command = [sys.executable, slow_link.__file__, "--only", "DDP", "--steps", "9", "--json", str(result)]
    subprocess.run(command, check=True, timeout=900)
    cases = {case["rate"]: case["measured"]["step_time_s"] for case in json.loads(result.read_text())["cases"]}
    gradients = 4 * 4_800_000  # bytes of the decoder in float32, about
    for rate, seconds in cases.items():
        assert seconds > gradients * 8 / slow_link.RATES[rate]
    assert not subprocess.run(["ip", "netns", "list"], capture_output=True, check=True).stdout
