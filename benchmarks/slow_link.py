"""Predicted beside measured across a slow link: two hosts of one or two ranks, joined by 1 Gbit/s and 200 Mbit/s.

The hosts are network namespaces of this machine, joined by a pair of virtual interfaces that a token bucket (tbf)
shapes on both sides. The machine is calibrated with as many ranks as a run has; of the link nothing is measured: its
rate is what it was shaped to, and what collectives reach of it follows from the sizes of headers and from what gloo
sends. DDP and FSDP2 have one rank on each host, HSDP shards within a host and replicates across. Needs root, ip and tc;
elsewhere it says so and does nothing.
Run: python benchmarks/slow_link.py --json benchmarks/results/slow_link.json
"""

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway.cluster import Cluster, parse_cluster
from headway.recipe import Recipe, to_toml
from predicted_vs_measured import clusters, errors, predicted, recipe_of, run_of, summary, write_data

RATES = {"1gbit": 1e9, "200mbit": 200e6}
"""Bits a second, by tc's names."""
BURST, LATENCY = "256kb", "400ms"
"""Of the token bucket."""
PAYLOAD = 1448 / 1514
"""Of a full Ethernet frame, what is left between headers of Ethernet (14 bytes), IP (20) and TCP (32)."""
ONE_WAY_US = 150.0
"""Between the hosts, the bucket being full."""
PASSES = {"all_reduce": 1.0, "all_gather": 1.0, "reduce_scatter": 2.0, "all_to_all": 1.0, "broadcast": 1.0}
"""What gloo sends over what a ring would have to: torch's reduce-scatter over gloo is an all-reduce."""
CASES: list[tuple[str, int, dict[str, dict[str, Any]]]] = [
    ("DDP", 1, {"layout": {"dp_replicate": 2}, "run": {"micro_batch": 2}}),
    ("FSDP2", 1, {"run": {"micro_batch": 2}}),
    ("HSDP", 2, {"layout": {"dp_replicate": 2}, "run": {"micro_batch": 1}}),
]
"""Name, ranks of each host, and what the recipe has besides."""
PORT = 29641


@dataclass(frozen=True)
class Host:
    """A network namespace and its end of the link."""

    namespace: str
    interface: str
    address: str


HOSTS = (Host("headway-a", "headway-va", "10.77.0.1"), Host("headway-b", "headway-vb", "10.77.0.2"))


def missing() -> str | None:
    """What this machine lacks to run here; None: nothing."""
    if os.geteuid() != 0:
        return "two hosts as network namespaces need root"
    lacking = [name for name in ("ip", "tc") if shutil.which(name) is None]
    return f"{' and '.join(lacking)} not found (package iproute2)" if lacking else None


@contextlib.contextmanager
def joined_hosts(rate: str) -> Iterator[None]:
    """Two hosts, joined by a link of ``rate`` each way; taken down at the end."""
    first, second = HOSTS
    _take_down()
    try:
        for host in HOSTS:
            _run("ip", "netns", "add", host.namespace)
        _run("ip", "link", "add", first.interface, "type", "veth", "peer", "name", second.interface)
        for host in HOSTS:
            _run("ip", "link", "set", host.interface, "netns", host.namespace)
            _inside(host, "ip", "address", "add", f"{host.address}/24", "dev", host.interface)
            for interface in (host.interface, "lo"):
                _inside(host, "ip", "link", "set", interface, "up")
            shape = ("tbf", "rate", rate, "burst", BURST, "latency", LATENCY)
            _inside(host, "tc", "qdisc", "add", "dev", host.interface, "root", "handle", "1:", *shape)
        yield
    finally:
        _take_down()


def _take_down() -> None:
    for host in HOSTS:
        subprocess.run(["ip", "netns", "delete", host.namespace], capture_output=True, check=False)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


def _inside(host: Host, *command: str) -> None:
    _run("ip", "netns", "exec", host.namespace, *command)


