"""What a rank sends, by mesh axis and collective: messages and bytes.

A collective counts as one message, a send as one. Its bytes are what a rank puts on the wire in the algorithm that
needs the fewest (Thakur et al. 2005, Optimization of collective communication operations in MPICH): with n ranks

    all-gather, of n equal pieces         (n - 1) / n of the whole
    reduce-scatter, into n equal pieces   (n - 1) / n of the whole
    all-reduce                            both: 2 (n - 1) / n of the whole
    all-to-all                            all pieces but the rank's own
    send                                  the tensor; a receive sends nothing
"""

from collections.abc import Iterable, Mapping
from fractions import Fraction
from typing import NamedTuple


class Sent(NamedTuple):
    """By one rank."""

    messages: int
    bytes: Fraction


class Traffic(dict[tuple[str, str], Sent]):
    """(axis, collective) -> what one rank sends. What sends nothing, for it is alone on its axis, is left out."""

    def __add__(self, other: Mapping[tuple[str, str], Sent]) -> "Traffic":
        total = Traffic(self)
        for key, (messages, size) in other.items():
            before = total.get(key, Sent(0, Fraction(0)))
            total[key] = Sent(before.messages + messages, before.bytes + size)
        return total

    def __mul__(self, times: int) -> "Traffic":
        if not times:
            return Traffic()
        return Traffic({key: Sent(sent.messages * times, sent.bytes * times) for key, sent in self.items()})

    @property
    def by_axis(self) -> dict[str, Sent]:
        """All collectives of an axis together."""
        axes: dict[str, Sent] = {}
        for (axis, _), (messages, size) in self.items():
            before = axes.get(axis, Sent(0, Fraction(0)))
            axes[axis] = Sent(before.messages + messages, before.bytes + size)
        return axes


def together(parts: Iterable[Traffic]) -> Traffic:
    """The sum."""
    return sum(parts, Traffic())


def all_gather(axis: str, ranks: int, whole: int) -> Traffic:
    """One, which makes ``whole`` bytes out of a piece from each rank."""
    return _of(axis, "all_gather", ranks, Fraction(whole * (ranks - 1), ranks))


def reduce_scatter(axis: str, ranks: int, whole: int) -> Traffic:
    """One, of ``whole`` bytes on each rank, of whose sum a rank gets a piece."""
    return _of(axis, "reduce_scatter", ranks, Fraction(whole * (ranks - 1), ranks))


def all_reduce(axis: str, ranks: int, whole: int) -> Traffic:
    """One, of ``whole`` bytes on each rank."""
    return _of(axis, "all_reduce", ranks, Fraction(2 * whole * (ranks - 1), ranks))


def all_to_all(axis: str, ranks: int, to_others: int | Fraction) -> Traffic:
    """One, in which ``to_others`` bytes leave the rank."""
    return _of(axis, "all_to_all", ranks, Fraction(to_others))


def send(axis: str, size: int) -> Traffic:
    """One, of ``size`` bytes."""
    return Traffic({(axis, "send"): Sent(1, Fraction(size))})


def _of(axis: str, collective: str, ranks: int, size: Fraction) -> Traffic:
    return Traffic({(axis, collective): Sent(1, size)}) if ranks > 1 else Traffic()
