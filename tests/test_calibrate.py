"""Calibration: this machine measured for real, at reduced sizes, into a cluster file that predictions read."""

import json
import sys
import tomllib
from dataclasses import replace

import pytest

from headway.calibrate import QUICK, calibrate
from headway.calibrate.attention import AttentionTime, attention_rates
from headway.calibrate.collectives import CollectiveTime, link_rates
from headway.calibrate.fit import fitted, ranged
from headway.calibrate.products import ProductTime, product_rates
from headway.cli import main as cli
from headway.cluster import cluster_named, cluster_toml, load_cluster, parse_cluster
from headway.cost import collective, memory_bound


@pytest.fixture(scope="module")
def calibration():
    """Of two ranks, by the real code, with little effort."""
    return calibrate(2, QUICK)


def run(monkeypatch, capsys, *arguments: str) -> tuple[int, str]:
    """Exit code and standard error of ``headway ARGUMENTS``."""
    monkeypatch.setattr(sys, "argv", ["headway", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return int(ended.value.code or 0), capsys.readouterr().err


def test_a_calibrated_cluster_is_the_one_that_its_file_holds(calibration, tmp_path):
    cluster = calibration.cluster
    path = tmp_path / "here.toml"
    path.write_text(cluster_toml(cluster))
    assert load_cluster(path) == cluster
    achieved = cluster.achieved
    assert cluster.accelerator.form == "CPU"
    assert set(achieved.memory.fraction) == {
        "pointwise", "activation", "normalisation", "softmax", "cast", "permute", "optimizer"
    }  # fmt: skip
    assert cluster.devices_per_node == cluster.levels[0].devices == 2
    for rate in (achieved.matrix["float32"], achieved.matrix["bfloat16"], achieved.attention["measured"]):
        assert "measured on" in rate.source
        assert "torch" in rate.source
    assert 0 < achieved.matrix["float32"].efficiency.low <= achieved.matrix["float32"].efficiency.high
    assert 1 < achieved.host.operator_us.value < 1000
    assert 0.1 < achieved.host.process_gib.value < 3
    assert set(cluster.levels[0].achieved.kinds) == {
        "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send_recv"
    }  # fmt: skip
    json.dumps(calibration.as_json())


def test_what_is_larger_takes_longer(calibration):
    cluster = calibration.cluster
    group = cluster.group(2)
    for kind in cluster.levels[0].achieved.kinds:
        times = [collective(kind, size, group).value for size in (1e3, 1e6, 1e8)]
        assert 0 < times[0] < times[1] < times[2], kind
    for kind in cluster.achieved.memory.fraction:
        times = [memory_bound(cluster, size, kind).value for size in (1e3, 1e6, 1e9)]
        assert times == sorted(times), kind


def test_products_of_the_model_are_fitted_back():
    efficiency, depth, peak = 0.8, 96.0, 50.0
    shapes = [(m, n, k) for m in (64, 512) for n in (64, 256) for k in (32, 128, 1024)]
    times = [
        ProductTime(precision, m, n, k, call + 2 * m * n * k / (peak * 1e12 * efficiency * k / (k + depth)), call)
        for precision, call in (("float32", 1e-6), ("bfloat16", 81e-6))
        for m, n, k in shapes
    ]
    rates, peaks = product_rates(times, {"float32": peak, "bfloat16": peak}, "test")
    assert peaks == {"float32": peak, "bfloat16": peak}
    for rate in rates.values():
        assert rate["efficiency"] == pytest.approx([efficiency] * 3, rel=1e-3)
        assert rate["half_depth"] == pytest.approx(depth, rel=1e-3)
    assert [rate["call_us"] for rate in rates.values()] == [0.0, pytest.approx(80.0)]


def test_attention_of_the_model_is_fitted_back():
    peak, half = 1.0, 64.0
    times = [
        AttentionTime(64, 8, keys, causal, backward, 0.0)
        for keys in (64, 128, 512, 8192)
        for causal in (False, True)
        for backward in (False, True)
    ]
    tile = 256.0
    times = [
        replace(t, seconds=t.flops(tile) * (1 + half / t.seen(tile)) / (1e12 * peak * (0.4 if t.backward else 0.5)))
        for t in times
    ]
    rates = attention_rates(times, peak, "test")
    assert rates["tile_keys"] == pytest.approx(tile, rel=0.3)
    assert rates["half_keys"] == pytest.approx(half, rel=0.1)
    assert rates["forward"][64][0] == pytest.approx(0.5, rel=0.03)
    assert rates["backward"][64][0] == pytest.approx(0.4, rel=0.03)


@pytest.mark.parametrize("kind", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send_recv"])
def test_a_collective_of_the_model_is_fitted_back_and_costed_so(kind):
    """What was fitted to measured times gives these times again, in the terms of the cost model."""
    startup, gb_per_s, ranks = 80e-6, 1.25, 4
    points = []
    for name in ("all_reduce", "all_to_all", kind):
        for size in (4096, 1 << 16, 1 << 20, 1 << 24):
            point = CollectiveTime(name, ranks, size, 0.0)
            points.append(replace(point, seconds=startup + point.crossing / (gb_per_s * 1e9)))
    bandwidth, achieved = link_rates(points, "test")
    level = {"name": "here", "devices": ranks, "gb_per_s_unidirectional": bandwidth, "achieved": achieved}
    known = cluster_named("dgx-a100")
    document = {"accelerator": known.accelerator.name, "devices_per_node": ranks, "levels": [level]}
    cluster = parse_cluster(document | {"units_checked": True}, "test")
    for point in points:
        if point.kind == kind:
            found = collective(kind, point.bytes, cluster.group(ranks)).value
            assert found == pytest.approx(1e9 * point.seconds, rel=0.02)


def test_a_cache_is_charged_for_what_it_holds_and_memory_for_the_rest():
    plain = cluster_named("dgx-a100")
    cache = {"megabytes": 8, "fraction": {"pointwise": 4.0}}
    text = cluster_toml(plain)
    document = tomllib.loads(text)
    document["achieved"]["memory"]["cache"] = cache
    cached = parse_cluster(document, "test")
    slow = plain.achieved.memory.fraction["pointwise"].value
    start = memory_bound(plain, 0).value
    within, beyond = (memory_bound(cached, size).value - start for size in (8e6, 16e6))
    assert within == pytest.approx((memory_bound(plain, 8e6).value - start) * slow / 4)
    assert beyond == pytest.approx(within + memory_bound(plain, 8e6).value - start)


def test_a_fit_has_no_negative_part_and_its_range_holds_the_middle():
    seconds = [1.0, 2.1, 2.9, 4.2]
    sizes = [1.0, 2.0, 3.0, 4.0]
    slope, startup = fitted(sizes, seconds, [1.0] * 4)
    assert slope > 0
    assert startup >= 0
    value, low, high = ranged(1 / slope, seconds, [startup + slope * size for size in sizes])
    assert low <= value <= high
    slope, startup = fitted(sizes, seconds[::-1], [1.0] * 4)
    assert slope > 0
    assert startup == 0


def test_a_point_that_something_disturbed_is_left_out_of_a_fit():
    sizes = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0]
    seconds = [3.0 + 2.0 * size for size in sizes]
    seconds[2] *= 10
    slope, startup = fitted(sizes, seconds, [1.0] * 6)
    assert slope == pytest.approx(2.0, rel=0.05)
    assert startup == pytest.approx(3.0, rel=0.05)


@pytest.mark.parametrize(
    ("to", "message"),
    [
        ("missing/here.toml", "can't be written: name a file in a folder"),
        ("here.txt", "a cluster file ends in .toml"),
        (".", "a cluster file ends in .toml"),
    ],
)
def test_a_file_that_cannot_be_is_told_before_anything_is_measured(monkeypatch, capsys, tmp_path, to, message):
    monkeypatch.chdir(tmp_path)
    code, err = run(monkeypatch, capsys, "calibrate", "--to", to)
    assert code == 2
    assert err.startswith("headway: error: --to")
    assert message in err
    assert len(err.splitlines()) == 1