def cluster_with_link(machine: Cluster, ranks_of_host: int, bits_per_s: float) -> Cluster:
    """``machine``, calibrated with all ranks at once, as two hosts joined by a link that their ranks share."""
    document = machine.model_dump(mode="json", exclude_none=True)
    (within,) = document["levels"]
    kinds = within["achieved"]["kinds"]
    across = {
        kind: {"startup_us": kinds[kind]["startup_us"], "efficiency": PAYLOAD / times} for kind, times in PASSES.items()
    }
    link = {
        "name": "link",
        "devices": 2 * ranks_of_host,
        "gb_per_s_unidirectional": bits_per_s / 8e9 / ranks_of_host,
        "achieved": within["achieved"]
        | {"hop_us": ONE_WAY_US, "efficiency": PAYLOAD, "all_to_all_efficiency": PAYLOAD, "kinds": across}
        | {"source": "the shape of the link, headers, and what gloo sends"},
    }
    inner = [within | {"devices": ranks_of_host}] if ranks_of_host > 1 else []
    whole = document | {"devices_per_node": ranks_of_host, "levels": [*inner, link], "units_checked": True}
    return parse_cluster(whole | {"name": f"two hosts of {ranks_of_host}"}, source="slow_link")


def measured(recipe: Recipe, ranks_of_host: int, folder: Path) -> dict[str, Any]:
    """Of a real run by ``headway train``, each rank started on its host as a scheduler would."""
    path = folder / f"{recipe.run.directory.name}.toml"
    path.write_text(to_toml(recipe))
    world = 2 * ranks_of_host
    ranks = []
    try:
        for rank in range(world):
            host = HOSTS[rank // ranks_of_host]
            environment = {
                "RANK": str(rank),
                "WORLD_SIZE": str(world),
                "LOCAL_RANK": str(rank % ranks_of_host),
                "LOCAL_WORLD_SIZE": str(ranks_of_host),
                "MASTER_ADDR": HOSTS[0].address,
                "MASTER_PORT": str(PORT),
                "GLOO_SOCKET_IFNAME": host.interface,
            }
            command = ["ip", "netns", "exec", host.namespace, sys.executable, "-m", "headway.cli.main", "train"]
            log = (folder / f"{recipe.run.directory.name}-{rank}.log").open("w")
            with log:
                ranks.append(
                    subprocess.Popen(
                        [*command, str(path)], env=os.environ | environment, stdout=log, stderr=subprocess.STDOUT
                    )
                )
        codes = [process.wait(900) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    if any(codes):
        raise RuntimeError((folder / f"{recipe.run.directory.name}-0.log").read_text())
    return run_of(recipe)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", help="cases whose name or rate has this in it")
    parser.add_argument("--clusters", type=Path, help="a folder of cluster files to keep between runs")
    parser.add_argument("--steps", type=int, default=16)
    arguments = parser.parse_args()
    lacking = missing()
    if lacking is not None:
        print(f"skipped: {lacking}")
        return
    os.environ |= {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    chosen = [
        (rate, *case) for rate in RATES for case in CASES if not arguments.only or arguments.only in (case[0], rate)
    ]
    report: dict[str, Any] = {"benchmark": "slow_link", "load_before": os.getloadavg()[0], "cases": []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_data(folder)
        machines = clusters(folder, {2 * case[2] for case in chosen}, arguments.clusters)
        for number, (rate, layout, ranks_of_host, sections) in enumerate(chosen):
            world = 2 * ranks_of_host
            own = sections | {"run": sections["run"] | {"steps": arguments.steps}}
            recipe = recipe_of("text", own, folder, f"run-{number}")
            forecast = predicted(recipe, world, cluster_with_link(machines[world], ranks_of_host, RATES[rate]))
            with joined_hosts(rate):
                found = measured(recipe, ranks_of_host, folder)
            case = {"layout": layout, "rate": rate, "ranks": world, "predicted": forecast, "measured": found}
            report["cases"].append(case | {"errors": errors(forecast, found)})
            print(
                f"{layout}, {rate}, {world} ranks: {1e3 * forecast['step_time_s']['value']:.0f} ms predicted, "
                f"{1e3 * found['step_time_s']:.0f} measured "
                f"({report['cases'][-1]['errors']['step_time_s_error_percent']:+.0f} %)",
                flush=True,
            )
    report["step_time_s"] = summary(report["cases"], "step_time_s")
    print(json.dumps(report["step_time_s"]))
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
