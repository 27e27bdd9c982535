"""Images of the types that browsers show: their types and sizes, and whether they are whole.

An image is walked from its first byte to its last, and must end where the file ends. The pixels of a PNG are
unpacked. Other pixels have no checksum, and are skipped.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterator

# The first bytes of each type.
_STARTS = {
    "image/jpeg": rb"\xff\xd8\xff",
    "image/png": rb"\x89PNG\r\n\x1a\n",
    "image/webp": rb"RIFF....WEBP",
    "image/gif": rb"GIF8[79]a",
}
# The endings of the names of files of each type, the usual one first.
ENDINGS = {
    "image/jpeg": (".jpg", ".jpeg", ".jpe", ".jfif"),
    "image/png": (".png", ".apng"),
    "image/webp": (".webp",),
    "image/gif": (".gif",),
}
_PIECE = 1 << 16


def type_of(image: bytes) -> str | None:
    """Return the media type that the first bytes show, or None."""
    return next((kind for kind, start in _STARTS.items() if re.match(start, image, re.DOTALL)), None)


def size_of(image: bytes) -> tuple[int, int]:
    """Return the width and the height of a whole image.

    Raises
    ------
    ValueError
        The bytes are not one whole image. The message continues a sentence about the image.
    """
    kind = type_of(image)
    if kind is None:
        raise ValueError("is not a JPEG, PNG, WebP or GIF")
    size, end = _SIZES[kind](_Bytes(image))
    if end != len(image):
        raise ValueError(f"continues for {len(image) - end} bytes after the end of the image")
    if size is None or 0 in size:
        raise ValueError("contains no picture")
    return size


class _Bytes:
    """The bytes of an image, which a reader may not exceed."""

    def __init__(self, image: bytes) -> None:
        self._image = image

    def take(self, at: int, nbytes: int) -> bytes:
        if at + nbytes > len(self._image):
            raise ValueError("is truncated")
        return self._image[at : at + nbytes]

    def number(self, at: int, nbytes: int, order: str = "big") -> int:
        return int.from_bytes(self.take(at, nbytes), "little" if order == "little" else "big")


_Found = tuple[tuple[int, int] | None, int]


def _png(image: _Bytes) -> _Found:
    size, at, kind, pixels = None, 8, b"", _Pixels()
    while kind != b"IEND":
        nbytes = image.number(at, 4)
        kind, body = image.take(at + 4, 4), image.take(at + 8, nbytes)
        if zlib.crc32(kind + body) != image.number(at + 8 + nbytes, 4):
            raise ValueError("is damaged: a checksum differs")
        if kind == b"IHDR" and nbytes == 13:
            size = int.from_bytes(body[:4], "big"), int.from_bytes(body[4:8], "big")
        elif kind == b"IDAT":
            pixels.add(body)
        at += 12 + nbytes
    return (size if pixels.is_whole else None), at


class _Pixels:
    """The compressed pixels of a PNG, which are unpacked in pieces and not kept."""

    def __init__(self) -> None:
        self._stream = zlib.decompressobj()

    def add(self, data: bytes) -> None:
        try:
            while data:
                self._stream.decompress(data, _PIECE)
                data = self._stream.unconsumed_tail
        except zlib.error:
            raise ValueError("is damaged: its pixels cannot be unpacked") from None

    @property
    def is_whole(self) -> bool:
        return self._stream.eof


# Markers of JPEG: start of scan, end of image, and frames, which contain the size.
_SCAN, _END = 0xDA, 0xD9
_FRAMES = {*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC}
# Markers without a length.
_ALONE = {0x01, *range(0xD0, 0xD9)}


def _jpeg(image: _Bytes) -> _Found:
    size, at, has_scan = None, 2, False
    while True:
        lead, marker = image.take(at, 2)
        if lead != 0xFF:
            raise ValueError("is damaged: a marker is missing")
        if marker == 0xFF:
            # Padding before a marker.
            at += 1
        elif marker == _END:
            return (size if has_scan else None), at + 2
        elif marker in _ALONE:
            at += 2
        else:
            nbytes = image.number(at + 2, 2)
            image.take(at + 2, max(nbytes, 2))
            if marker in _FRAMES:
                size = image.number(at + 7, 2), image.number(at + 5, 2)
            at += 2 + max(nbytes, 2)
            if marker == _SCAN:
                at, has_scan = _after_scan(image, at), True


def _after_scan(image: _Bytes, at: int) -> int:
    """Return the position of the marker after compressed pixels."""
    while True:
        lead, after = image.take(at, 2)
        # A zero follows a byte of pixels that looks like a marker, and restarts are within the pixels.
        if lead == 0xFF and after != 0 and not 0xD0 <= after <= 0xD7:
            return at
        at += 1


def _gif(image: _Bytes) -> _Found:
    size = image.number(6, 2, "little"), image.number(8, 2, "little")
    at, has_picture = 13 + _colors(image.number(10, 1)), False
    while (kind := image.take(at, 1)) != b";":
        if kind == b"!":
            at = _after_blocks(image, at + 2)
        elif kind == b",":
            at = _after_blocks(image, at + 11 + _colors(image.number(at + 9, 1)))
            has_picture = True
        else:
            raise ValueError("is damaged: a block has an unknown type")
    return (size if has_picture else None), at + 1


def _colors(flags: int) -> int:
    """Return the bytes of a table of colors."""
    return 3 << ((flags & 7) + 1) if flags & 0x80 else 0


def _after_blocks(image: _Bytes, at: int) -> int:
    while nbytes := image.number(at, 1):
        image.take(at + 1, nbytes)
        at += 1 + nbytes
    return at + 1


def _webp(image: _Bytes) -> _Found:
    end = 8 + image.number(4, 4, "little")
    image.take(0, end)
    size, has_picture = None, False
    for kind, at, nbytes in _chunks(image, 12, end):
        if kind == b"VP8X" and nbytes >= 10:
            size = image.number(at + 4, 3, "little") + 1, image.number(at + 7, 3, "little") + 1
        elif kind == b"VP8L" and image.take(at, 1) == b"\x2f":
            bits = image.number(at + 1, 4, "little")
            size, has_picture = size or ((bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1), True
        elif kind == b"VP8 " and image.take(at + 3, 3) == b"\x9d\x01\x2a":
            sides = (image.number(at + place, 2, "little") & 0x3FFF for place in (6, 8))
            size, has_picture = size or (next(sides), next(sides)), True
        has_picture |= kind == b"ANMF"
    return (size if has_picture else None), end


def _chunks(image: _Bytes, at: int, end: int) -> Iterator[tuple[bytes, int, int]]:
    """Yield the type, the position and the bytes of each chunk."""
    while at < end:
        nbytes = image.number(at + 4, 4, "little")
        # The bytes of a chunk are padded to an even number.
        after = at + 8 + nbytes + nbytes % 2
        if after > end:
            raise ValueError("is truncated")
        yield image.take(at, 4), at + 8, nbytes
        at = after


_SIZES: dict[str, Callable[[_Bytes], _Found]] = {
    "image/jpeg": _jpeg,
    "image/png": _png,
    "image/webp": _webp,
    "image/gif": _gif,
}
