"""Keep secrets out of what is shown, logged and stored, and commands to the terminal out of it.

For secrets there are two nets. One catches what looks like a secret: passwords in URLs,
`password=...`. The other catches the values of this process's own secret variables (`HF_TOKEN`,
`PGPASSWORD`, `AWS_SECRET_ACCESS_KEY`, `AZURE_STORAGE_CONNECTION_STRING`, ...), wherever in a text
they turn up.
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

# A password may have quotes. One ends the URL only where it closes the one before the scheme, or
# where another text of JSON begins.
_QUOTE = r"""(?!(?P=quote)(?:[,;:)\]}>]|$)|["'][\]}]*[,:][\[{]*\\?["'])["']"""
# A password ends where another URL begins: else each of many URLs would be searched to the end.
_PASSWORD = rf"(?:[^\s\"':]|:(?!//)|{_QUOTE})*"
# It may have blanks, but no quotes then, and is no port: `http://h:80/x, or ask me@x.org`.
_WITH_BLANKS = r"""(?!\d{1,5}(?!\w))[^\s"'@:](?:[^\r\n"'@:]|:(?!//))*+(?:@[^\s"'@]*)*(?=@[\w\[])"""
_USER_AND_PASSWORD = re.compile(
    r"""(?P<head>(?:(?P<quote>["'])[\w+.-]{1,40})?://)"""
    # A URL without a user matches too: else the search would go on behind its quote, and find it.
    # What begins with a bracket is the address of a host.
    rf"""(?:(?!\[)(?P<user>(?:[^\s/@:"']|{_QUOTE})*+)"""
    rf"""(?::(?P<password>{_PASSWORD}(?=@)|{_WITH_BLANKS}))?@)?"""
)
_GOES_ON = r"""["'](?=[^\s&'",;:)\]}>])"""
"""A quote that is a part of the value, because the value goes on behind it."""
_PLAIN = rf"""(?P<plain>(?:[^\s&'",;)]|{_GOES_ON})+)"""
# In quotes of its own a value may have blanks.
_QUOTED = (
    rf"""(?={_GOES_ON})(?P<quote>["'])(?P<quoted>(?:(?!(?P=quote))[^\r\n&])+)(?P=quote)"""
    r"""(?![^\s&,;)\]}>])"""
)
# What is hidden already stays as it is.
_VALUE = rf"""(?!["']?\*\*\*)(?:{_QUOTED}|{_PLAIN})"""
_NAMED = re.compile(
    r"(?i)\b(?P<name>[\w-]{0,40}(?:password|passwd|passphrase)|(?:[\w-]{0,40}[_-])?pwd"
    r"|[\w-]{0,40}[_-]pass|(?:[\w-]{0,40}[_-])?(?:token|secret|signature|credentials?)"
    r"|[\w-]{0,40}(?:api|access|secret|account)[_-]?key(?:[_-]id)?)"
    rf"={_VALUE}"
)
# In small letters `sort_key=score` is no secret, and `KEY=VALUE` is what `--set` expects.
_VARIABLE = re.compile(rf"\b(?!KEY=)(?P<name>[A-Z][A-Z0-9_]{{0,60}})={_VALUE}")
_BEARER = re.compile(r"(?i)\b(bearer|basic)\s+[\w.~+/-]{8,}=*")
_SECRET_WORD = re.compile("KEY|TOKEN|SECRET|PASS|PWD|CREDENTIAL|CONNECTION_?STRING")
_OTHER_WORD = re.compile(
    "TOKENIZER|(?:MAX|MIN|NUM)_(?:NEW_)?TOKENS|KEYMAP|KEYBOARD|KEYWORD|ASKPASS|BYPASS|PASSIVE"
)
"""Words with one of those within them, which are about no secret."""
_ABOUT_A_SECRET = re.compile(
    r"^(?:OLD)?PWD$|(?:PATH|FILE|DIR)$"
    r"|_(?:NAME|TYPE|MODE|URL|URI|HOST|PORT|LIMIT|COUNT|SIZE|LENGTH|TTL|TIMEOUT)$"
)
"""Variables that hold no secret although their names have such a word: a folder, a number, ..."""
_CONTROL = re.compile(
    r"[\0-\x09\x0b-\x1f\x7f-\x9f\u2028\u2029"
    # These turn the direction of writing, so that a text reads otherwise than it is.
    r"\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]"
)


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
    shown = _USER_AND_PASSWORD.sub(_without_user, shown)
    shown = _NAMED.sub(rf"\g<name>={HIDDEN}", shown)
    shown = _VARIABLE.sub(_without_secret, shown)
    return _BEARER.sub(rf"\1 {HIDDEN}", shown)


def secrets_of(environment: Mapping[str, str]) -> list[str]:
    """Return the values of secret variables, and the secrets within the values of any variable."""
    found = set()
    for name, value in environment.items():
        # A name with KEY in it may stand for the path of one, which is not secret.
        if is_secret_name(name) and not (value.startswith("/") and os.path.exists(value)):
            found.add(value)
        # A connection string is hidden as a whole, and a driver may print a part of it.
        found |= _named_secrets(value)
        for password in _passwords(value):
            found.add(password)
            # A driver may print it decoded.
            found.add(unquote(password))
    long_enough = [value for value in found if len(value) >= MIN_SECRET_CHARS]
    # The longest first: a secret may be a part of another one.
    return sorted(long_enough, key=len, reverse=True)


def is_secret_name(variable: str) -> bool:
    """Whether a variable of that name holds a secret itself, not its path, say."""
    name = variable.upper()
    has_word = bool(_SECRET_WORD.search(_OTHER_WORD.sub("_", name)))
    return has_word and not _ABOUT_A_SECRET.search(name)


def _passwords(text: str) -> list[str]:
    """Return the passwords of the URLs in a text."""
    found = [url["password"] for url in _USER_AND_PASSWORD.finditer(text)]
    return [password for password in found if password]


def _named_secrets(text: str) -> set[str]:
    """Return the values of `password=VALUE` and the like in a text."""
    found = {_value_of(named) for named in _NAMED.finditer(text)}
    for variable in _VARIABLE.finditer(text):
        if is_secret_name(variable["name"]):
            found.add(_value_of(variable))
    return found


def _value_of(found: re.Match[str]) -> str:
    """The value of `NAME=value`, without quotes of its own."""
    value: str = found["quoted"] or found["plain"]
    return value


def _without_user(url: re.Match[str]) -> str:
    """The beginning of a URL as it may be shown."""
    if url["user"] is None:
        return url[0]
    return f"{url['head']}{HIDDEN}@"


def _without_secret(found: re.Match[str]) -> str:
    """`NAME=value` as it may be shown."""
    if is_secret_name(found["name"]):
        return f"{found['name']}={HIDDEN}"
    return found[0]


def printable(text: str) -> str:
    r"""Return `text` with every control character written out, such as `\x1b`; lines stay lines.

    A terminal obeys them: a name could clear the screen, set the window's title, or hide a line.
    """
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def has_password(url: str) -> bool:
    """Whether a URL carries a password, or a secret in its query."""
    return bool(_passwords(url) or _named_secrets(url))


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
