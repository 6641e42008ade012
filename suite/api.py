"""The suite from Python: what the commands call, with typed arguments and results.

    import suite

    sweep = suite.Sweep(name="mine", backbones=["minilm"], methods=["full", "lora"], tasks=["sst2"])
    outcome = suite.run(sweep, home="runs")
    outcome.leaderboard()

Every name here is an attribute of `suite` too. Importing this module imports no torch, Ray or
pandas: each function imports what it needs when it is called. Everything that the user can mend
raises a `suite.errors.SuiteError`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Unpack

from suite.config.loader import apply_changes, load_yaml, with_overrides
from suite.config.names import DEFAULT_HOME
from suite.config.sweep import SweepConfig
from suite.config.sweep_files import checked_sweep
from suite.config.variables import (
    DATA_ROOT,
    HOME,
    OPTUNA,
    STORAGE,
    given_or_set,
    path_given_or_set,
)
from suite.errors import ConfigError
from suite.record.folder import Home
from suite.registry import check_plug_in_roots, find_sweep

if TYPE_CHECKING:
    import pandas as pd

    from suite.export.load import Loaded
    from suite.leaderboard.choice import Choice
    from suite.plan.events import Listener
    from suite.plan.events import Outcome as Ending
    from suite.profiling import Profile
    from suite.record.result import TrialResult
    from suite.tracking.follower import Follower


@dataclass(frozen=True, slots=True, init=False)
class Sweep:
    """What is compared, with which budget: the keys of a sweep's file as arguments.

    Attributes:
        config: The validated sweep.
        where: What errors call it.
    """

    config: SweepConfig
    where: str

    def __init__(
        self,
        *,
        name: str,
        backbones: Sequence[str | Mapping[str, Any]],
        methods: Sequence[str | Mapping[str, Any]],
        tasks: Sequence[str],
        **keys: Any,
    ) -> None:
        """Check a sweep.

        Args:
            name: Its name; one sweep of a name in a home.
            backbones: Names, hub ids or folders; or mappings such as
                `{"name": "bert-base", "drop_layers": 4}`.
            methods: Names, or mappings such as `{"name": "lora", "architecture": {"rank": 8}}`.
            tasks: Names of tasks.
            **keys: The other keys of `suite.config.sweep.SweepConfig`, such as
                `training={"epochs": 2}` or `confirm={"seeds": [1, 2, 3]}`.

        Raises:
            ConfigError: A key or value cannot be used.
        """
        given = {
            "name": name,
            "backbones": _listed(backbones),
            "methods": _listed(methods),
            "tasks": _listed(tasks),
            **keys,
        }
        where = f"Sweep {name!r}"
        # With no change this is a plain copy: the home stores lists, where Python may give tuples.
        given = apply_changes(given, {})
        object.__setattr__(self, "config", checked_sweep(given, where=where))
        object.__setattr__(self, "where", where)

    @classmethod
    def from_yaml(cls, path: str | Path, changes: Mapping[str, Any] | None = None) -> Sweep:
        """Read a sweep file.

        Args:
            path: The file, or the name of a known sweep (`suite list sweeps`).
            changes: Values by dotted key, such as `{"training.epochs": 2}`.

        Raises:
            ConfigError: With file, line and key.
        """
        found = find_sweep(str(path))
        data, lines = load_yaml(found)
        given = changes or {}
        # Not by way of YAML text, which reads 1e-06 as a word.
        data = apply_changes(data, given)
        config = checked_sweep(data, where=str(found), lines=with_overrides(lines, given))
        return cls.of(config, where=str(found))

    @classmethod
    def of(cls, config: SweepConfig, *, where: str) -> Sweep:
        """A sweep that is validated already."""
        sweep = object.__new__(cls)
        object.__setattr__(sweep, "config", config)
        object.__setattr__(sweep, "where", where)
        return sweep


@dataclass(frozen=True, slots=True)
class Outcome:
    """The results of a sweep, as its home and MLflow store hold them now.

    Attributes:
        home: The folder that holds the trials.
        sweep: Name of the sweep.
        tracking_uri: MLflow store.
        ending: How the run ended; None where the sweep was not run here but opened by `results`.
        followers: What copied the run into MLflow and Optuna, each with why it could not.
    """

    home: Path
    sweep: str
    tracking_uri: str
    ending: Ending | None = None
    followers: tuple[Follower, ...] = field(default=(), repr=False)

    @property
    def ok(self) -> bool:
        """Whether every cell has all that the sweep wants of it, and nothing cut the run short.

        Raises:
            ConfigError: Another machine ran the sweep, and this home does not know its cells.
        """
        if self.ending is not None:
            return self.ending.ok
        from suite.plan.status import status

        cells = status(Home(self.home), self.sweep)
        return all(cell.status.is_complete for cell in cells)

    def leaderboard(self, **choice: Unpack[Choice]) -> pd.DataFrame:
        """Test scores with their cost: a row per cell, and a mean row per arm over its tasks.

        Args:
            **choice: `task`, `method`, `attention`, `sort` (score, energy, memory, trainable, prr,
                peop), `target_frac` and `rejected`, as of `suite.leaderboard.table.choose`.

        Raises:
            TrackingError: There are no results, or none of that choice.
            ConfigError: `sort` is no sort key.
        """
        from suite.tracking.query import leaderboard

        return leaderboard(self.tracking_uri, sweep=self.sweep, **choice)

    def compare(
        self, first: str | None = None, second: str | None = None, *, task: str | None = None
    ) -> pd.DataFrame:
        """The difference of two arms per task and on their mean, with interval and p-value.

        Args:
            first: The name of an arm, such as `lora` or `gqa/lora`; with none every pair is
                compared.
            second: The other arm.
            task: Only this task.

        Returns:
            The columns `suite.leaderboard.pairs.KEYS`; the difference is first minus second.

        Raises:
            ConfigError: A name is that of no arm, or of several.
            StatisticsError: Nothing can be compared; the message says why.
        """
        import pandas as pd

        from suite.leaderboard.pairs import KEYS, compare_arms

        given = [name for name in (first, second) if name is not None]
        if len(given) == 1:
            raise ConfigError(f"compare({given[0]!r}): give two arms, or none for every pair")
        rows = compare_arms(Home(self.home), given, sweep=self.sweep, task=task)
        return pd.DataFrame(rows, columns=list(KEYS))

    def report(self, path: str | Path | None = None, *, sort: str = "score") -> Path:
        """Write the page that needs nothing else to be read.

        Args:
            path: A file that ends in .html, or a folder; None = `report` in the home.
            sort: Order of the leaderboard, as of `leaderboard`.

        Returns:
            The page.

        Raises:
            TrackingError: There are no results.
            ConfigError: The page cannot be written there, or `sort` is no sort key.
        """
        from suite.report.compose import write_page
        from suite.report.data import read

        found = read(self.home, self.sweep, tracking_uri=self.tracking_uri, sort=sort)
        return write_page(found, Path(path) if path is not None else None, home=self.home)

    def _repr_html_(self) -> str:
        """What a notebook shows: the columns of the leaderboard that are read first."""
        rows = self.leaderboard(rejected=True)
        # An architecture that lost its contest has no score.
        rows = rows[rows["status"] != "not chosen"]
        arm = [name for name in ("backbone", "attention") if rows[name].nunique() > 1]
        shown = ["task", "rank", *arm, "method", "score_mean", "ci_low", "ci_high", "learning_rate"]
        html: str = rows[shown].to_html(index=False)
        return html


def run(
    sweep: Sweep | str | Path,
    *,
    home: str | Path | None = None,
    data_root: str | Path | None = None,
    address: str | None = None,
    storage: str | None = None,
    tracking_uri: str | None = None,
    optuna: str | None = None,
    insecure: bool = False,
    retry_given_up: bool = False,
    progress: bool = True,
    listeners: Sequence[Listener] = (),
) -> Outcome:
    """Run a sweep, or go on with it. What has finished in the home never runs again.

    Args:
        sweep: The sweep, its file, or its name.
        home: Folder for trials and `mlflow.db`; None = `$SUITE_HOME`, else `runs`.
        data_root: Local data that replace the hub; None = `$SUITE_DATA_ROOT`, else the hub.
        address: A running Ray cluster, or `auto`; None = this machine.
        storage: URL below which the home is mirrored where hosts share no disk; None =
            `$SUITE_STORAGE`, else nowhere.
        tracking_uri: MLflow store; None = `$MLFLOW_TRACKING_URI`, else `mlflow.db` in the home.
        optuna: Storage that the studies are mirrored to; None = `$SUITE_OPTUNA`, else nowhere.
        insecure: Whether a cluster may be used that asks nobody for a token.
        retry_given_up: Whether trials are tried again that used up their retries.
        progress: Whether a table is shown meanwhile: on a terminal, or below a notebook's cell;
            elsewhere a line per trial on stderr.
        listeners: Told what happens, beside these.

    Raises:
        SuiteError: Something is wrong with the sweep, its data, the home or the resources; no
            worker has started.
    """
    from suite.cluster.access import require_token
    from suite.tracking.store import resolve_uri
    from suite.tune.driver import run_sweep

    check_plug_in_roots()
    if isinstance(sweep, str | Path):
        sweep = Sweep.from_yaml(sweep)
    if not isinstance(sweep, Sweep):
        raise ConfigError(
            f"run: got {sweep!r:.60}, expected a Sweep, its file or its name; keys become one by"
            " suite.Sweep(**keys)"
        )
    # a cluster without a token runs anybody's code: ask before Ray connects
    if address is not None and not insecure:
        require_token(address)
    place = _home(home)
    followers = _followers(sweep.config.name, place, tracking_uri, given_or_set(optuna, OPTUNA))
    told = [*listeners, *followers]
    options: dict[str, Any] = {
        "home": place,
        "data_root": path_given_or_set(data_root, DATA_ROOT),
        "address": address,
        "storage": given_or_set(storage, STORAGE),
        "where": sweep.where,
        "retry_given_up": retry_given_up,
    }
    if progress:
        from suite.progress import board

        with board() as shown:
            ending = run_sweep(sweep.config, listeners=[shown, *told], **options)
    else:
        ending = run_sweep(sweep.config, listeners=told, **options)
    uri = resolve_uri(place, tracking_uri)
    return Outcome(place.path.resolve(), sweep.config.name, uri, ending, tuple(followers))


def _followers(
    sweep: str, home: Home, tracking_uri: str | None, optuna: str | None
) -> list[Follower]:
    """What brings MLflow up to date while the sweep runs, and Optuna's storage where asked to."""
    from suite.tracking.listener import TrackingListener
    from suite.tracking.store import resolve_uri

    uri = resolve_uri(home, tracking_uri, write=True)
    followers: list[Follower] = [TrackingListener(home, uri, sweep=sweep)]
    if optuna is not None:
        from suite.tracking.optuna_mirror import OptunaFollower, check_url

        check_url(optuna)
        followers.append(OptunaFollower(home, optuna, sweep=sweep))
    return followers


