"""Places for files: the protocol every store implements, and the stores.

`store` is the protocol, `registry` opens stores by a path or URL, `directory` is the store on a
local or network folder, with `disk` for system calls, `files` and `locks`. Nothing here knows what
a checkpoint is.
"""
