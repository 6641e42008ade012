"""Turn a sweep into its cells and their trials, and find what a person got wrong in it."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from suite.config.arm import Arm
from suite.config.hashing import canonical_json, short_hash
from suite.config.space import LearningRateRange, load_space
from suite.config.sweep import AttentionChoice, BackboneChoice, MethodChoice, SweepConfig
from suite.config.task import TaskConfig, load_task
from suite.config.training import check_batch
from suite.errors import ConfigError, IncompatibleError, SuiteError
from suite.plan.resources import planned_workers
from suite.record.cells import Trial
from suite.record.references import check_references
from suite.record.spec import Phase, TrialSpec, cell_key

if TYPE_CHECKING:  # torch is imported to check a plan, not to read one
    from transformers import PreTrainedTokenizerBase

    from suite.backbones.loading import Head, ResolvedBackbone
    from suite.data.objective import Objective


@dataclass(frozen=True, slots=True)
class PlannedCell:
    """One arm on one task, and the range its learning rate is searched in.

    Attributes:
        contest: Name of the group of architectures of which one will be confirmed; None where the
            architecture is settled.
        choice: Place of this architecture in the group, 0 for the search space's first.
    """

    arm: Arm
    task: TaskConfig
    learning_rate: LearningRateRange
    contest: str | None = None
    choice: int = 0

    @property
    def key(self) -> str:
        return cell_key(self.arm.key, self.task.name)


@dataclass(frozen=True, slots=True)
class Plan:
    """All cells of a sweep in the order they are run.

    Attributes:
        config: The sweep as given.
        cells: Arms in the order backbone, attention, method, architecture; the tasks of an arm side
            by side.
        world_size: Workers of a trial whose backbone asks for no other number; part of every
            trial's identity.
        pretrains: Runs of the pretrain stage; a cell's arm names its own by hash.
    """

    config: SweepConfig
    cells: tuple[PlannedCell, ...]
    world_size: int
    pretrains: tuple[TrialSpec, ...] = ()

    def workers(self, cell: PlannedCell) -> int:
        """Workers of a cell's trials."""
        return _workers(self.config, cell.arm.backbone.name, self.world_size)

    def lanes(self, cell: PlannedCell) -> int:
        """Search trials of a cell that are proposed as one round, and may train side by side."""
        # Energy, memory and time of a trial beside others are not those of the trial.
        if self.config.search.second is not None:
            return 1
        # Methods import torch, which showing a plan does not need.
        from suite.petl import get_method

        if get_method(cell.arm.method).backward_through_backbone:
            return 1
        return self.config.search.lanes

    def study_of(self, cell: PlannedCell) -> str:
        """A name that the cells of one study share: the architectures of a method on a task."""
        if cell.contest is None or self.config.search.per == "architecture":
            return cell.key
        return f"{cell.contest}/{cell.task.name}"

    def search_trials(self, cell: PlannedCell) -> int:
        """The budget of a cell's study, before the edge guard and the stop rule change it.

        Of cells that share a study the first counts it.
        """
        if cell.choice and self.study_of(cell) != cell.key:
            return 0
        # The choices matter for a fixed rate alone, and to count them takes time.
        if not cell.learning_rate.fixed:
            return self.config.search.trials
        return self.choices(cell)

    def search_trials_at_most(self, cell: PlannedCell) -> int:
        """The same with all trials that the edge guard may add."""
        budget = self.search_trials(cell)
        if not budget or cell.learning_rate.fixed:
            return budget
        return self.config.search.most_trials(cell.learning_rate, choices=0)

    def arms_by_place(self) -> dict[tuple[str, str], set[str]]:
        """The arms that will be confirmed, by backbone and task: what the verdicts are about.

        Of the architectures that compete one is confirmed, so their contest counts as one arm.
        """
        found: dict[tuple[str, str], set[str]] = defaultdict(set)
        for cell in self.cells:
            place = (cell.arm.backbone.name, cell.task.name)
            found[place].add(cell.contest or cell.arm.key)
        return found

    def choices(self, cell: PlannedCell) -> int:
        """Architectures and batch sizes among which the study of a cell chooses."""
        shared = self.study_of(cell)
        architectures = 1
        if shared != cell.key:
            architectures = sum(self.study_of(other) == shared for other in self.cells)
        return self.choices_among(cell, architectures)

    def choices_among(self, cell: PlannedCell, architectures: int) -> int:
        """The same where the number of architectures is known; 0 where nothing is to be chosen."""
        found = architectures * len(self.config.batch_sizes)
        # A contest judges each architecture by a trial, also where each has a study of its own.
        if found == 1 and cell.contest is None:
            return 0
        return found

    def confirm_runs(self, cell: PlannedCell) -> int:
        """Confirm runs of a cell; of a contest's architectures the first counts them."""
        # One architecture of a contest is confirmed, so its runs are counted once.
        if cell.choice:
            return 0
        return len(self.config.confirm.seeds)

    def trials_of(self, cell: PlannedCell) -> int:
        """Search trials and confirm runs, as far as they are certain."""
        return self.search_trials(cell) + self.confirm_runs(cell)

    def trials_at_most(self, cell: PlannedCell) -> int:
        """The same with all trials that the edge guard may add."""
        return self.search_trials_at_most(cell) + self.confirm_runs(cell)

    @property
    def total_trials(self) -> int:
        return sum(self.trials_of(cell) for cell in self.cells)

    def search_spec(
        self,
        cell: PlannedCell,
        number: int,
        learning_rate: float,
        *,
        batch_size: int | None = None,
    ) -> TrialSpec:
        """The trial `number` of the cell's study; without a batch size it has the sweep's."""
        return self._spec(cell, Phase.SEARCH, learning_rate, number=number, batch_size=batch_size)

    def confirm_spec(
        self,
        cell: PlannedCell,
        learning_rate: float,
        seed: int,
        *,
        batch_size: int | None = None,
    ) -> TrialSpec:
        """A run of the chosen learning rate with a fresh seed, tested at its end."""
        return self._spec(cell, Phase.CONFIRM, learning_rate, seed=seed, batch_size=batch_size)

    def includes(self, cell: PlannedCell, trial: Trial) -> bool:
        """Whether a trial found on disk is one that this plan asks for.

        The plan does not ask for trials beyond a lowered budget, however often it is extended
        (every arm gets the same budget), nor for those of a task file that was edited since, or of
        another number of workers. `CellState` knows the best learning rate, and recognises confirm
        runs at a rate that no longer is.
        """
        spec = trial.spec
        # A trial of another recipe has the same specification, and another name.
        if trial.folder.hash != spec.hash:
            return False
        batch_size = spec.training.batch_size
        if batch_size not in self.config.batch_sizes:
            return False
        if spec.phase is Phase.SEARCH:
            # This counts every extension that the guard may add: how many it did add only the study
            # knows.
            choices = 0
            # Only there does it matter, and to count them takes time.
            if cell.learning_rate.fixed:
                choices = self.choices(cell)
            most = self.config.search.most_trials(cell.learning_rate, choices)
            planned = self.search_spec(cell, spec.number, spec.learning_rate, batch_size=batch_size)
            return spec.number < most and _is_same(spec, planned)
        return spec.seed in self.config.confirm.seeds and self._would_confirm(cell, spec)

    def leaves_out(self, cell: PlannedCell, trial: Trial) -> bool:
        """Whether a trial is a confirm run of this plan in all but its seed."""
        spec = trial.spec
        if trial.folder.hash != spec.hash or spec.phase is not Phase.CONFIRM:
            return False
        return spec.seed not in self.config.confirm.seeds and self._would_confirm(cell, spec)

    def _would_confirm(self, cell: PlannedCell, spec: TrialSpec) -> bool:
        planned = self.confirm_spec(
            cell, spec.learning_rate, spec.seed, batch_size=spec.training.batch_size
        )
        return _is_same(spec, planned)

    def _spec(
        self,
        cell: PlannedCell,
        phase: Phase,
        learning_rate: float,
        *,
        number: int = 0,
        seed: int = 0,
        batch_size: int | None = None,
    ) -> TrialSpec:
        config = self.config
        training = config.training
        if batch_size is not None and batch_size != training.batch_size:
            training = training.model_copy(update={"batch_size": batch_size})
        return TrialSpec(
            sweep=config.name,
            arm=cell.arm,
            task=cell.task,
            training=training,
            limit=config.limit,
            decoder_objective=config.decoder_objective,
            world_size=self.workers(cell),
            phase=phase,
            number=number,
            learning_rate=learning_rate,
            seed=seed,
        )


