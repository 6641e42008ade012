"""Every mistake a user can make, as one family of exceptions.

A `SuiteError` is printed without a traceback. Its text says where, what was got, what was expected
and what to do. Anything else that escapes is a bug of ours and keeps its traceback.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

EVERYWHERE = "with --storage, below it and in the home of each host that has it"
"""Where to remove what is to be made again: any copy that is left comes back."""

UNGUARDED = "a script of your own calls this below `if __name__ == '__main__':`"
"""Why a process may end before it begins: each new one runs the script's file again."""


class SuiteError(Exception):
    """Base of all errors that the user can mend."""


class ConfigError(SuiteError):
    """A sweep, task, search space or `--set` value that cannot be used."""


class UnknownNameError(ConfigError):
    """A method, task, backbone, attention variant or key that does not exist.

    Args:
        kind: What was looked up, singular ("method").
        name: What was given.
        known: What exists.
        where: File and key, if there is one.
        advice: What else helps, such as where files were looked for.
    """

    def __init__(
        self, kind: str, name: str, known: Iterable[str], *, where: str = "", advice: str = ""
    ) -> None:
        names = sorted(known)
        near = get_close_matches(str(name), names, n=3, cutoff=0.5)
        hint = f"known: {', '.join(names) or 'none'}"
        if near:
            hint = f"did you mean {' or '.join(near)}?"
        if advice:
            hint = f"{hint} ({advice})"
        place = ""
        if where:
            place = f"{where}: "
        super().__init__(f"{place}unknown {kind} {name!r}; {hint}")


class OwnCodeError(SuiteError):
    """An exception in a plug-in of the user's own; its cause is the exception itself."""


class OtherCodeError(ConfigError):
    """A host finds other files of the user's than those that a trial's arm was made from."""


class IncompatibleError(ConfigError):
    """Two choices that do not go together (a method and a family, a batch and a world size)."""


class DataError(SuiteError):
    """Data that is absent, unreadable or not what the task says."""


class BackboneError(SuiteError):
    """A backbone that cannot be found, read or used."""


class HubUnreachableError(BackboneError):
    """Files that the hub may have, and that this machine cannot get."""


class ResourceError(SuiteError):
    """A demand for more workers, memory or disk than the machine or cluster can ever give."""


def end_of(text: str) -> str:
    """The last line of an error's text, which says what happened; a traceback stands above it."""
    return (text.strip().splitlines() or [""])[-1]


def gib(size_bytes: float) -> str:
    """Bytes in a message: `1.5 GiB`."""
    return f"{size_bytes / 2**30:.3g} GiB"


def no_room_for_states(needed: int, most: int, *, where: str = "") -> ResourceError:
    """The error of states of frozen stacks, of `needed` bytes, where `most` may be kept."""
    place = f"{where}: " if where else ""
    return ResourceError(
        f"{place}training.frozen_dropout: off keeps {gib(needed)} of states, and"
        f" resources.frozen_states_gib allows {gib(most)}; raise it, limit the rows, or"
        " leave frozen_dropout on"
    )


class ClusterError(SuiteError):
    """A Ray cluster that does not answer, does not let us in, or does not do what it is asked."""


class SweepConflictError(SuiteError):
    """A home holds another sweep of the same name, or another driver is writing to it."""


class StaleDriverError(SuiteError):
    """Another driver has taken the sweep over: this one and its workers must not write any more."""


class TrackingError(SuiteError):
    """The tracking server cannot be read."""


class UnreadableRowsError(TrackingError):
    """A file of rows is there and cannot be used: damaged, or of another version."""


class StatisticsError(SuiteError):
    """Stored answers that allow no inference: absent, too few, or not to the same items."""


class ContradictionError(StatisticsError):
    """Stored answers that give another score than the record beside them."""


class CheckpointError(SuiteError):
    """No committed checkpoint could be loaded whole on every rank."""


class StorageError(SuiteError):
    """A storage URL that cannot be used, reached, read or written."""
