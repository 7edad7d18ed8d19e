"""``headway calibrate``: what this machine reaches, measured, as a cluster file."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from headway.cli.result import JsonPath, give_result, is_cluster_file, write_or_tell

if TYPE_CHECKING:
    from headway.calibrate import Calibration


def calibrate(
    to: Annotated[
        Path, typer.Option(metavar="FILE", help="The cluster file to write.", callback=is_cluster_file)
    ] = Path("cluster.toml"),
    ranks: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Processes that measure at once: as many as will train. Not given: one for each device or core.",
            show_default=False,
        ),
    ] = None,
    effort: Annotated[
        Literal["full", "short"], typer.Option(help="How long to measure; short: a third of the time, wider ranges.")
    ] = "full",
    json_: JsonPath = None,
) -> None:
    """Measure this machine, its products, attention, memory, collectives, copies and host, and write a cluster file.

    Example: headway calibrate --to here.toml && headway rehearse RECIPE --cluster here.toml --devices 2

    All ranks measure at the same time, as they compute in training: what they share is slower for each. Leave the
    machine alone meanwhile. Each number in the file has its range and says where and when it was measured.
    """
    from headway.calibrate import FULL, SHORT, device_type
    from headway.calibrate import calibrate as measure
    from headway.cluster import cluster_toml

    found = measure(ranks, {"full": FULL, "short": SHORT}[effort][device_type()])
    write_or_tell(to, lambda path: path.write_text(cluster_toml(found.cluster), encoding="utf-8"))
    give_result({"file": str(to)} | found.as_json(), _rendered(found, to), json_)


def _rendered(found: "Calibration", to: Path) -> str:
    cluster = found.cluster
    accelerator, achieved = cluster.accelerator, cluster.achieved
    lines = [f"{cluster.name}: {cluster.source}"]
    for precision, rate in achieved.matrix.items():
        peak = accelerator.peak_tflops(precision)
        if peak is not None:
            reached = 1e3 * peak * rate.efficiency.value
            lines.append(f"products, {precision}: {reached:,.4g} GFLOP/s, half of it at depth {rate.half_depth:g}")
    lines.append(f"memory: {accelerator.memory_bandwidth_gb_per_s:,.4g} GB/s; of it")
    lines += [f"  {kind}: {rate.value:.0%}" for kind, rate in achieved.memory.fraction.items()]
    for level in cluster.levels:
        for kind, own in level.achieved.kinds.items():
            reached = level.gb_per_s_unidirectional * own.efficiency.value
            lines.append(f"{kind}, {level.devices} ranks: {own.startup_us:,.4g} us and {reached:,.4g} GB/s")
    lines.append(f"host: {achieved.host.operator_us.value:.4g} us an operator")
    return "\n".join([*lines, f"written: {to}"])