def results(
    home: str | Path | None = None,
    sweep: str | None = None,
    *,
    tracking_uri: str | None = None,
) -> Outcome:
    """The results of a sweep that ran elsewhere or before.

    Args:
        home: The folder that `suite.run` or `suite run` wrote to; None = as of `run`.
        sweep: Name of the sweep; not needed where the home has one.
        tracking_uri: MLflow store, as of `run`.

    Raises:
        TrackingError: The home has no sweep.
        ConfigError: It has several and none is named, or none of this name.
    """
    from suite.report.data import only_sweep
    from suite.tracking.store import resolve_uri

    place = _home(home)
    name = only_sweep(place.path, sweep, tracking_uri)
    return Outcome(place.path.resolve(), name, resolve_uri(place, tracking_uri))


def trial(
    *,
    backbone: str,
    method: str,
    task: str,
    attention: str = "pretrained",
    learning_rate: float | None = None,
    seed: int = 0,
    training: Mapping[str, Any] | None = None,
    limit: Mapping[str, Any] | None = None,
    architecture: Mapping[str, Any] | None = None,
    changes: Sequence[str] = (),
    ranks: int = 1,
    test: bool = False,
    again: bool = False,
    home: str | Path | None = None,
    data_root: str | Path | None = None,
) -> TrialResult:
    """Train once, without Ray, Optuna or MLflow; a trial that has ended is not trained again.

    Args:
        backbone: A known name, hub id, folder or package:NAME/FOLDER.
        method: A PETL method.
        task: A task.
        attention: An attention variant.
        learning_rate: None = 1e-3.
        seed: Replicate: draws the initial weights and the order of the data.
        training: Keys of `suite.config.training.TrainingConfig`, such as `{"epochs": 1}`.
        limit: Most rows of a split, such as `{"train": 512}`.
        architecture: The method's own settings, such as `{"rank": 8}`.
        changes: Further `key=value` items, as of `suite trial --set`.
        ranks: Worker processes; 1 = this process.
        test: Whether the test data are scored too, with the best epoch.
        again: Whether an earlier run of exactly this trial is forgotten.
        home: Folder for the trial; None = as of `run`.
        data_root: Local data that replace the hub; None = as of `run`.

    Returns:
        The record. `score` is the best validation score, with `test` the test score of that epoch.

    Raises:
        SuiteError: A name, key, value or home cannot be used, or the data cannot be read.
    """
    from suite.plan.preflight import check_home
    from suite.train.by_hand import build_spec, train_by_hand

    check_plug_in_roots()
    place = _home(home)
    check_home(place)
    values: dict[str, Any] = {"seed": seed}
    if learning_rate is not None:
        values["learning_rate"] = learning_rate
    groups = {"training": training, "limit": limit, "architecture": architecture}
    for key, group in groups.items():
        if group is not None:
            values[key] = dict(group)
    spec = build_spec(
        backbone,
        method,
        task,
        attention=attention,
        values=values,
        overrides=changes,
        ranks=ranks,
        test=test,
    )
    return train_by_hand(
        spec, place, data_root=path_given_or_set(data_root, DATA_ROOT), again=again
    )


