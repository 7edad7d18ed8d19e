"""From a row of a table of runs to what it ran: model, layout, settings, framework; never from what it measured."""

import re
from dataclasses import dataclass, replace

from headway.cluster import Cluster, accelerator_named, cluster_named, parse_cluster
from headway.errors import UserError
from headway.plan.behaviour import Behaviour
from headway.plan.block_time import Settings
from headway.plan.layout import Layouts, layouts
from headway.plan.mapping_frameworks import framework_of, settings_of
from headway.plan.mapping_models import sequence_of, shape_of
from headway.plan.runs_table import Run
from headway.plan.shape import ModelShape


class Unmapped(Exception):  # noqa: N818
    """A row that does not say enough, or says what is not modelled: its text is the reason."""


@dataclass(frozen=True)
class Case:
    """What a row ran."""

    run: Run
    cluster: Cluster
    shape: ModelShape
    layouts: Layouts
    settings: Settings
    behaviour: Behaviour
    micro_batch_stated: bool

    @property
    def kind(self) -> str:
        """dense, mixture or diffusion."""
        if not self.shape.vocabulary and self.shape.blocks[0].attention and not self.shape.blocks[0].attention.causal:
            return "diffusion"
        return "mixture" if any(block.experts for block in self.shape.blocks) else "dense"


def case_of(run: Run) -> Case:
    """What a row ran. Raises Unmapped with the reason."""
    cluster = _cluster(run)
    shape = shape_of(run)
    if shape is None:
        raise Unmapped(f"the model {run.model!r} is not known by name, and the row does not state its dimensions")
    sequence = sequence_of(run, shape)
    if sequence is None:
        raise Unmapped("the row states no sequence length")
    behaviour = framework_of(run)
    if behaviour is None:
        raise Unmapped(f"the framework {run.framework!r} is not known")
    settings = settings_of(run, shape, sequence)
    columns, stated = _layout(run, shape, settings)
    joined = cluster.levels[-1].devices if cluster.levels else 1
    if columns.devices[0] > joined:
        raise Unmapped(f"{cluster.name} is known as {joined} devices, without a network between more")
    return Case(run, cluster, shape, columns, settings, behaviour, stated)


def _layout(run: Run, shape: ModelShape, settings: Settings) -> tuple[Layouts, bool]:
    devices = run.whole("num_gpus")
    if not devices:
        raise Unmapped("the row states no number of devices")
    tp, cp, pp = (run.whole(column, 1) for column in ("tp", "cp", "pp"))
    if devices % (tp * cp * pp):
        raise Unmapped(f"tp {tp} x cp {cp} x pp {pp} does not divide {devices} devices")
    replicas = devices // (tp * cp * pp)
    micro, whole, stated = _batch(run, replicas)
    sequence_parallel = run.words["sp"] == "true" or (run.words["sp"] == "" and tp > 1)
    columns = layouts(
        devices,
        micro,
        max(whole, micro * replicas),
        tp=tp,
        sequence_parallel=float(sequence_parallel and tp > 1),
        cp=cp,
        pp=pp,
        virtual=_virtual(run, shape, pp),
        ep=run.whole("ep", 1),
        etp=run.whole("etp", 1),
    )
    return columns, stated


def _batch(run: Run, replicas: int) -> tuple[float, float, bool]:
    """(micro-batch, global batch, whether the micro-batch is stated)."""
    stated = re.search(r"train_batch_size = (\d+)", run.source)
    micro, whole = run.whole("micro_batch"), run.whole("global_batch")
    if stated and not micro:
        micro = int(stated[1])
    if "ONE transformer layer" in run.model:
        return micro, micro, True
    if "local batch 8" in run.notes and run.whole("pp", 1) > 1 and not micro:
        return 1, whole, True  # torchtitan cuts the local batch into micro-batches of one sample
    if micro and not whole:
        return micro, micro * replicas, True
    if not micro and not whole:
        raise Unmapped("the row states no batch size")
    if not micro and run.words["dp_strategy"].startswith("fsdp"):
        return max(1, whole // replicas), whole, True  # no accumulation under plain FSDP
    if run.framework.startswith("NeMo Automodel") and run.whole("pp", 1) > 1:
        return micro, whole, True
    return (micro or 1), whole, bool(micro)


def _virtual(run: Run, shape: ModelShape, pp: int) -> int:
    given = run.whole("vpp")
    if pp == 1:
        return 1
    if given:
        return given
    if run.framework.startswith("NeMo (DGXC") and "340B" in run.model:
        return 12  # the recipe of the other releases of this table: one layer a chunk
    return 1


def _cluster(run: Run) -> Cluster:
    name = _accelerator(run.gpu)
    if name is None:
        raise Unmapped(f"the accelerator {run.gpu!r} is not in the catalogue")
    if run.source.startswith("SimuMax") and name == "B200-SXM-180GB":
        return cluster_named("simumax-b200")
    if "inter-node 800 Gb/s" in run.notes:
        return _with_network(name, 12.5)
    if "zero3 (deepspeed)" in run.words["dp_strategy"]:  # one ring over one of a node's interfaces
        return _with_network(name, 25.0 / 8)
    return cluster_named(name)


def _with_network(name: str, gb_per_s: float) -> Cluster:
    accelerator = accelerator_named(name)
    inner = {
        "name": "scale-up",
        "devices": accelerator.scale_up_devices,
        "gb_per_s_unidirectional": accelerator.scale_up_gb_per_s_unidirectional,
    }
    outer = {"name": "network", "devices": 1 << 17, "gb_per_s_unidirectional": gb_per_s}
    return parse_cluster({"accelerator": name, "levels": [inner, outer], "units_checked": True}, source=name)


ACCELERATORS = (
    (r"96gb-hbm2e", "H100-SXM5-96GB-HBM2e"),
    (r"gb300", "GB300-NVL72"),
    (r"gb200", "GB200-NVL72"),
    (r"b300", "B300-SXM"),
    (r"b200", "B200-SXM-180GB"),
    (r"h200", "H200-SXM-141GB"),
    (r"h800", "H800-SXM5-80GB"),
    (r"h20\b", "H20-SXM5-96GB"),
    (r"h100-?pcie", "H100-PCIe-80GB"),
    (r"h100", "H100-SXM5-80GB"),
    (r"a100.*pcie", "A100-PCIe-80GB"),
    (r"a100.*40", "A100-SXM4-40GB"),
    (r"a100", "A100-SXM4-80GB"),
    (r"a800", "A800-SXM4-80GB"),
    (r"mi300x", "MI300X"),
    (r"mi325x", "MI325X"),
    (r"mi355x", "MI355X"),
    (r"l40s", "L40S"),
    (r"4090", "RTX-4090"),
    (r"v100", "V100-SXM2"),
)
"""Accelerators by what tables call them."""


def _accelerator(text: str) -> str | None:
    found = next((name for pattern, name in ACCELERATORS if re.search(pattern, text.lower())), None)
    if found is None:
        try:
            return accelerator_named(text).name
        except UserError:
            return None
    return found


def with_micro_batch(case: Case, micro: float) -> Case:
    """The same case with another micro-batch."""
    columns = replace(case.layouts, micro_batch=case.layouts.micro_batch * 0 + micro)
    return replace(case, layouts=columns)