def make_plan(config: SweepConfig, *, where: str, world_size: int | None = None) -> Plan:
    """Make the cells of a sweep and check each of them.

    Args:
        config: The sweep.
        where: Its file, for errors.
        world_size: Workers of a trial whose backbone asks for no other number, if that is known;
            None = as the sweep says, else as on CPUs.

    Raises:
        ConfigError: A name that does not exist, a batch that does not divide, an axis with the same
            entry twice.
        IncompatibleError: A method that does not work on a backbone's family.
    """
    world_size = planned_workers(config, world_size)
    # The cheap checks come first. Building every arm takes longest and comes last.
    for workers in {_workers(config, choice.name, world_size) for choice in config.backbones}:
        for size in config.batch_sizes:
            training = config.training.model_copy(update={"batch_size": size})
            check_batch(training, workers, where=f"{where}: training")
    tasks = [load_task(name, where=f"{where}: tasks") for name in config.tasks]
    # These come before the arms, each of which names its run by hash.
    pretrains = _pretrains(config, world_size, where=where)
    cells = []
    for arm, learning_rate, contest, choice in _arms(config, pretrains, where=where):
        for task in tasks:
            cells.append(PlannedCell(arm, task, learning_rate, contest, choice))
    _check_distinct(cells, where=where)
    arms = {cell.arm.key: cell.arm for cell in cells}
    check_references(config.reference, arms.values(), config.tasks, where=where)
    _check_pretrains(pretrains, where=where)
    _check_arms(config, cells, where=where)
    _check_attention(config.attention, where=where)
    # Several backbones and variants may need the same run.
    runs = {spec.hash: spec for spec in pretrains.values()}
    return Plan(config, tuple(cells), world_size, tuple(runs.values()))