def params(
    backbone: str,
    method: str = "full",
    *,
    attention: str = "pretrained",
    task: str | None = None,
    num_labels: int = 2,
    dtype: Literal["fp16", "bf16", "fp32"] = "fp16",
    changes: Sequence[str] = (),
) -> dict[str, Any]:
    """Count parameters and the KV cache, without weights.

    Args:
        backbone: A known name, hub id, folder or package:NAME/FOLDER.
        method: A PETL method.
        attention: An attention variant.
        task: Whose head is counted; None = a head of `num_labels` classes.
        num_labels: Classes of the head where no task is given.
        dtype: Type of the cached keys and values.
        changes: `key=value` items, as of `suite params --set`: `rank=8`,
            `backbone.config.num_layers=2`, `attention.options.kv_heads=4`.

    Returns:
        The keys that `suite params --format json` prints: counts of weights, and bytes of the cache
        per token.

    Raises:
        ConfigError: A name, key or value cannot be used.
    """
    from suite.attention.counts import count_attention
    from suite.config.task import load_task
    from suite.petl.arm import count_arm
    from suite.train.arms import GROUPS, head_for, make_arm, read_overrides, resolve_backbone

    check_plug_in_roots()
    if num_labels < 1:
        raise ConfigError(f"params: num_labels: got {num_labels}, expected 1 or more")
    arm = make_arm(
        backbone, method, attention, read_overrides({}, changes, method=method, groups=GROUPS)
    )
    resolved = resolve_backbone(arm, only_shape=True)
    config = None
    if task is not None:
        config = load_task(task, where="--task")
    head = head_for(resolved, config, num_labels=num_labels)
    counted = count_arm(resolved, head, arm, pretrained=True)
    inside = count_attention(resolved, head, arm.attention, dtype=dtype)
    return {
        "backbone": backbone,
        "attention": attention,
        "method": method,
        "architecture": arm.architecture,
        "total": counted.total,
        "trainable": counted.trainable,
        "method_trainable": counted.method,
        "head_trainable": counted.head,
        "trainable_percent": 100 * counted.trainable / counted.total,
        "attention.with_output_projection": inside.with_output_projection,
        "attention.without_output_projection": inside.without_output_projection,
        "attention.extra_over_base": inside.extra_over_base,
        # The decoder's own keys and values grow with the text that it writes, those of
        # cross-attention with the source: their sum would have no unit.
        "kv_bytes_per_token": inside.kv_bytes_per_token,
        # Null where the cache keeps every token.
        "kv_tokens": inside.kv_tokens,
        "cross_kv_bytes_per_token": inside.cross_kv_bytes_per_token,
        "kv_fraction": inside.kv_fraction,
    }


