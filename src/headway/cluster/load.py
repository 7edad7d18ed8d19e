"""Clusters by name and from files: TOML on top of what is known of the accelerator, checked before it is believed."""

import difflib
import tomllib
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from headway.cluster.achieved import Achieved, achieved_on, link_achieved_on
from headway.cluster.catalogue import Accelerator, accelerator_named, load_catalogue
from headway.cluster.topology import Cluster, Level
from headway.cluster.units import slips
from headway.errors import UserError

MOST_DEVICES = 1 << 17
"""Devices that a cluster's outermost level joins when nothing else is said."""
_KEYS = {
    "name",
    "accelerator",
    "devices_per_node",
    "devices",
    "power_cap_w",
    "levels",
    "achieved",
    "source",
    "units_checked",
}


def cluster_of(name_or_file: str) -> Cluster:
    """A cluster by name (of a cluster or an accelerator), or from a TOML file. Raises UserError."""
    if name_or_file.endswith(".toml") or "/" in name_or_file:
        return load_cluster(Path(name_or_file))
    return cluster_named(name_or_file)


def cluster_named(name: str) -> Cluster:
    """A cluster that ships with headway, or nodes of a catalogued accelerator. Raises UserError naming the nearest."""
    documents = shipped_clusters()
    if name.lower() in documents:
        return parse_cluster(documents[name.lower()], source=name)
    accelerators = {accelerator.name.lower(): accelerator.name for accelerator in load_catalogue()}
    if name.lower() in accelerators:
        return parse_cluster({"name": name, "accelerator": name}, source=name)
    known = [*documents, *accelerators.values()]
    near = difflib.get_close_matches(name.lower(), [*documents, *accelerators], n=1, cutoff=0.5)
    suggestion = f"; did you mean {accelerators.get(near[0], near[0])}?" if near else ""
    raise UserError(f"cluster {name!r} is not known{suggestion} (known: {', '.join(known)}; or give a .toml file)")


def load_cluster(path: Path) -> Cluster:
    """Read a cluster file. Raises UserError naming file, key and fix."""
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not valid TOML: {error}") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    return parse_cluster({"name": path.stem, **document}, source=str(path))


