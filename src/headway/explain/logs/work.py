"""What a tried run does, as its command and description tell: the things that change tokens a second without speed."""

import re
import shlex
from collections.abc import Mapping

_WORK_FLAGS = (
    (re.compile(r"seq(uence)?[-_]?len(gth)?$|max_(seq_)?length$|block_size$"), "sequence length"),
    (re.compile(r"(local|global|micro|per_device_\w+)?[-_]?batch([-_]size)?$"), "batch size"),
    (re.compile(r"(log|logging)_(freq|interval|steps)$|structured[-_]logging$|metrics\.\w+$"), "logging"),
    (re.compile(r"(^|\.)profil\w*\.?|enable_profiling$"), "profiler"),
    (re.compile(r"dataset$|tokenizer(_path)?$"), "data"),
)
"""By the last parts of a flag's name."""
_WORK_WORDS = (
    (re.compile(r"\bseq(uence)?[-_ ]?len(gth)?\b\D{0,12}(\d+)?", re.I), "sequence length"),
    (re.compile(r"\b(local|global|micro)[-_ ]?batch([-_ ]size)?\b\D{0,4}(\d+)", re.I), "batch size"),
    (re.compile(r"\blog(ging)?[-_ ]?(freq|interval|window|every)\w*|structured logging", re.I), "logging"),
    (re.compile(r"\bprofil(ed|ing|er run)\b", re.I), "profiler"),
)


def command_flags(command: str) -> dict[str, str]:
    """Flags of a command line by name, spelled with underscores; environment variables under their own names."""
    try:
        words = shlex.split(command)
    except ValueError:
        words = command.split()
    flags: dict[str, str] = {}
    for place, word in enumerate(words):
        if variable := re.fullmatch(r"([A-Z][A-Z0-9_]*)=(.*)", word):
            flags[variable[1]] = variable[2]
        elif word.startswith("--"):
            name, given, value = word[2:].partition("=")
            following = words[place + 1] if place + 1 < len(words) else ""
            bare = not given and following and not following.startswith("--")
            flags[name.replace("-", "_")] = following if bare else value
    return flags


def work_of(flags: Mapping[str, str], description: str) -> frozenset[str]:
    """What the run does that decides its throughput without being a speed: ``batch size 8``, ``profiler``, …"""
    found = set()
    for name, value in flags.items():
        for pattern, what in _WORK_FLAGS:
            if pattern.search(name):
                found.add(what if what in ("profiler", "logging") else f"{what} {value}")
    told = {name.split(" ")[0] for name in found}
    for pattern, what in _WORK_WORDS:
        match = pattern.search(description)
        if match and what.split(" ")[0] not in told:
            number = match.group(match.lastindex) if match.lastindex and what.endswith(("length", "size")) else None
            found.add(f"{what} {number}" if number and number.isdigit() else what)
    return frozenset(found)
