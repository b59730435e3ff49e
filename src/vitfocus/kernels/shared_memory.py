"""GPU shared memory: how much there is, and tiles that fit into it.

tests/kernels/test_compile.py compares what is estimated here with what the compiler reports.
"""

from __future__ import annotations

import torch

#: Bytes on a GPU of compute capability 9.0, whose block sizes the interpreter uses too.
LARGE = 227 * 1024
#: The smallest tile side that the tensor cores accept.
LEAST = 16
#: The most channels per head that the kernels support.
MOST_CHANNELS = 256


@torch.compiler.assume_constant_result
def available(device: torch.device) -> int:
    """Bytes of shared memory that a program on this device may use.

    >>> available(torch.device("cpu"))
    232448
    """
    if device.type != "cuda":
        return LARGE
    return int(torch.cuda.get_device_properties(device).shared_memory_per_block_optin)


def row_tiles(
    width: int, item: int, rows: int, keys: int, space: int, columns: int = 64, maps: int = 1
) -> tuple[int, int, int]:
    """Rows, columns and pipeline stages for a program that multiplies queries and keys head by head, for `maps` maps.

    >>> row_tiles(64, 2, 197, 197, LARGE), row_tiles(64, 4, 197, 7, LARGE), row_tiles(256, 2, 197, 197, 99 * 1024)
    ((64, 64, 3), (64, 16, 1), (32, 32, 1))
    """
    # float32 is multiplied in three parts, stored beside the original.
    high, wide, stages, copies = (64, columns, 3, 1) if item == 2 else (64, 32, 1, 2)
    token = maps * padded(width) * item

    def needed() -> int:
        return (stages + copies) * token * (high + wide) + 4 * high * wide

    while needed() > space and max(high, wide, stages) > LEAST:
        if stages > 1:
            stages -= 1
        elif high > wide:
            high //= 2
        else:
            wide //= 2
    return min(high, padded(rows)), min(wide, padded(keys)), stages


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
