"""How a leaf is cut into chunks, each a file."""

import math

CHUNK_BYTES = 16 * 2**20  # at most, so that reading a part of a large leaf takes little memory
_ENTRY_BYTES = 128  # of a chunk's entry in the manifest, and its checksum


def chunk_shape(
    shape: tuple[int, ...], piece: tuple[int, ...], itemsize: int, limit: int = CHUNK_BYTES
) -> tuple[int, ...]:
    """The shape of a leaf's chunks: the devices' pieces, or even parts of them.

    The last chunk of a dim is as long as the others in its file, the rest filled up: cuts that
    would fill up more than a hundredth are not made.

    Arguments:
      shape: the leaf's true shape; not empty.
      piece: shape of a device's piece as stored. No chunk is in two pieces.
      itemsize: bytes of an element.
      limit: bytes of a chunk, where a cut is possible.

    Example:
      >>> chunk_shape((50257, 768), (6283, 768), 4)
      (6283, 384)
      >>> chunk_shape((40, 5120, 13824), (40, 640, 13824), 4)
      (1, 160, 13824)
    """
    chunk = list(piece)
    for d in range(len(shape)):
        if piece[d] < shape[d]:
            chunk[d] = min(_divisors(piece[d]), key=lambda n: _extra(shape, chunk, d, n, itemsize))
    # The first dims first, so that a chunk's elements lie together in the piece.
    for d in range(len(shape)):
        rest = math.prod(chunk) // chunk[d] * itemsize
        if rest * chunk[d] <= limit:
            break
        most = max(limit // rest, 1)
        for n in _lengths(shape[d], piece[d], chunk[d], most):
            extra = _extra(shape, chunk, d, n, itemsize)
            if n * rest * 8 >= limit and extra * 100 <= math.prod(shape) * itemsize:
                chunk[d] = n
                break
    return tuple(chunk)


def chunks_of(shape: tuple[int, ...], chunk: tuple[int, ...]) -> tuple[int, ...]:
    """How many chunks there are along each dim."""
    return tuple(-(-n // c) for n, c in zip(shape, chunk, strict=True))


def _lengths(size: int, piece: int, chunk: int, most: int) -> list[int]:
    """Lengths that a dim's chunks may be cut to, the longest first."""
    if piece < size:  # shared out to devices
        return [n for n in _divisors(chunk) if n <= most]
    number = -(-size // most)
    return [-(-size // k) for k in range(number, 2 * number + 1)]


def _extra(shape: tuple[int, ...], chunk: list[int], d: int, n: int, itemsize: int) -> int:
    """Bytes on disk beside the leaf's own if the chunks of dim d are n long."""
    cut = (*chunk[:d], n, *chunk[d + 1 :])
    number = math.prod(chunks_of(shape, cut))
    return number * (math.prod(cut) * itemsize + _ENTRY_BYTES) - math.prod(shape) * itemsize


def _divisors(n: int) -> list[int]:
    """Of a positive number, the largest first."""
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return sorted({*small, *(n // d for d in small)}, reverse=True)
