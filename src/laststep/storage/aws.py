"""Credentials out of Amazon's own files: profiles, single sign-on, roles that a profile assumes.

obstore reads the environment and the role of a machine. For everything in `~/.aws` there is
botocore, which is imported only if it is needed.
"""

from __future__ import annotations

import datetime as dt
import os
from pathlib import Path
from typing import TYPE_CHECKING

from laststep.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from obstore.store import S3Config, S3Credential

_VALID_FOR = dt.timedelta(minutes=10)
"""obstore asks again after this time; botocore renews temporary credentials 15 minutes early."""
_FILES = {"AWS_SHARED_CREDENTIALS_FILE": "~/.aws/credentials", "AWS_CONFIG_FILE": "~/.aws/config"}


def profile() -> tuple[S3Config, Callable[[], S3Credential] | None]:
    """Return the region and the credentials of the profile in use; empty if there is none, or if
    the environment has credentials. Raise `UsageError` if it cannot be read."""
    asked = os.environ.get("AWS_PROFILE") or None
    files = [Path(os.environ.get(name, path)).expanduser() for name, path in _FILES.items()]
    if "AWS_ACCESS_KEY_ID" in os.environ or not (asked or any(file.is_file() for file in files)):
        return {}, None
    try:
        from botocore import exceptions, session
    except ImportError:
        if not asked:  # the files may be for other tools
            return {}, None
        needed = UsageError("AWS_PROFILE needs: pip install 'laststep[aws]'")
        raise needed.amended(remedy=None) from None
    try:
        opened = session.Session(profile=asked)
        found = opened.get_credentials()
        region = opened.get_config_variable("region")
    except (exceptions.BotoCoreError, OSError, ValueError) as error:
        raise UsageError(
            "cannot read the AWS profile",
            where=asked or "default",
            found=type(error).__name__,  # its text may quote the file
            remedy="`aws configure list` shows what is set",
        ) from None
    if found is None:
        return {}, None

    def credentials() -> S3Credential:
        frozen = found.get_frozen_credentials()
        return {
            "access_key_id": frozen.access_key,
            "secret_access_key": frozen.secret_key,
            "token": frozen.token,
            "expires_at": dt.datetime.now(dt.UTC) + _VALID_FOR,
        }

    config: S3Config = {"region": region} if region and not os.environ.get("AWS_REGION") else {}
    return config, credentials
