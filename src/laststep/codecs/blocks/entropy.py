"""zstandard as an entropy coder: it shortens bytes whose values are not equally frequent.

Training state has hardly any repetitions, so zstandard is configured to spend little time on
finding them; the gain comes from its Huffman coder. Each thread has its own contexts, because a
context must not be used by two threads at once, and creating one per call would cost more than a
small call. zstandard releases the GIL.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from laststep.codecs.blocks.codec import broken
from laststep.constants import BLOCK_BYTES

if TYPE_CHECKING:
    import zstandard

    from laststep.codecs.blocks.codec import Part

_of_thread = threading.local()


def pack(data: Part) -> Part:
    """Return a zstandard frame, or `data` itself if the frame is not shorter."""
    frame = _compressor().compress(data)
    return frame if len(frame) < len(data) else data


def unpack(stored: memoryview, size_bytes: int) -> Part:
    """Return the `size_bytes` that were packed. A frame is always shorter; `size_bytes` bytes are
    not packed and returned unchanged."""
    if len(stored) == size_bytes:
        return stored
    import zstandard

    try:
        # Decompression allocates the size that the frame declares: check that first.
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
            target_length=0,  # any other value disables the Huffman coder in this strategy
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
