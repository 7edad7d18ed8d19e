"""Suspecting slips of units: a number that is off by just the factor that a known mix-up makes."""

from collections.abc import Iterator
from dataclasses import dataclass

from headway.cluster.catalogue import Accelerator, accelerator_like
from headway.cluster.topology import Level

NEAR = 0.12
"""How near to a mix-up's factor a number must be to be suspected."""


@dataclass(frozen=True)
class Slip:
    """A suspected mix-up of units."""

    key: str
    given: float
    suspected: str
    """What the number looks like."""
    meant: float


def slips(accelerator: Accelerator, levels: tuple[Level, ...]) -> Iterator[Slip]:
    """The numbers of a cluster that look like another unit's: of a known accelerator's peaks and links."""
    known = accelerator_like(accelerator)
    if known is None:
        return
    for precision, given in accelerator.dense_peak_tflops.items():
        published = known.peak_tflops(precision)
        yield from _slip(
            f"accelerator.dense_peak_tflops.{precision}",
            given,
            published,
            {2: "a peak with structured sparsity", 1e-3: "PFLOP/s", 1e3: "GFLOP/s"},
        )
    yield from _slip(
        "accelerator.memory_bandwidth_gb_per_s",
        accelerator.memory_bandwidth_gb_per_s,
        known.memory_bandwidth_gb_per_s,
        {1e-3: "TB/s", 8: "Gb/s", 1e3: "MB/s"},
    )
    for number, level in enumerate(levels):
        key, given = f"levels.{number}.gb_per_s_unidirectional", level.gb_per_s_unidirectional
        mixed_up = {8: "Gb/s", 2: "the sum of both directions", 1e-3: "TB/s"}
        if level.topology == "bus":
            yield from _slip(key, given, known.host_gb_per_s_unidirectional, mixed_up)
        elif number == 0 and level.devices <= known.scale_up_devices:
            yield from _slip(key, given, known.scale_up_gb_per_s_unidirectional, mixed_up)
        else:
            yield from _network_slip(key, given, known.nic_gb_per_s_unidirectional, known.scale_up_devices)


def _slip(key: str, given: float, published: float | None, mixed_up: dict[float, str]) -> Iterator[Slip]:
    if published is None:
        return
    for factor, unit in mixed_up.items():
        if abs(given / (published * factor) - 1) <= NEAR:
            yield Slip(key, given, unit, given / factor)


def _network_slip(key: str, given: float, usual: float | None, devices_per_node: int) -> Iterator[Slip]:
    """Ports are named by Gb/s, nodes by the sum of their ports: 400 and 3200 are 50 GB/s a device."""
    if usual is None or given <= 2.5 * usual:
        return
    for factor, unit in ((8, "Gb/s"), (8 * devices_per_node, "Gb/s of a whole node")):
        if 0.2 * usual <= given / factor <= 2.5 * usual:
            yield Slip(key, given, unit, given / factor)
            return
