"""Files with a few random changes."""

from __future__ import annotations

import random
import struct

# Numbers that are too large for a field, or 0.
TELLING = [
    0,
    1,
    2,
    7,
    0x7F,
    0x80,
    0xFF,
    0x100,
    0x7FFF,
    0xFFFF,
    0x10000,
    0x7FFFFFFF,
    0xFFFFFFFF,
    2**40,
    2**63,
    2**64 - 1,
]


def mutant(seeds: list[bytes], dice: random.Random) -> bytes:
    """Return one of the files with a few random changes."""
    data = bytearray(dice.choice(seeds))
    for _ in range(dice.choice([1, 1, 1, 2, 4])):
        at, end = sorted(dice.choices(range(len(data) + 1), k=2))
        end = min(end, at + dice.choice([1, 4, 16, 4096]))
        match dice.randrange(8):
            case 0 if data:
                data[at % len(data)] ^= 1 << dice.randrange(8)
            case 1 if data:
                data[at % len(data)] = dice.randrange(256)
            case 2:
                del data[at:end]
            case 3:
                data[at:at] = data[at:end]
            case 4:
                other = dice.choice(seeds)
                data[at:end] = other[at:end]
            case 5:
                del data[dice.randrange(len(data) + 1) :]
            case 6:
                form = dice.choice(["<H", "<I", "<Q", ">H", ">I", ">Q"])
                number = dice.choice(TELLING) % 2 ** (8 * struct.calcsize(form))
                data[at : at + struct.calcsize(form)] = struct.pack(form, number)
            case _:
                data[at:at] = dice.randbytes(dice.choice([1, 2, 8]))
    return bytes(data)