def _is_same(found: TrialSpec, planned: TrialSpec) -> bool:
    """Whether two specifications are of one trial; where its data lie is no part of it."""
    # To compare is cheaper than to hash, and nearly always enough.
    return found == planned or found.hash == planned.hash


def _arms(
    config: SweepConfig, pretrains: Mapping[tuple[int, int], TrialSpec], *, where: str
) -> Iterator[tuple[Arm, LearningRateRange, str | None, int]]:
    """Every arm with its range, the name of its contest and its place in that.

    Where only one architecture is left there is no contest, and the place is 0.
    """
    from suite.petl.own_code import own_code

    choices = [_method(choice, config, where=where) for choice in config.methods]
    for b, backbone in enumerate(config.backbones):
        for a, attention in enumerate(config.attention):
            pretrain = pretrains.get((b, a))
            for name, architectures, learning_rate in choices:
                code = own_code(backbone, attention, name, where=where)
                for place, architecture in enumerate(architectures):
                    arm = Arm(
                        backbone=backbone,
                        attention=attention,
                        method=name,
                        architecture=architecture,
                        pretrain=None if pretrain is None else pretrain.hash,
                        code=code,
                    )
                    if config.architectures == "search" and len(architectures) > 1:
                        # The architectures of a contest share this hash; two contests never do.
                        names = arm.model_dump(mode="json", exclude={"architecture"})
                        yield arm, learning_rate, short_hash(names), place
                    else:
                        yield arm, learning_rate, None, 0


