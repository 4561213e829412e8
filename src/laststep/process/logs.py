"""Have the log lines of a process that is one of several ranks say which.

The loggers of laststep get a filter and no handler: where lines go is the program's choice. The
filter sits on every logger, since one on `laststep` does not see the lines of those below it.
"""

from __future__ import annotations

import functools
import logging

_ROOT = "laststep"
_rank: int | None = None


def speak_as(rank: int | None) -> None:
    """From now on lines carry that rank; None: no rank."""
    global _rank  # noqa: PLW0603 (a process is one rank)
    _rank = rank
    known = list(logging.Logger.manager.loggerDict.values())
    for logger in (logging.getLogger(_ROOT), *known):
        if isinstance(logger, logging.Logger) and logger.name.partition(".")[0] == _ROOT:
            logger.addFilter(_carry_rank)


def speaks_as() -> int | None:
    """The rank that lines carry."""
    return _rank


@functools.lru_cache(maxsize=1000)
def warn_once(log: logging.Logger, message: str) -> None:
    """Log a warning, unless this process has logged the same one before."""
    log.warning("%s", message)


def _carry_rank(record: logging.LogRecord) -> bool:
    record.rank = _rank
    if _rank is not None:
        record.msg = f"rank {_rank}: {record.msg}"
    return True
