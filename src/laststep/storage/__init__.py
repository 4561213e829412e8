"""Places for files: the protocol every store implements, and the stores.

`store` is the protocol, `directory` the store on a local or network folder, `disk` the system calls
beneath it, `files` its open files and `locks` its locks. Nothing here knows what a checkpoint is.
"""
