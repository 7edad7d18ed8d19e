"""Clusters by name and from files: complete, checked for slips of units, and wrong ones told in one line each."""

import tomllib

import pytest
from pydantic import ValidationError

from headway.cluster import (
    Rate,
    accelerator_named,
    achieved_on,
    cluster_named,
    cluster_of,
    cluster_toml,
    load_catalogue,
    load_cluster,
    parse_cluster,
)
from headway.cluster.load import shipped_clusters
from headway.errors import UserError

NAMES = [*shipped_clusters(), *(accelerator.name for accelerator in load_catalogue())]
H100 = {"accelerator": "H100-SXM5-80GB"}


@pytest.mark.parametrize("name", NAMES)
def test_every_shipped_cluster_is_whole_and_survives_its_own_file(name):
    cluster = cluster_named(name)
    assert cluster.achieved.memory.source
    assert all(rate.source for rate in cluster.achieved.matrix.values())
    assert all(rate.source for rate in cluster.achieved.attention.values())
    assert all(level.achieved.source for level in cluster.levels)
    assert parse_cluster(tomllib.loads(cluster_toml(cluster)), "again") == cluster


def test_every_catalogued_peak_has_a_rate_that_is_achieved_of_it():
    for accelerator in load_catalogue():
        assert set(accelerator.dense_peak_tflops) <= set(achieved_on(accelerator).matrix), accelerator.name


def test_a_cluster_is_found_by_name_in_any_case_and_a_wrong_name_by_the_nearest(tmp_path):
    assert cluster_of("DGX-H100").accelerator.name == "H100-SXM5-80GB"
    assert cluster_of("a100-sxm4-80gb").devices_per_node == 8
    with pytest.raises(UserError, match=r"cluster 'dgx-h10' is not known; did you mean dgx-h100\?"):
        cluster_of("dgx-h10")
    with pytest.raises(UserError, match=r"missing.toml: cannot be read: No such file"):
        cluster_of(str(tmp_path / "missing.toml"))


def test_a_file_says_only_what_differs(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(
        """
        accelerator = "H100-SXM5-80GB"
        devices = 64
        power_cap_w = 500
        [achieved]
        matrix.bfloat16 = { efficiency = 0.66 }
        memory.fraction.pointwise = [0.9, 0.85, 0.95]
        """
    )
    cluster, usual = load_cluster(path), cluster_named("dgx-h100")
    assert (cluster.name, cluster.power_cap_w) == ("mine", 500)
    assert [level.devices for level in cluster.levels] == [8, 64]
    assert cluster.achieved.matrix["bfloat16"].efficiency == Rate(value=0.66, low=0.66, high=0.66)
    assert cluster.achieved.matrix["bfloat16"].half_depth == usual.achieved.matrix["bfloat16"].half_depth
    assert cluster.achieved.matrix["float8"] == usual.achieved.matrix["float8"]
    assert cluster.achieved.memory.fraction["pointwise"].high == 0.95
    assert cluster.achieved.memory.fraction["cast"] == usual.achieved.memory.fraction["cast"]


def test_an_accelerator_of_ones_own_is_described_in_a_table():
    mine = {"name": "X1", "vendor": "Acme", "form": "card", "generation": "x", "processors": 64, "scale_up_devices": 1}
    mine |= {"dense_peak_tflops": {"bfloat16": 100}, "memory_gb": 64, "memory_bandwidth_gb_per_s": 1000}
    cluster = parse_cluster({"accelerator": mine, "devices_per_node": 1}, "x.toml")
    assert cluster.accelerator.peak_tflops("bfloat16") == 100
    assert cluster.levels == ()
    assert (
        cluster.achieved.matrix["bfloat16"].efficiency.high - cluster.achieved.matrix["bfloat16"].efficiency.low > 0.3
    )


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({}, "x.toml: accelerator: required"),
        ({"accelerator": "H100"}, "did you mean H100-"),
        ({**H100, "device_per_node": 8}, "x.toml: device_per_node: unknown key; did you mean devices_per_node"),
        ({**H100, "devices_per_node": "eight"}, r"x.toml: devices_per_node: .*\(got 'eight'\)"),
        ({**H100, "levels": 5}, r"x.toml: levels: write each as a \[\[levels\]\] table"),
        (
            {**H100, "levels": [{"name": "a", "devices": 8}]},
            "levels.0.gb_per_s_unidirectional: required key is missing",
        ),
        ({**H100, "achieved": {"matrix": {"bfloat16": {"efficiency": [0.9, 0.5]}}}}, "write .value, low, high."),
        ({**H100, "achieved": {"matrix": {"bfloat16": {"efficiency": [0.9, 0.5, 0.8]}}}}, "outside of its own range"),
        ({**H100, "achieved": {"attention_kernel": "magic"}}, "attention_kernel 'magic' is none of flash_attention_3"),
        ({**H100, "achieved": {"memory": {"speed": 1}}}, "memory.speed: unknown key"),
    ],
)
def test_a_wrong_file_is_told_by_key(document, message):
    with pytest.raises(UserError, match=message):
        parse_cluster(document, "x.toml")


