"""What kernels reach of the published peaks: a few numbers per accelerator, each with a range and a source."""

import tomllib
from functools import cache
from importlib.resources import files
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from headway.cluster.catalogue import Accelerator, Precision

OperatorKind = Literal["pointwise", "activation", "normalisation", "softmax", "cast", "permute", "optimizer"]
"""``activation``: transcendental functions of each element, which a CPU does not compute as fast as it moves them."""
CollectiveKind = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send_recv"]
NonNegative = Annotated[float, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]


class Measured(BaseModel):
    """A part of the achieved rates: immutable, and closed against unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Rate(Measured):
    """A number with the range that its sources span. In a file: ``[value, low, high]``, or the value alone."""

    value: Positive
    low: NonNegative
    high: Positive

    @model_validator(mode="before")
    @classmethod
    def _from_list(cls, given: Any) -> Any:
        if isinstance(given, int | float) and not isinstance(given, bool):
            return {"value": given, "low": given, "high": given}
        if isinstance(given, list | tuple):
            if len(given) != 3:
                raise ValueError("write [value, low, high], or the value alone")
            return dict(zip(("value", "low", "high"), given, strict=True))
        return given

    @model_validator(mode="after")
    def _is_ordered(self) -> "Rate":
        if not self.low <= self.value <= self.high:
            raise ValueError(f"{self.value} lies outside of its own range {self.low} to {self.high}")
        return self


class MatrixRate(Measured):
    """Matrix products of one precision, of random operands, on a device that has been busy for seconds."""

    efficiency: Rate
    """Share of the dense peak that large products reach."""
    half_depth: NonNegative
    """Inner dimension at which half of that is reached: filling and draining the pipeline takes this many steps."""
    half_rows: NonNegative = 320
    """Rows of a group at which grouped products (experts) reach half of it."""
    call_us: NonNegative = 0
    """Microseconds that the host takes for a product beyond any other operator: an emulated one is several."""
    source: str = ""


class AttentionRate(Measured):
    """A fused attention kernel. Efficiencies are shares of the dense bfloat16 peak, per head size."""

    forward: dict[int, Rate]
    backward: dict[int, Rate]
    half_keys: NonNegative
    """Number of keys at which half of the efficiency is reached: start and end of each row of tiles."""
    rows_per_processor: NonNegative
    """Query rows (over all heads) per processor at which the device is half filled."""
    tile_keys: Annotated[float, Field(ge=1)] = 1
    """Keys of a tile, of which a causal mask lets the kernel skip only whole ones."""
    source: str = ""


class CacheRate(Measured):
    """Operators on what lies in a processor's last-level cache, where the operator before has just left it."""

    megabytes: Positive
    """1e6 bytes of the cache that are a device's."""
    fraction: dict[OperatorKind, Rate]
    """As ``MemoryRate.fraction``: above 1 where the cache is faster than the memory."""


class MemoryRate(Measured):
    """Operators bound by memory, by kind: share of the memory bandwidth that they reach."""

    fraction: dict[OperatorKind, Rate]
    startup_us: NonNegative
    """Of every kernel, however small."""
    cache: CacheRate | None = None
    """Of the bytes that an operator moves as many as the cache holds go at its rates; None: all go to the memory."""
    source: str = ""


class HostRate(Measured):
    """The host that launches kernels one by one."""

    operator_us: Rate
    """Host time of an eager operator, dispatch and launch."""
    process_gib: Rate | None = None
    """Resident memory of a process that trains, its tensors left out; None: not measured."""
    copy_fraction: Rate | None = None
    """Share of the link to the host that copies from pinned memory reach; None: not measured."""
    source: str = ""


class KindRate(Measured):
    """One kind of collective by itself: a library need not do all of them by rings of equal rates (gloo scatters the
    result of a whole all-reduce)."""

    startup_us: NonNegative
    efficiency: Rate
    """Share of the link's bandwidth that what crosses it in a ring would then have reached."""


class LinkRate(Measured):
    """What collectives reach over one level of links."""

    startup_us: NonNegative
    hop_us: NonNegative
    """Each step from one device (or node) to the next."""
    ramp_us: NonNegative
    """Added in full from ``ramp_megabytes`` on, below in proportion: the change to protocols made for bandwidth."""
    ramp_megabytes: Positive
    efficiency: Rate
    """Share of the link's bandwidth that large rings reach."""
    few_ranks: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """A ring of n reaches ``efficiency · (1 - few_ranks / n)``: few ranks leave links unused."""
    loss_per_doubling: NonNegative = 0.0
    """What the efficiency loses with each doubling of the domains that the level joins."""
    all_to_all_startup_us: NonNegative
    all_to_all_efficiency: Rate
    in_network_efficiency: Rate | None = None
    """All-reduce summed by the switch (NVLS): tensor bytes per second as a share of the link's bandwidth; None: it
    can't."""
    in_network_from: Annotated[int, Field(ge=2)] = 2
    """Ranks from which the library lets the switch sum."""
    kinds: dict[CollectiveKind, KindRate] = {}
    """Kinds that were measured by themselves: in place of the startups and efficiencies of all."""
    source: str = ""


class Achieved(Measured):
    """All that is achieved on one device."""

    matrix: dict[Precision, MatrixRate]
    attention: dict[str, AttentionRate]
    attention_kernel: str
    """The kernel that a program gets that does not choose: a key of ``attention``."""
    memory: MemoryRate
    host: HostRate
    compute_slowdown: Rate
    """By how much compute is slower while a collective runs beside it: 0.15 is 15 %."""

    @model_validator(mode="after")
    def _has_its_kernel(self) -> "Achieved":
        if self.attention_kernel not in self.attention:
            raise ValueError(f"attention_kernel {self.attention_kernel!r} is none of {', '.join(self.attention)}")
        return self


def achieved_on(accelerator: Accelerator) -> Achieved:
    """The defaults for an accelerator: those of its own, of its generation, or (with wide ranges) of any device."""
    table = _table()
    matrix: dict[str, Any] = {}
    for entry in table["matrix"]:
        if accelerator.name in entry["accelerators"]:
            matrix |= {precision: {"source": entry["source"], **rate} for precision, rate in entry["rates"].items()}
    attention = _of_generation(table["attention"], accelerator)
    return Achieved.model_validate(
        {
            "matrix": matrix or table["any"]["matrix"],
            "attention": {entry["kernel"]: _without(entry, "generations", "kernel", "default") for entry in attention},
            "attention_kernel": next(entry["kernel"] for entry in attention if entry.get("default")),
            "memory": _without(_of_generation(table["memory"], accelerator)[0], "generations"),
            "host": table["host"],
            "compute_slowdown": table["compute_slowdown"]["rate"],
        }
    )


def link_achieved_on(accelerator: Accelerator, kind: Literal["scale_up", "scale_out"]) -> LinkRate:
    """The defaults for the links of an accelerator: within its scale-up domain, or between nodes."""
    return LinkRate.model_validate(_without(_of_generation(_table()[kind], accelerator)[0], "generations"))


def _of_generation(entries: list[dict[str, Any]], accelerator: Accelerator) -> list[dict[str, Any]]:
    own = [entry for entry in entries if accelerator.generation in entry["generations"]]
    return own or [entry for entry in entries if "any" in entry["generations"]]


def _without(entry: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in entry.items() if key not in keys}


@cache
def _table() -> dict[str, Any]:
    return tomllib.loads(files("headway.cluster").joinpath("achieved.toml").read_text(encoding="utf-8"))
