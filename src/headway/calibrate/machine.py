"""From what was measured to a cluster: every number of the cost model that this machine can tell, with its source."""

import datetime
from dataclasses import asdict, dataclass
from statistics import mean
from typing import Any

import torch

from headway.calibrate.attention import attention_rates
from headway.calibrate.collectives import link_rates
from headway.calibrate.effort import FULL, Effort
from headway.calibrate.fit import rounded, spread
from headway.calibrate.host import HostTime, tiny_recipe
from headway.calibrate.measurement import Device, Measurement, device_type, measure, usual_ranks
from headway.calibrate.memory import COPY, bandwidth_of, memory_rates
from headway.calibrate.products import product_rates
from headway.cluster import Accelerator, Cluster, accelerator_of_device, parse_cluster
from headway.errors import UserError
from headway.rehearse import Record, predict, rehearse_whole

KERNEL = "measured"
"""Name of the attention kernel that torch chooses here."""
SLOWDOWN_RANGE = (0.5, 1.5)
"""Of the slowdown beside communication (judgement): it depends on what runs beside what."""
LEAST_SLOWDOWN = 0.01
"""A measurement below it is noise."""


@dataclass(frozen=True)
class Calibration:
    """A cluster, and what it was made of."""

    cluster: Cluster
    measurement: Measurement

    def as_json(self) -> dict[str, Any]:
        """As ``headway calibrate`` writes it."""
        cluster = self.cluster.model_dump(mode="json", exclude_none=True)
        return {"cluster": cluster, "measured": asdict(self.measurement)}


def calibrate(ranks: int | None = None, effort: Effort | None = None) -> Calibration:
    """Measure this machine with ``ranks`` processes at once (None: one for each device, or core).

    Raises UserError when there are fewer GPUs than that.
    """
    wanted = usual_ranks() if ranks is None else ranks
    if device_type() == "cuda" and wanted > torch.cuda.device_count():
        raise UserError(f"--ranks {wanted}: this machine has {torch.cuda.device_count()} CUDA devices")
    measured = measure(wanted, effort or FULL[device_type()])
    return Calibration(cluster_from(measured), measured)


def cluster_from(measured: Measurement) -> Cluster:
    """The cluster of the ranks that measured. What was not measured is the catalogue's, or a default with its wide
    range."""
    device = measured.device
    source = f"measured on {device.name}, {datetime.date.today().isoformat()}, torch {torch.__version__}"
    known = accelerator_of_device(device.name) if device.type == "cuda" else None
    published = dict(known.dense_peak_tflops) if known else {}
    matrix, peaks = product_rates(measured.products, {str(key): peak for key, peak in published.items()}, source)
    fastest = bandwidth_of(measured.memory)
    bandwidth = known.memory_bandwidth_gb_per_s if known else rounded(fastest)
    document: dict[str, Any] = {
        "name": f"{device.name}, {measured.ranks} rank{'s' if measured.ranks > 1 else ''}",
        "accelerator": _accelerator(known, device, measured.ranks, peaks, bandwidth, source),
        "devices_per_node": measured.ranks,
        "levels": _levels(measured, source),
        "achieved": {
            "matrix": matrix,
            "attention": {KERNEL: attention_rates(measured.attention, peaks["bfloat16"], source)},
            "attention_kernel": KERNEL,
            "memory": memory_rates(measured.memory, bandwidth, device.cache_bytes, source),
            "host": {"operator_us": 1e-6, "process_gib": _process_gib(measured.host), "source": source},
        },
        "units_checked": True,
        "source": source,
    }
    if device.type == "cpu":
        document["achieved"]["memory"]["startup_us"] = 0.0  # a call's own time is the host's, which computes
    if measured.slowdown is not None:
        low, high = SLOWDOWN_RANGE
        slowdown = max(measured.slowdown, LEAST_SLOWDOWN)
        document["achieved"]["compute_slowdown"] = [rounded(slowdown * part) for part in (1, low, high)]
    document["achieved"]["host"] |= _copies(measured, known)
    cluster = parse_cluster(document, source="calibrate")
    document["achieved"]["host"]["operator_us"] = _operator_us(cluster, measured)
    return parse_cluster(document, source="calibrate")


def _accelerator(
    known: Accelerator | None, device: Device, ranks: int, peaks: dict[str, float], bandwidth: float, source: str
) -> dict[str, Any]:
    """The catalogue's device, or what was measured of an unknown one."""
    if known is not None:
        return known.model_dump()
    return {
        "name": device.name,
        "vendor": "unknown",
        "form": "CPU" if device.type == "cpu" else "unknown",
        "generation": "unknown",
        "processors": device.processors,
        "dense_peak_tflops": peaks,
        "memory_gb": rounded(device.memory_bytes / 2**30),
        "memory_bandwidth_gb_per_s": bandwidth,
        "scale_up_devices": ranks,
        "source": f"{source}: peaks are of the fastest product, bandwidth of the fastest of reading, writing, copying",
        "verified": "measured",
    }


def _levels(measured: Measurement, source: str) -> list[dict[str, Any]]:
    if measured.ranks == 1:
        return []
    bandwidth, achieved = link_rates(measured.collectives, f"{source}, {measured.ranks} ranks")
    return [
        {
            "name": "this machine",
            "devices": measured.ranks,
            "gb_per_s_unidirectional": bandwidth,
            "achieved": achieved,
        }
    ]


def _process_gib(host: list[HostTime]) -> list[float]:
    return spread([time.process_gib for time in host])


def _copies(measured: Measurement, known: Accelerator | None) -> dict[str, Any]:
    """What copies between host and device reach of the published link."""
    rates = [time.gb_per_s for time in measured.memory if time.kind == COPY]
    link = known.host_gb_per_s_unidirectional if known else None
    return {"copy_fraction": spread([rate / link for rate in rates])} if rates and link else {}


def _operator_us(cluster: Cluster, measured: Measurement) -> list[float]:
    """Host time of an operator: what the steps of tiny models took beyond their kernels, over their operators."""
    found = []
    for time in measured.host:
        record = rehearse_whole(tiny_recipe(time.model, measured.device.type), 1, 0)
        kernels = 0.0 if measured.device.type == "cuda" else _kernel_seconds(record, cluster)
        found.append(1e6 * max(time.seconds - kernels, 0.1 * time.seconds) / len(record.operators))
    middle = mean(found)
    return [rounded(middle), rounded(min(found)), rounded(max(found))]


def _kernel_seconds(record: Record, cluster: Cluster) -> float:
    """Of a step whose host takes no time."""
    return predict([record], cluster).step_time_s.value
