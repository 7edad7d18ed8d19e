"""The catalogue of accelerators: complete, sourced, and never guessing which device this is."""

import pytest
from pydantic import ValidationError

from headway.cluster import accelerator_named, accelerator_of_device, load_catalogue
from headway.errors import UserError


def test_every_accelerator_has_peaks_a_source_and_a_name_of_its_own():
    catalogue = load_catalogue()
    names = [accelerator.name for accelerator in catalogue]
    assert len(set(names)) == len(names) >= 15
    for accelerator in catalogue:
        assert accelerator.dense_peak_tflops
        assert accelerator.source
        assert accelerator.verified
    reported = [name for accelerator in catalogue for name in accelerator.device_names]
    assert len(set(reported)) == len(reported)


def test_peaks_are_dense_and_double_with_each_halving_of_the_precision():
    """Sparse peaks, twice the dense ones, are the usual error: narrower formats must keep their ratio to bfloat16."""
    for accelerator in load_catalogue():
        peaks = accelerator.dense_peak_tflops
        if "tf32" in peaks:
            assert peaks["bfloat16"] / peaks["tf32"] == pytest.approx(2, rel=0.03)
        if "float8" in peaks:
            assert peaks["float8"] / peaks["bfloat16"] == pytest.approx(2, rel=0.03)


@pytest.mark.parametrize(
    ("device_name", "expected", "bfloat16_tflops"),
    [
        ("NVIDIA H100 80GB HBM3", "H100-SXM5-80GB", 989),
        ("NVIDIA H100 PCIe", "H100-PCIe-80GB", 756),
        ("NVIDIA H200", "H200-SXM-141GB", 989),
        ("NVIDIA A100-SXM4-80GB", "A100-SXM4-80GB", 312),
        ("NVIDIA A100-SXM4-40GB", "A100-SXM4-40GB", 312),
        ("NVIDIA A100 80GB PCIe", "A100-PCIe-80GB", 312),
        ("NVIDIA B200", "B200-SXM-180GB", 2250),
        ("NVIDIA GB200", "GB200-NVL72", 2250),
        ("NVIDIA L40S", "L40S", 362),
        ("AMD Instinct MI300X", "MI300X", 1307),
        ("NVIDIA GeForce RTX 4090", "RTX-4090", 165),
    ],
)
def test_a_device_is_known_by_the_name_its_driver_reports(device_name, expected, bfloat16_tflops):
    accelerator = accelerator_of_device(device_name)
    assert accelerator is not None
    assert accelerator.name == expected
    assert accelerator.peak_tflops("bfloat16") == bfloat16_tflops


@pytest.mark.parametrize(
    "device_name",
    [
        "NVIDIA H100 NVL",
        "NVIDIA H200 NVL",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        "NVIDIA A100-PCIE-40GB",
        "NVIDIA A10G",
        "H100",
        "",
    ],
)
def test_a_variant_is_not_taken_for_the_part_it_is_named_after(device_name):
    assert accelerator_of_device(device_name) is None


def test_an_uncatalogued_precision_has_no_peak():
    assert accelerator_named("h100-sxm5-80gb").peak_tflops("float32") is None
    assert accelerator_named("H100-SXM5-80GB").peak_tflops("float4") is None


def test_a_wrong_name_is_answered_with_the_nearest():
    with pytest.raises(UserError, match=r"'H100-SXM-80GB'.*did you mean H100-SXM5-80GB\?"):
        accelerator_named("H100-SXM-80GB")
    with pytest.raises(UserError, match=r"did you mean RTX-4090\?"):
        accelerator_named("rtx4090")
    with pytest.raises(UserError, match=r"'abacus' is not in the catalogue \(known: V100-SXM2, "):
        accelerator_named("abacus")


def test_an_accelerator_cannot_be_changed():
    with pytest.raises(ValidationError):
        accelerator_named("L40S").memory_gb = 1.0
