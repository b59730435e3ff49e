"""GPU shared memory: how much a program needs that holds the queries and keys of every head, and how much there is.

A *row* here is one token of all heads of a map: `group` heads of `width` channels. The formulas were fitted to what the
compiler reports for compute capabilities 8.0 and 9.0 (tests/kernels/test_compile.py checks them). In half precision a
program holds its rows and columns once, and a second copy of what the gradients multiply with another tile. float32 is
multiplied in parts, which are held beside the original, one head at a time.
"""

from __future__ import annotations

import torch

#: Bytes of a GPU of compute capability 9.0; the interpreter uses its block sizes.
LARGE = 227 * 1024
#: The fewest rows and columns of a tile that the matrix units take.
LEAST = 16
#: Heads that are unrolled; more would take minutes to compile.
MOST_HEADS = 32


@torch.compiler.assume_constant_result
def available(device: torch.device) -> int:
    """Bytes of shared memory that a program on this device may use.

    >>> available(torch.device("cpu"))
    232448
    """
    if device.type != "cuda":
        return LARGE
    return int(torch.cuda.get_device_properties(device).shared_memory_per_block_optin)


def needed(kind: str, group: int, width: int, item: int, rows: int, columns: int) -> int:
    """Bytes that a program with so many rows and columns needs; `kind` is what it computes: "row", "query" or "key".

    >>> needed("key", 6, 64, 2, 64, 32)
    126464
    """
    if item == 4:
        mine, others = (columns, rows) if kind == "key" else (rows, columns)
        tokens = 2 * mine + others + 2 * others // group
    else:
        tokens = rows + columns + {"row": 0, "query": columns, "key": rows}[kind]
    return group * padded(width) * item * tokens + 4 * rows * (2 * group + 2)


def shrink(kind: str, group: int, width: int, item: int, rows: int, columns: int, space: int) -> tuple[int, int]:
    """Rows and columns, halved until they fit into `space` bytes or cannot be smaller.

    >>> shrink("key", 6, 64, 2, 64, 32, LARGE), shrink("key", 16, 64, 2, 64, 16, LARGE)
    ((64, 32), (32, 16))
    """
    while needed(kind, group, width, item, rows, columns) > space and max(rows, columns) > LEAST:
        rows, columns = (rows // 2, columns) if rows >= columns else (rows, columns // 2)
    return rows, columns


def fits(group: int, width: int, item: int, space: int) -> bool:
    """Whether the smallest tiles of every kind fit into `space` bytes.

    >>> fits(16, 64, 2, LARGE), fits(16, 80, 4, LARGE)
    (True, False)
    """
    kinds = ("row", "query", "key")
    most = max(needed(kind, group, width, item, LEAST, LEAST) for kind in kinds)
    return group <= MOST_HEADS and most <= space


def padded(width: int) -> int:
    """Channels of a head in a tile, a power of two.

    >>> padded(8), padded(80)
    (16, 128)
    """
    return max(LEAST, power_of_two(width))


def power_of_two(number: int) -> int:
    """The smallest power of two that is at least this number.

    >>> power_of_two(1), power_of_two(48)
    (1, 64)
    """
    return 1 << (number - 1).bit_length()
