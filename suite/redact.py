"""Keep secrets out of what is shown, logged and stored.

Two nets: what looks like a secret (passwords in URLs, `password=...`), and what is one: the values of this process's own
secret variables (`HF_TOKEN`, `AWS_SECRET_ACCESS_KEY`, `MLFLOW_TRACKING_PASSWORD`, ...), wherever in a text they turn up.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from urllib.parse import unquote

from suite.errors import ConfigError

HIDDEN = "***"
MIN_SECRET_CHARS = 6
"""A shorter value of a secret variable would be found by chance in harmless text."""

_USER_AND_PASSWORD = re.compile(r"(?<=://)[^\s/@'\"]*:[^\s'\"]*@|(?<=://)[^\s/'\"]*@")
_NAMED = re.compile(
    r"(?i)\b((?:ssl)?password|passwd|pwd|pgpassword|(?:[\w-]{0,40}[_-])?(?:token|secret|signature|credentials?)|[\w-]{0,40}(?:api|access|secret|account)[_-]?key(?:[_-]id)?)"
    r"=(?!\*\*\*)[^\s&'\",;)]+"
)
_BEARER = re.compile(r"(?i)\b(bearer|basic)\s+[\w.~+/-]{8,}=*")
_SECRET_VARIABLE = re.compile(
    r"(?:^|_)(?:TOKEN|PASSWORD|PASSWD|SECRET|CREDENTIALS?|(?:API|ACCESS|SECRET|ACCOUNT|PRIVATE)_KEY(?:_ID)?)$"
)
_PASSWORD_IN_URL = re.compile(r"://[^\s/@'\":]*:([^\s'\"]+)@")


def redact(text: object, *, environment: Mapping[str, str] | None = None) -> str:
    """`text` as it may be shown: users and passwords of URLs, named secrets and the values of secret variables become `***`.

    Args:
        text: Anything that is printed: a URL, a message, an exception, a traceback.
        environment: Variables whose secrets are hidden; None = this process's.
    """
    shown = str(text)
    for secret in secrets_of(os.environ if environment is None else environment):
        shown = shown.replace(secret, HIDDEN)
    shown = _USER_AND_PASSWORD.sub(f"{HIDDEN}@", shown)
    shown = _NAMED.sub(rf"\1={HIDDEN}", shown)
    return _BEARER.sub(rf"\1 {HIDDEN}", shown)


def secrets_of(environment: Mapping[str, str]) -> list[str]:
    """Values of variables named like secrets, and passwords inside URLs of any variable; the longest first."""
    named = {value for name, value in environment.items() if is_secret_name(name)}
    in_urls = {
        found
        for value in environment.values()
        if "://" in value
        for found in _PASSWORD_IN_URL.findall(value)
    }
    values = named | in_urls | {unquote(password) for password in in_urls}
    return sorted(
        (value for value in values if len(value) >= MIN_SECRET_CHARS), key=len, reverse=True
    )


def is_secret_name(variable: str) -> bool:
    """Whether a variable of that name holds a secret itself, and not, say, the path of one."""
    return bool(_SECRET_VARIABLE.search(variable.upper()))


def has_password(url: str) -> bool:
    """Whether a URL carries a password, or a secret in its query."""
    return bool(_PASSWORD_IN_URL.search(url) or _NAMED.search(url))


def refuse_password(url: str | None, *, option: str, instead: str) -> None:
    """Refuse a password on the command line: every user of the machine can read it there.

    Args:
        option: As typed, for the error.
        instead: Where the password, or the whole URL, belongs.

    Raises:
        ConfigError: The URL holds one; it is not shown.
    """
    if url is not None and has_password(url):
        raise ConfigError(
            f"{option} {redact(url)}: holds a password, and the list of processes shows it to every user of this machine; {instead}"
        )
