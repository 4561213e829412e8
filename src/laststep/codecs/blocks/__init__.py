"""Codecs of blocks: the bytes of one block to fewer bytes and back.

Pure, each block by itself; knows nothing of files, of what is stored by which codec, or of who
chooses. `registry` finds a codec by its name, and imports it only then: numpy and zstandard are not
imported by a process that uses neither.
"""
