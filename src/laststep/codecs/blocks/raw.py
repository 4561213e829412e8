"""The codec that stores a block unchanged."""

from __future__ import annotations

from laststep.codecs.blocks.codec import BlockCodec, broken, check_declared, takes


class Raw:
    """Stores the bytes themselves."""

    name = "raw"
    lossless = True
    needs = None

    def encode(
        self, data: memoryview, element_bytes: int, before: memoryview | None
    ) -> bytes | None:
        return bytes(data) if takes(data.nbytes, element_bytes) else None

    def decode(
        self, data: memoryview, size_bytes: int, element_bytes: int, before: memoryview | None
    ) -> bytes:
        check_declared(size_bytes, element_bytes)
        if data.nbytes != size_bytes:
            raise broken(f"{size_bytes} bytes", f"{data.nbytes}")
        return bytes(data)


CODEC: BlockCodec = Raw()
