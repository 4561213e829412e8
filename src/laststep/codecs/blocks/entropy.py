"""zstandard as an entropy coder: bytes that are not equally frequent take less room.

Training state has hardly a repetition to find, so zstandard is set not to look in earnest: what
remains is its Huffman coder. Each thread has contexts of its own, since none may be used by two at
once and a new one for each call would cost more than a small call. zstandard lets go of the GIL.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from laststep.codecs.blocks.codec import broken
from laststep.terms import BLOCK_BYTES

if TYPE_CHECKING:
    import zstandard

    from laststep.codecs.blocks.codec import Part

_of_thread = threading.local()


def pack(data: Part) -> Part:
    """A frame of zstandard, or `data` itself where that is no longer."""
    frame = _compressor().compress(data)
    return frame if len(frame) < len(data) else data


def unpack(stored: memoryview, size_bytes: int) -> Part:
    """The `size_bytes` that were packed. A frame is shorter; what is as long is not packed."""
    if len(stored) == size_bytes:
        return stored
    import zstandard

    try:
        # A frame says how long its content is, and that much is allocated: look before.
        content_bytes = zstandard.frame_content_size(stored)
        if content_bytes != size_bytes:
            raise broken(f"a frame of {size_bytes} bytes", f"one of {content_bytes}")
        content = _decompressor().decompress(stored, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise broken("a frame of zstandard", str(error)) from None
    if len(content) != size_bytes:
        raise broken(f"a frame of {size_bytes} bytes", f"one of {len(content)}")
    return content


def _compressor() -> zstandard.ZstdCompressor:
    try:
        mine: zstandard.ZstdCompressor = _of_thread.compressor
    except AttributeError:
        import zstandard

        parameters = zstandard.ZstdCompressionParameters(
            compression_level=1,
            strategy=zstandard.STRATEGY_FAST,
            window_log=17,
            hash_log=6,
            min_match=7,
            target_length=0,  # with any other, this strategy leaves the Huffman coder out
            write_content_size=True,
            write_checksum=False,  # blocks have digests
            write_dict_id=False,
        )
        mine = _of_thread.compressor = zstandard.ZstdCompressor(compression_params=parameters)
    return mine


def _decompressor() -> zstandard.ZstdDecompressor:
    try:
        mine: zstandard.ZstdDecompressor = _of_thread.decompressor
    except AttributeError:
        import zstandard

        mine = zstandard.ZstdDecompressor(max_window_size=BLOCK_BYTES)
        _of_thread.decompressor = mine
    return mine
