"""Ways to break a sequence of frames."""

from __future__ import annotations

import random
import struct
from typing import NamedTuple

from xxhash import xxh3_64_intdigest

from pdctl.handoff import wire

HEADER = struct.Struct("<4sBBHQIHHI")
FIELDS = 9
WIDTHS = (0, 8, 8, 16, 64, 32, 16, 16, 32)
"""Bits of each field; the magic is left to bit flips."""


class Broken(NamedTuple):
    frames: list[bytes]
    sealed: bool
    """Some have a right checksum over what was changed: only a peer that knows the key and lies
    could send them, and no receiver can tell."""


def mutated(chance: random.Random, frames: list[bytes]) -> Broken:
    """The same frames with one to three mutations, each of a random kind."""
    broken, sealed = list(frames), False
    for _ in range(chance.randint(1, 3)):
        if broken:
            mutation = chance.choice(MUTATIONS)
            mutation(chance, broken)
            sealed |= mutation in SEALING
    return Broken(broken, sealed)


def flip_bits(chance: random.Random, frames: list[bytes]) -> None:
    at, raw = _picked(chance, frames)
    for _ in range(chance.randint(1, 4)):
        raw[chance.randrange(len(raw))] ^= 1 << chance.randrange(8)
    frames[at] = bytes(raw)


def cut_short(chance: random.Random, frames: list[bytes]) -> None:
    at, raw = _picked(chance, frames)
    frames[at] = bytes(raw[: chance.randrange(1, len(raw) + 1)])


def duplicate(chance: random.Random, frames: list[bytes]) -> None:
    at, raw = _picked(chance, frames)
    frames[at:at] = [bytes(raw)] * chance.randint(1, 3)


def reorder(chance: random.Random, frames: list[bytes]) -> None:
    one, other = chance.randrange(len(frames)), chance.randrange(len(frames))
    frames[one], frames[other] = frames[other], frames[one]


def leave_out(chance: random.Random, frames: list[bytes]) -> None:
    del frames[chance.randrange(len(frames))]


def oversize(chance: random.Random, frames: list[bytes]) -> None:
    """A right checksum under a length that is not, with as many bytes or with fewer."""
    at, raw = _picked(chance, frames)
    fields = list(HEADER.unpack_from(raw.ljust(HEADER.size, b"\0")))
    fields[-1] = chance.choice((0, 4096, 4097, 1 << 20, (1 << 32) - 1))
    body = bytes(raw[wire.HEADER_BYTES :]) + chance.randbytes(chance.randint(0, 2000))
    frames[at] = _sealed(fields, body)


def other_field(chance: random.Random, frames: list[bytes]) -> None:
    """Another kind, room, page or layer, under a right checksum."""
    at, raw = _picked(chance, frames)
    fields = list(HEADER.unpack_from(raw.ljust(HEADER.size, b"\0")))
    index = chance.randrange(1, FIELDS)
    near = chance.choice((fields[index] + 1, fields[index] - 1, 0, chance.getrandbits(32)))
    fields[index] = near % (1 << WIDTHS[index])
    frames[at] = _sealed(fields, bytes(raw[wire.HEADER_BYTES :]))


def other_body(chance: random.Random, frames: list[bytes]) -> None:
    """Bytes that are no message of that kind, under a right checksum."""
    at, raw = _picked(chance, frames)
    fields = list(HEADER.unpack_from(raw.ljust(HEADER.size, b"\0")))
    body = chance.randbytes(chance.randint(0, 200))
    fields[-1] = len(body)
    frames[at] = _sealed(fields, body)


def garbage(chance: random.Random, frames: list[bytes]) -> None:
    frames.insert(chance.randrange(len(frames) + 1), chance.randbytes(chance.randint(1, 3000)))


MUTATIONS = (
    flip_bits,
    cut_short,
    duplicate,
    reorder,
    leave_out,
    oversize,
    other_field,
    other_body,
    garbage,
)

SEALING = (oversize, other_field, other_body)


def _picked(chance: random.Random, frames: list[bytes]) -> tuple[int, bytearray]:
    at = chance.randrange(len(frames))
    return at, bytearray(frames[at])


def _sealed(fields: list[object], body: bytes) -> bytes:
    prefix = HEADER.pack(*fields)
    checksum = xxh3_64_intdigest(body, xxh3_64_intdigest(prefix))
    return prefix + struct.pack("<Q", checksum) + body
