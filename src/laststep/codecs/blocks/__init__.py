"""Block codecs: encode the bytes of one block to fewer bytes, and decode them.

Pure, each block independently; knows nothing of files, of the choice of a codec, or of the blocks
stored with it. `registry` finds a codec by name and imports it only then, so a process that uses
neither numpy nor zstandard does not import them.
"""
