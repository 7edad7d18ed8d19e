"""The catalogue of accelerators: published peaks, memory and links, each with its source."""

import difflib
import tomllib
from functools import cache
from importlib.resources import files
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from headway.errors import UserError

Precision = Literal["float32", "tf32", "float16", "bfloat16", "float8", "float4"]
Positive = Annotated[float, Field(gt=0)]


class Accelerator(BaseModel):
    """One device as published. Bandwidths in GB/s (1e9 bytes) per device, links one way; None: unknown, or no link."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    vendor: str
    form: str
    generation: str
    """What shares kernels and their efficiencies: ``ampere``, ``hopper``, ``cdna3``, …"""
    processors: Annotated[int, Field(ge=1)]
    """Streaming multiprocessors, compute units or cores: what a kernel's tiles are spread over."""
    power_w: Positive | None = None
    """The power limit as sold."""
    device_names: tuple[str, ...]
    """What ``torch.cuda.get_device_name`` returns for it, letter by letter."""
    dense_peak_tflops: dict[Precision, Positive]
    """1e12 floating-point operations a second of dense matrix products, a multiply-add counting as two."""
    memory_gb: Positive
    """As sold: 1e9 or 2**30 bytes, as the vendor counts."""
    memory_bandwidth_gb_per_s: Positive
    host_gb_per_s_unidirectional: Positive | None = None
    """To the host's memory: PCIe, or NVLink to a superchip's processor."""
    scale_up_gb_per_s_unidirectional: Positive | None = None
    """NVLink or xGMI, all links of the device together."""
    scale_up_devices: Annotated[int, Field(ge=1)]
    """Devices that reach each other over the scale-up links."""
    nic_gb_per_s_unidirectional: Positive | None = None
    """The usual network interface of one device."""
    source: str
    verified: str
    """Whether the figures were read again at their source: yes, partly, no."""
    notes: str = ""

    def peak_tflops(self, precision: str) -> float | None:
        """Dense peak of ``precision`` in TFLOP/s; None when it is not catalogued.

        Products of float32 without TF32 (torch's default) have no catalogued peak: ask for ``tf32`` where it is on.
        """
        return {str(key): value for key, value in self.dense_peak_tflops.items()}.get(precision)


@cache
def load_catalogue() -> tuple[Accelerator, ...]:
    """All accelerators that ship with headway."""
    text = files("headway.cluster").joinpath("catalogue.toml").read_text(encoding="utf-8")
    return tuple(Accelerator.model_validate(entry) for entry in tomllib.loads(text)["accelerator"])


def accelerator_named(name: str) -> Accelerator:
    """The accelerator of this catalogue name, upper or lower case. Raises UserError naming the nearest."""
    by_name = {accelerator.name.lower(): accelerator for accelerator in load_catalogue()}
    if name.lower() in by_name:
        return by_name[name.lower()]
    near = [known for known in by_name if known.startswith(name.lower())][:1]
    near = near or difflib.get_close_matches(name.lower(), by_name, n=1, cutoff=0.5)
    suggestion = f"; did you mean {by_name[near[0]].name}?" if near else ""
    known = ", ".join(accelerator.name for accelerator in by_name.values())
    raise UserError(f"accelerator {name!r} is not in the catalogue{suggestion} (known: {known})")


def accelerator_of_device(device_name: str) -> Accelerator | None:
    """The accelerator whose driver reports ``device_name`` (``torch.cuda.get_device_name()``); None when not known.

    Only exact names count: a variant (laptop part, NVL, MIG slice) has other peaks than the part it is named after.
    """
    for accelerator in load_catalogue():
        if device_name in accelerator.device_names:
            return accelerator
    return None


def accelerator_like(accelerator: Accelerator) -> Accelerator | None:
    """The catalogue's entry that a described accelerator means: of the same name, or of a name that it begins with."""
    by_name = {known.name.lower(): known for known in load_catalogue()}
    name = accelerator.name.lower()
    return by_name.get(name) or next((known for key, known in by_name.items() if name.startswith(key)), None)
