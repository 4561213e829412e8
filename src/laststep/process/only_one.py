"""What there is only one of: it stands for threads, files or work under way, not for values."""

from __future__ import annotations

from typing import NoReturn, SupportsIndex

from laststep.errors import Usage


class OnlyOne:
    """Cannot be copied or pickled: what ends a copy, or tells it, would be meant for both."""

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        kind = next(k.__name__ for k in type(self).__mro__ if not k.__name__.startswith("_"))
        raise Usage(
            f"a {kind} cannot be copied or pickled",
            expected="one object for its threads and files",
            remedy="pass this very one on, or make another one in the place that needs it",
        )