def test_levels_must_contain_each_other():
    levels = [{"name": "a", "devices": 8, "gb_per_s_unidirectional": 450}]
    levels += [{"name": "b", "devices": 12, "gb_per_s_unidirectional": 50}]
    with pytest.raises(UserError, match="level 'b' joins 12 devices: it must be a multiple of the 8 of level 'a'"):
        parse_cluster({**H100, "levels": levels}, "x.toml")


def levels_of(inner=450.0, outer=50.0):
    names = (("nvlink", 8, inner), ("network", 64, outer))
    return [{"name": name, "devices": n, "gb_per_s_unidirectional": rate} for name, n, rate in names]


def custom_h100(**changes):
    plain = accelerator_named("H100-SXM5-80GB").model_dump(mode="json")
    return {**plain, "dense_peak_tflops": dict(plain["dense_peak_tflops"]), **changes}


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({**H100, "levels": levels_of(outer=400)}, r"levels.1.gb_per_s_unidirectional = 400 looks like Gb/s: write 50"),
        ({**H100, "levels": levels_of(outer=3200)}, "looks like Gb/s of a whole node: write 50"),
        ({**H100, "levels": levels_of(inner=900)}, "= 900 looks like the sum of both directions: write 450"),
        ({**H100, "levels": levels_of(inner=3600)}, "= 3600 looks like Gb/s: write 450"),
        ({"accelerator": custom_h100(memory_bandwidth_gb_per_s=3.35)}, "= 3.35 looks like TB/s: write 3350"),
        ({"accelerator": custom_h100(dense_peak_tflops={"bfloat16": 1979})}, "structured sparsity: write 989.5"),
        ({"accelerator": custom_h100(dense_peak_tflops={"bfloat16": 0.989})}, "looks like PFLOP/s: write 989"),
    ],
)
def test_a_slip_of_units_is_suspected_with_the_number_that_was_meant(document, message):
    with pytest.raises(UserError, match=message):
        parse_cluster(document, "x.toml")
    assert parse_cluster({**document, "units_checked": True}, "x.toml").levels


@pytest.mark.parametrize(
    ("inner", "outer"), [(450, 50), (400, 50), (450, 100), (450, 25), (450, 12.5), (200, 6.25), (450, 125)]
)
def test_unusual_but_possible_links_are_believed(inner, outer):
    assert (
        parse_cluster({**H100, "levels": levels_of(inner, outer)}, "x.toml").levels[1].gb_per_s_unidirectional == outer
    )


def test_groups_lie_on_levels_by_their_size_and_stride():
    cluster = cluster_named("dgx-h100")

    def used(size, stride):
        return [(level.name, ranks, parts) for level, ranks, parts in cluster.group(size, stride).used()]

    assert used(1, 1) == []
    assert used(8, 1) == [("scale-up", 8, 8)]
    assert used(16, 1) == [("scale-up", 8, 8), ("network", 16, 2)]
    assert used(4, 2) == [("scale-up", 4, 4)]
    assert used(16, 4) == [("scale-up", 2, 2), ("network", 16, 8)]
    assert used(4, 8) == [("network", 4, 4)]
    with pytest.raises(ValueError, match="does not fit"):
        cluster.group(1 << 20)


def test_a_rack_of_72_is_one_domain():
    assert cluster_named("gb200-nvl72").levels[0].devices == 72
    assert cluster_named("gb200-nvl72").group(64).used()[0][1] == 64


def test_a_cluster_cannot_be_changed():
    with pytest.raises(ValidationError):
        cluster_named("dgx-h100").devices_per_node = 4
