"""Reading the decimal numbers of JSON exactly, many at once: eight digits a machine word, and no floats."""

from collections.abc import Sequence
from decimal import Decimal, InvalidOperation
from typing import Any

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]
Words = NDArray[np.uint64]

_MINUS, _POINT, _COMMA = b"-.,"
_POWERS = 10 ** np.arange(9, dtype=np.int64)
_LARGEST = 9 * 10**15
"""A thousandfold of an integer up to this surely stays below 2**63."""


def thousandths(numbers: Sequence[Any]) -> tuple[Integers, NDArray[np.bool_]]:
    """Thousand times each number, rounded to the nearest integer (half to even): ns of us.

    A number is an int, or the text of a decimal number. Returns (values, which could be read), both ``[n]``; anything
    else, and what is too large for int64, can't be read.
    """
    if set(map(type, numbers)) == {int} and max(map(abs, numbers)) <= _LARGEST:
        return 1000 * np.fromiter(numbers, np.int64, len(numbers)), np.ones(len(numbers), dtype=bool)
    joined = ",".join(map(str, numbers)).encode(errors="replace") + b"," + bytes(8)
    text = np.frombuffer(joined, dtype=np.uint8)
    ends = np.flatnonzero(text == _COMMA)
    if len(ends) != len(numbers):  # a string with a comma in it, an object or a list: none of them a number
        return _one_by_one(numbers)
    starts = np.concatenate([[0], ends[:-1] + 1]).astype(np.int64)
    values, readable = _read(text, starts, ends)
    odd = np.flatnonzero(~readable)
    if len(odd):
        values[odd], readable[odd] = _one_by_one([numbers[place] for place in odd.tolist()])
    return values, readable


def _read(text: NDArray[np.uint8], starts: Integers, ends: Integers) -> tuple[Integers, NDArray[np.bool_]]:
    """Numbers of up to 16 digits with up to three after the point; others are not readable."""
    words = np.ndarray((len(text) - 7,), dtype="<u8", buffer=text.data, strides=(1,))
    negative = text[starts] == _MINUS
    place = starts + negative
    value, length = _digits(words[place])
    place += length
    more = np.flatnonzero(length == 8)
    upper, upper_length = _digits(words[place[more]])
    value[more] = value[more] * _POWERS[upper_length] + upper
    place[more] += upper_length
    readable = (length > 0) & (value <= _LARGEST)
    value *= 1000
    fractional = np.flatnonzero(text[place] == _POINT)
    fraction, digits = _digits(words[place[fractional] + 1])
    value[fractional] += fraction * _POWERS[np.maximum(3 - digits, 0)]
    readable[fractional] &= (digits > 0) & (digits <= 3)
    place[fractional] += 1 + digits
    readable &= place == ends
    return np.where(negative, -value, value), readable


def _digits(words: Words) -> tuple[Integers, Integers]:
    """The run of ASCII digits at the head of each word: (its value, its length 0 to 8)."""
    unbiased = words ^ 0x3030303030303030
    beyond = (((unbiased & 0x7F7F7F7F7F7F7F7F) + 0x7676767676767676) | unbiased) & 0x8080808080808080
    lowest = beyond & (~beyond + np.uint64(1))
    length = np.bitwise_count(lowest - np.uint64(1)) >> 3
    aligned = unbiased << (64 - 8 * length.astype(np.uint64))
    pairs = ((aligned & 0x0F0F0F0F0F0F0F0F) * np.uint64(2561)) >> 8
    fours = ((pairs & 0x00FF00FF00FF00FF) * np.uint64(6553601)) >> 16
    eights = ((fours & 0x0000FFFF0000FFFF) * np.uint64(42949672960001)) >> 32
    return eights.astype(np.int64), length.astype(np.int64)


def _one_by_one(numbers: Sequence[Any]) -> tuple[Integers, NDArray[np.bool_]]:
    """Numbers with an exponent or many digits, and what is none."""
    values, readable = np.zeros(len(numbers), dtype=np.int64), np.zeros(len(numbers), dtype=bool)
    for place, written in enumerate(numbers):
        if type(written) not in (int, str):
            continue
        try:
            value = round(Decimal(written) * 1000)
        except (InvalidOperation, ValueError, OverflowError):
            continue
        if -(2**63) <= value < 2**63:
            values[place], readable[place] = value, True
    return values, readable