def profile(
    backbones: Sequence[str] = ("t5-small",),
    methods: Sequence[str] | None = None,
    *,
    attention: Sequence[str] = ("pretrained",),
    architectures: Mapping[str, Mapping[str, Any]] | None = None,
    shape: Mapping[str, Any] | None = None,
    estimate: bool = False,
    **setting: Any,
) -> Profile:
    """Measure what arms cost: step time, energy, memory, latency, decoding and cache.

    Args:
        backbones: Known names or folders; only shapes are read, weights are random.
        methods: PETL methods; None = every one that the suite has by name.
        attention: Attention variants.
        architectures: Settings by method, such as `{"lora": {"rank": 8}}`.
        shape: Changes to the configuration of every backbone, such as `{"num_layers": 2}`.
        estimate: Whether to count and estimate only, and run nothing.
        **setting: Keys of `suite.profiling.Setting`, such as `seq=64` or `device="cpu"`; what is
            left out is as of `suite profile`.

    Returns:
        `arms`, each with what was measured, its estimate, and why it was not measured.

    Raises:
        SuiteError: A name or a number cannot be used, or there are fewer GPUs than ranks.
    """
    from suite.petl import methods as known
    from suite.profiling import choose, estimate_only, measure
    from suite.profiling.setting import make_setting

    check_plug_in_roots()
    arms = choose(
        _listed(backbones),
        known.names() if methods is None else _listed(methods),
        _listed(attention),
        shape=dict(shape or {}),
        architectures={name: dict(values) for name, values in (architectures or {}).items()},
    )
    made = make_setting(setting)
    if estimate:
        return estimate_only(arms, made)
    return measure(arms, made)


def load(folder: str | Path) -> Loaded:
    """Load a model from a folder that `suite export` wrote.

    Args:
        folder: Path of the folder.

    Returns:
        `predict(texts)`, and `model` (a torch module in evaluation mode on the CPU) and `tokenizer`
        (of transformers), which it also unpacks to.

    Raises:
        SuiteError: The folder is not whole, or its base cannot be had.
    """
    from suite.export import load as load_folder

    return load_folder(folder)


def _listed(given: Any) -> Any:
    """Choices as a list; a name alone stays as it is, for the check to refuse.

    As a list it would be its letters.
    """
    if isinstance(given, str | Mapping) or not isinstance(given, Iterable):
        return given
    return list(given)


def _home(given: str | Path | None) -> Home:
    return Home(path_given_or_set(given, HOME) or DEFAULT_HOME)
