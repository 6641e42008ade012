"""Keep secrets out of what is shown, logged and stored.

There are two nets. One catches what looks like a secret: passwords in URLs, `password=...`. The
other catches the values of this process's own secret variables (`HF_TOKEN`,
`AWS_SECRET_ACCESS_KEY`, `MLFLOW_TRACKING_PASSWORD`, ...), wherever in a text they turn up.
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
    r"(?i)\b((?:ssl)?password|passwd|pwd|pgpassword"
    r"|(?:[\w-]{0,40}[_-])?(?:token|secret|signature|credentials?)"
    r"|[\w-]{0,40}(?:api|access|secret|account)[_-]?key(?:[_-]id)?)"
    # What is hidden already stays as it is.
    r"=(?!\*\*\*)[^\s&'\",;)]+"
)
_BEARER = re.compile(r"(?i)\b(bearer|basic)\s+[\w.~+/-]{8,}=*")
_SECRET_VARIABLE = re.compile(
    r"(?:^|_)(?:TOKEN|PASSWORD|PASSWD|SECRET|CREDENTIALS?"
    r"|(?:API|ACCESS|SECRET|ACCOUNT|PRIVATE)_KEY(?:_ID)?)$"
)
_PASSWORD_IN_URL = re.compile(r"://[^\s/@'\":]*:([^\s'\"]+)@")


def redact(text: object, *, environment: Mapping[str, str] | None = None) -> str:
    """Return `text` as it may be shown, with every secret replaced by `***`.

    Secrets are users and passwords of URLs, named secrets, and the values of secret variables.

    Args:
        text: Anything that is printed: a URL, a message, an exception, a traceback.
        environment: Variables whose secrets are hidden; None = this process's.
    """
    if environment is None:
        environment = os.environ
    shown = str(text)
    for secret in secrets_of(environment):
        shown = shown.replace(secret, HIDDEN)
    shown = _USER_AND_PASSWORD.sub(f"{HIDDEN}@", shown)
    shown = _NAMED.sub(rf"\1={HIDDEN}", shown)
    return _BEARER.sub(rf"\1 {HIDDEN}", shown)


def secrets_of(environment: Mapping[str, str]) -> list[str]:
    """Return the values of secret variables, and the passwords in URLs of any variable."""
    found = set()
    for name, value in environment.items():
        if is_secret_name(name):
            found.add(value)
        if "://" in value:
            for password in _PASSWORD_IN_URL.findall(value):
                found.add(password)
                # A driver may print it decoded.
                found.add(unquote(password))
    long_enough = [value for value in found if len(value) >= MIN_SECRET_CHARS]
    # The longest first: a secret may be a part of another one.
    return sorted(long_enough, key=len, reverse=True)


def is_secret_name(variable: str) -> bool:
    """Whether a variable of that name holds a secret itself, not, say, the path of one."""
    return bool(_SECRET_VARIABLE.search(variable.upper()))


def has_password(url: str) -> bool:
    """Whether a URL carries a password, or a secret in its query."""
    return bool(_PASSWORD_IN_URL.search(url) or _NAMED.search(url))


def refuse_password(url: str | None, *, option: str, instead: str) -> None:
    """Refuse a password on the command line: every user of the machine can read it there.

    Args:
        url: What was given, if anything.
        option: The option as typed, for the error.
        instead: Where the password, or the whole URL, belongs.

    Raises:
        ConfigError: The URL holds one; it is not shown.
    """
    if url is not None and has_password(url):
        raise ConfigError(
            f"{option} {redact(url)}: holds a password, and the list of processes shows it to "
            f"every user of this machine; {instead}"
        )