def parse_cluster(document: dict[str, Any], source: str) -> Cluster:
    """A cluster from a document in the form of a cluster file; ``source`` names it in errors. Raises UserError.

    ``accelerator`` (a catalogue name, or a table) is required; levels, rates and devices that are not given are the
    catalogue's. A number that looks like another unit's is refused unless ``units_checked = true``.
    """
    for key in document:
        if key not in _KEYS:
            near = difflib.get_close_matches(key, _KEYS, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known here: {', '.join(sorted(_KEYS))}"
            raise UserError(f"{source}: {key}: unknown key; {hint}")
    try:
        cluster = _build(document, source)
    except ValidationError as error:
        lines = [_explain(item) for item in error.errors()]
        raise UserError("\n".join(f"{source}: {line}" for line in lines)) from None
    if not document.get("units_checked", False):
        _suspect_units(cluster, source)
    return cluster


def _build(document: dict[str, Any], source: str) -> Cluster:
    accelerator = _accelerator(document.get("accelerator"), source)
    devices_per_node = document.get("devices_per_node", _usual_devices_per_node(accelerator))
    levels = document.get("levels")
    if levels is None:
        levels = _usual_levels(accelerator, devices_per_node, document.get("devices", MOST_DEVICES))
    elif not isinstance(levels, list) or not all(isinstance(level, dict) for level in levels):
        raise UserError(f"{source}: levels: write each as a [[levels]] table")
    return Cluster(
        name=document.get("name", accelerator.name),
        accelerator=accelerator,
        devices_per_node=devices_per_node,
        power_cap_w=document.get("power_cap_w"),
        levels=tuple(_level(level, number, accelerator, source) for number, level in enumerate(levels)),
        achieved=Achieved.model_validate(_merged(achieved_on(accelerator).model_dump(), document.get("achieved", {}))),
        source=document.get("source", ""),
    )


def _accelerator(given: Any, source: str) -> Accelerator:
    if isinstance(given, str):
        try:
            return accelerator_named(given)
        except UserError as error:
            raise UserError(f"{source}: {error}") from None
    if isinstance(given, dict):
        return Accelerator.model_validate({"source": source, "verified": "by the user", "device_names": (), **given})
    raise UserError(f'{source}: accelerator: required: a name of the catalogue ("H100-SXM5-80GB") or a table')


def _usual_devices_per_node(accelerator: Accelerator) -> int:
    if accelerator.form == "superchip":
        return 4 if accelerator.scale_up_devices > 8 else 1
    return 8


def _usual_levels(accelerator: Accelerator, devices_per_node: int, devices: int) -> list[dict[str, Any]]:
    """A scale-up domain (or the host's PCIe), and one network interface a device."""
    levels: list[dict[str, Any]] = []
    within = accelerator.scale_up_devices
    if accelerator.scale_up_gb_per_s_unidirectional and within > 1:
        topology = "mesh" if accelerator.vendor == "AMD" else "switch"
        bandwidth = accelerator.scale_up_gb_per_s_unidirectional
        levels.append(
            {"name": "scale-up", "devices": within, "gb_per_s_unidirectional": bandwidth, "topology": topology}
        )
    elif accelerator.host_gb_per_s_unidirectional and devices_per_node > 1:
        within = devices_per_node
        bandwidth = accelerator.host_gb_per_s_unidirectional
        levels.append({"name": "pcie", "devices": within, "gb_per_s_unidirectional": bandwidth, "topology": "bus"})
    if accelerator.nic_gb_per_s_unidirectional and devices > within:
        outer = {"name": "network", "devices": devices // within * within}
        levels.append({**outer, "gb_per_s_unidirectional": accelerator.nic_gb_per_s_unidirectional})
    return levels


def _level(given: dict[str, Any], number: int, accelerator: Accelerator, source: str) -> Level:
    inner = number == 0 and (given.get("topology") == "bus" or given.get("devices", 0) <= accelerator.scale_up_devices)
    kind: Literal["scale_up", "scale_out"] = "scale_up" if inner else "scale_out"
    usual = link_achieved_on(accelerator, kind).model_dump()
    own = given.get("achieved", {})
    if not isinstance(own, dict):
        raise UserError(f"{source}: levels.{number}.achieved: write it as a table")
    try:
        return Level.model_validate({**given, "achieved": _merged(usual, own)})
    except ValidationError as error:
        lines = [_explain({**item, "loc": ("levels", number, *item["loc"])}) for item in error.errors()]
        raise UserError("\n".join(f"{source}: {line}" for line in lines)) from None


def _merged(usual: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """``given`` over ``usual``, table by table; a rate given as a number or a list replaces the whole rate."""
    merged: dict[str, Any] = dict(usual)
    for key, value in given.items():
        old = merged.get(key)
        merged[key] = _merged(old, value) if isinstance(value, dict) and isinstance(old, dict) else value
    return merged


def _suspect_units(cluster: Cluster, source: str) -> None:
    found = [
        f"{source}: {slip.key} = {slip.given:g} looks like {slip.suspected}: write {slip.meant:g} "
        "(or units_checked = true if it is right)"
        for slip in slips(cluster.accelerator, cluster.levels)
    ]
    if found:
        raise UserError("\n".join(found))


def _explain(item: Any) -> str:
    place = ".".join(str(part) for part in item["loc"]) or "cluster"
    match item["type"]:
        case "extra_forbidden":
            return f"{place}: unknown key"
        case "missing":
            return f"{place}: required key is missing"
        case "value_error":
            return f"{place}: {item['ctx']['error']}"
        case _:
            return f"{place}: {item['msg']} (got {item['input']!r})"


@cache
def shipped_clusters() -> dict[str, dict[str, Any]]:
    """The documents of the clusters that ship with headway, by name."""
    text = files("headway.cluster").joinpath("clusters.toml").read_text(encoding="utf-8")
    return {document["name"]: document for document in tomllib.loads(text)["cluster"]}