def _pretrains(
    config: SweepConfig, world_size: int, *, where: str
) -> dict[tuple[int, int], TrialSpec]:
    """The pretrain runs by the places of backbone and attention in the sweep."""
    if config.pretrain is None:
        return {}
    # These load torch, which reading a stored plan does without.
    from suite.backbones.loading import resolve
    from suite.plan.pretraining import pretrain_run

    found: dict[tuple[int, int], TrialSpec] = {}
    for b, backbone in enumerate(config.backbones):
        resolved = resolve(backbone, where=f"{where}: backbones")
        for a, attention in enumerate(config.attention):
            spec = pretrain_run(
                config,
                resolved,
                attention,
                world_size=_workers(config, backbone.name, world_size),
                where=where,
            )
            if spec is not None:
                found[b, a] = spec
    if not found:
        raise ConfigError(
            f"{where}: pretrain: no attention of the sweep starts from scratch; "
            "set pretrain.attention: all, or leave it out"
        )
    return found


def _check_pretrains(pretrains: Mapping[tuple[int, int], TrialSpec], *, where: str) -> None:
    """Check objective and arm of every pretrain run, without weights and without data."""
    from suite.petl.arm import check_arm

    for spec in pretrains.values():
        check_batch(spec.training, spec.world_size, where=f"{where}: pretrain")
        with _placed(
            f"{where}: pretrain of attention {spec.arm.attention.name} on {spec.arm.backbone.name}"
        ):
            resolved, objective = pretrain_objective(spec)
            check_arm(
                resolved,
                objective.head,
                spec.arm,
                max_length=objective.positions,
                pretrained=True,
            )


def pretrain_objective(
    spec: TrialSpec, *, cache: Path | None = None, data_root: Path | None = None
) -> tuple[ResolvedBackbone, Objective]:
    """The backbone that a pretrain run trains, and its objective.

    `cache` and `data_root` mean the same as in `objectives`.
    """
    from suite.data.make_objective import objective_of

    resolved, tokenizer = _open(spec.arm.backbone, cache=cache, data_root=data_root)
    return resolved, objective_of(spec, kind=resolved.family.kind, tokenizer=tokenizer)


def _method(
    choice: MethodChoice, config: SweepConfig, *, where: str
) -> tuple[str, list[dict[str, Any]], LearningRateRange]:
    """A method's own name, its architectures with all defaults, and its learning-rate range.

    The range is the sweep's if it has one, else that of the method's search space.
    """
    from suite.petl import get_method
    from suite.petl.arm import full_architecture

    place = f"{where}: methods: {choice.name}"
    name = get_method(choice.name, where=place).name
    given = [choice.architecture] if choice.architecture is not None else []
    learning_rate = choice.learning_rate
    # The search space fills in what the sweep leaves open.
    if not given or learning_rate is None:
        space = load_space(name, where=place)
        # Not when the file is read: only classes know the names of a user's own methods.
        if space.near is not None:
            get_method(space.near.method, where=f"{place}: near of its search space")
        if not given:
            place = f"{place}: architectures of its search space"
        given, learning_rate = given or space.architectures, learning_rate or space.learning_rate
    # One choice, so no contest: the one that the search space lists first.
    if config.architectures == "first":
        given = given[:1]
    with _placed(place):
        return name, [full_architecture(name, a) for a in given], learning_rate


def objectives(
    config: SweepConfig,
    tasks: Iterable[TaskConfig],
    *,
    where: str,
    cache: Path | None = None,
    data_root: Path | None = None,
) -> Iterator[tuple[ResolvedBackbone, Objective]]:
    """Check that every backbone of a sweep can answer every task, and yield each pair.

    The tasks of a backbone come together.

    Args:
        where: The sweep's file, for errors.
        cache: Where tokenizers are trained that a backbone asks for; None = nothing is trained,
            bytes stand in for them.
        data_root: Local data that replaces the hub; read only to train tokenizers.

    Raises:
        BackboneError: A backbone or its tokenizer cannot be found or read.
        IncompatibleError: A task that this kind of backbone cannot answer.
    """
    # This loads torch, as in `_pretrains`.
    from suite.data.make_objective import make_objective

    # An iterator would be used up after the first backbone.
    tasks = list(tasks)
    for choice in config.backbones:
        resolved, tokenizer = _open(
            choice, cache=cache, data_root=data_root, where=f"{where}: backbones"
        )
        for task in tasks:
            with _placed(f"{where}: task {task.name} on {choice.name}"):
                objective = make_objective(
                    task,
                    kind=resolved.family.kind,
                    tokenizer=tokenizer,
                    training=config.training,
                    decoder_objective=config.decoder_objective,
                )
            yield resolved, objective


