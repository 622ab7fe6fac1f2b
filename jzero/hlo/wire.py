"""The protocol buffer wire format, as far as reading XLA's dumps needs it.

https://protobuf.dev/programming-guides/encoding; the classes of XLA's messages are in no package.
"""

from collections.abc import Iterator

from jzero.errors import JzeroError

_VARINT, _LENGTH = 0, 2
_FIXED = {1: 8, 5: 4}  # wire type -> bytes


def fields(message: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """The fields of one message, in the order written.

    Arguments:
      message: its bytes.

    Returns:
      (field number, value): an int for a varint, else the bytes that stand for it.

    Raises:
      JzeroError: these bytes are no message.

    >>> list(fields(memoryview(b"\\x08\\x96\\x01")))
    [(1, 150)]
    """
    at, end = 0, len(message)
    try:
        while at < end:
            key, at = _varint(message, at)
            if key & 7 == _VARINT:
                value, at = _varint(message, at)
                yield key >> 3, value
                continue
            size, at = _varint(message, at) if key & 7 == _LENGTH else (_FIXED[key & 7], at)
            if at + size > end:
                raise IndexError
            yield key >> 3, message[at : at + size]
            at += size
    except (IndexError, KeyError):
        raise JzeroError("these bytes are no protocol buffer, or are cut short") from None


class Message:
    """The fields of one message by number; of a repeated one the last."""

    def __init__(self, message: memoryview):
        self._fields = dict(fields(message))

    def __contains__(self, number: int) -> bool:
        return number in self._fields

    def integer(self, number: int) -> int:
        value = self._fields.get(number, 0)
        return value if isinstance(value, int) else 0

    def bytes(self, number: int) -> memoryview:
        value = self._fields.get(number, 0)
        return memoryview(b"") if isinstance(value, int) else value

    def text(self, number: int) -> str:
        return str(self.bytes(number), "utf-8", "replace")


def repeated(message: memoryview, wanted: int) -> Iterator[memoryview]:
    """The messages of a repeated field."""
    for number, value in fields(message):
        if number == wanted and not isinstance(value, int):
            yield value


def integers(message: memoryview, wanted: int) -> Iterator[int]:
    """The numbers of a repeated field, each by itself or packed together."""
    for number, value in fields(message):
        if number != wanted:
            continue
        if isinstance(value, int):
            yield value
            continue
        at = 0
        while at < len(value):
            found, at = _varint(value, at)
            yield found


def _varint(message: memoryview, at: int) -> tuple[int, int]:
    """The number that starts at `at`, and where it ends."""
    found = shift = 0
    while True:
        byte = message[at]
        at += 1
        found |= (byte & 127) << shift
        if byte < 128:
            return found, at
        shift += 7