def _open(
    choice: BackboneChoice, *, cache: Path | None, data_root: Path | None, where: str = ""
) -> tuple[ResolvedBackbone, PreTrainedTokenizerBase]:
    """A backbone and its tokenizer; the arguments are those of `objectives`."""
    from suite.backbones.loading import load_tokenizer, resolve

    if cache is None:
        resolved = resolve(choice, where=where)
    else:
        # This one loads pyarrow and datasets, which a plan does without.
        from suite.data.trained_tokenizer import open_backbone

        resolved = open_backbone(choice, data_root=data_root, cache=cache, where=where)
    return resolved, load_tokenizer(resolved, draft=cache is None)


def _check_arms(config: SweepConfig, cells: Sequence[PlannedCell], *, where: str) -> None:
    """Build every arm without weights, to find what does not go together."""
    # These load torch, as in `_pretrains`.
    from suite.backbones.loading import check_weights
    from suite.petl import get_method
    from suite.petl.arm import check_arm, check_recomputed

    tasks = {cell.task.name: cell.task for cell in cells}
    arms = {cell.arm.key: cell.arm for cell in cells}
    # Tasks with the same head and length need one check.
    seen: set[tuple[str, Head, int]] = set()
    whole: set[tuple[str, Head]] = set()
    for resolved, objective in objectives(config, tasks.values(), where=where):
        weights = (resolved.choice.model_dump_json(), objective.head)
        if weights not in whole:
            whole.add(weights)
            with _placed(f"{where}: task {objective.task.name} on {resolved.choice.name}"):
                check_weights(resolved, objective.head)
        for key, arm in arms.items():
            check = (key, objective.head, objective.positions)
            if arm.backbone != resolved.choice:
                continue
            if get_method(arm.method).keeps_states(config.training):
                with _placed(where):
                    objective.check_can_keep()
            if check in seen:
                continue
            seen.add(check)
            with _placed(f"{where}: {arm.method} on {arm.backbone.name}"):
                check_recomputed(get_method(arm.method), config.training)
                check_arm(resolved, objective.head, arm, max_length=objective.positions)


@contextmanager
def _placed(place: str) -> Iterator[None]:
    """Say where in the sweep an error belongs."""
    try:
        yield
    # This error keeps its type, while every other one becomes a mistake in the sweep's file.
    except IncompatibleError as error:
        raise IncompatibleError(f"{place}: {error}") from None
    except SuiteError as error:
        # Its cause is kept: it may be an exception in the user's own code.
        raise ConfigError(f"{place}: {error}") from error.__cause__


def _workers(config: SweepConfig, backbone: str, world_size: int) -> int:
    return config.resources.workers_by_backbone.get(backbone, world_size)


def _check_distinct(cells: Sequence[PlannedCell], *, where: str) -> None:
    seen: set[str] = set()
    for cell in cells:
        if cell.key in seen:
            what = f"{cell.arm.method} on {cell.arm.backbone.name} with task {cell.task.name}"
            raise ConfigError(f"{where}: {what} is asked for twice; remove one of the entries")
        seen.add(cell.key)


def _check_attention(choices: Iterable[AttentionChoice], *, where: str) -> None:
    """Refuse two entries that are one variant once defaults fill the options they leave out.

    The options of an arm stay as given, because they are part of the hash of its trials.
    """
    # These load torch, as in `_pretrains`.
    from suite.attention import variants

    seen: dict[str, AttentionChoice] = {}
    for choice in choices:
        variant = variants.get(choice.name, where=f"{where}: attention")
        options = variant.configure(choice.options).config.model_dump(mode="json")
        first = seen.setdefault(canonical_json([variant.name, options]), choice)
        if first is not choice:
            raise ConfigError(
                f"{where}: attention: {choice.name} with {json.dumps(choice.options)} is the same "
                f"as {first.name} with {json.dumps(first.options)}; remove one of the entries"
            )
