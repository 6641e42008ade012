"""A sweep as a person writes it: the axes, the budget, the seeds and the resources."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    Field,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from suite.config.lm_eval import LmEvalConfig
from suite.config.loader import Strict
from suite.config.names import SWEEP
from suite.config.numbers import (
    MOST_COUNT,
    MOST_SECONDS,
    MOST_SEED,
    Amount,
    Count,
    PositiveAmount,
    Seconds,
    Seed,
    WholeNumber,
)
from suite.config.pretrain import PretrainConfig
from suite.config.reference import Reference
from suite.config.space import LearningRateRange
from suite.config.tracking import TrackingConfig
from suite.config.training import TrainingConfig

Slug = Annotated[str, Field(pattern=f"^{SWEEP}$")]
Named = BeforeValidator(lambda given: {"name": given} if isinstance(given, str) else given)
"""In a list of choices, a bare name stands for a choice without options."""
Sampler = Literal["gp", "tpe", "random", "grid"]
PrunerName = Literal["asha", "median"]


class BackboneChoice(Strict):
    """A backbone by name.

    With `config` it starts from random weights of that shape, and nothing is downloaded.
    """

    name: str = Field(
        min_length=1,
        description="a known name (suite list backbones), a hub id, a folder, or "
        "package:NAME/FOLDER",
    )
    revision: str = Field(
        "main", min_length=1, description="commit or branch on the hub; recorded as resolved"
    )
    config: dict[str, Any] | None = Field(
        None, description="start from random weights: changes to the named preset's configuration"
    )
    tokenizer: str | None = Field(
        None,
        min_length=1,
        description="another tokenizer: a hub id, a folder, package:NAME/FOLDER, bytes, or "
        "bpe:SIZE:TASK, trained on a task's text",
    )
    trust_remote_code: bool = Field(
        False,
        description="never set here: --trust-remote-code NAME@COMMIT on the command line sets it",
    )
    drop_layers: WholeNumber = Field(
        0,
        description="leave out the last so many layers of each stack; "
        "the rest keep their weights (READ-large: 4)",
    )

    @model_validator(mode="after")
    def _layers_of_a_checkpoint(self) -> BackboneChoice:
        # a configuration says how many layers there are, and two places could disagree
        if self.drop_layers and self.config is not None:
            raise ValueError(
                "drop_layers shortens a checkpoint; with config, give the number of layers there"
            )
        return self

    @model_validator(mode="after")
    def _code_is_pinned(self) -> BackboneChoice:
        if not self.trust_remote_code:
            return self
        # a branch may get other code after somebody has read it
        if self.config is not None or not re.fullmatch("[0-9a-f]{40}", self.revision):
            raise ValueError(
                "trust_remote_code needs a checkpoint, "
                "and as its revision the 40 digits of a commit"
            )
        return self

    @model_serializer(mode="wrap")
    def _leave_out_drop_layers(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Store `drop_layers` only where it is set, since the hashes of trials depend on it."""
        stored: dict[str, Any] = handler(self)
        if not self.drop_layers:
            stored.pop("drop_layers", None)  # a dump that leaves out defaults has none
        return stored


class AttentionChoice(Strict):
    """An attention variant with its options."""

    name: str = "pretrained"
    options: dict[str, Any] = Field(default_factory=dict)


class MethodChoice(Strict):
    """A PETL method; an architecture or range given here replaces that of its search space."""

    name: str
    architecture: dict[str, Any] | None = Field(
        None, description="used instead of the choices of the search space"
    )
    learning_rate: LearningRateRange | None = Field(
        None, description="searched instead of the range of the search space"
    )


class EdgeGuard(Strict):
    """Extends a study that used up its budget and whose curve rises at an end of the range.

    The range gets a decade more at that end, and the study more trials.
    """

    extensions: WholeNumber = Field(
        2, description="extend by at most so many decades; 0 = none, the row only says `edge`"
    )
    trials: Count | None = Field(
        None, description="extra trials per decade; null = a quarter of search.trials, at least 2"
    )


class StopRule(Strict):
    """Ends a study early, when a model of its curve expects no improvement worth a trial."""

    tolerance: PositiveAmount = Field(
        0.1,
        description="improvement worth a trial: points of the score, or percent of a perplexity",
    )
    min_trials: Count | None = Field(
        None,
        description="no study ends with fewer trials; "
        "null = startup_trials + 2, which is the least in any case",
    )


class SearchConfig(Strict):
    """The budget of one study, the same for every arm."""

    sampler: Sampler = "gp"
    trials: Count = Field(
        8,
        description="trials of a method on a task, of all its architectures (READ: up to 32 each)",
    )
    per: Literal["method", "architecture"] = Field(
        "method",
        description="what the trials count for: architectures are searched in one study, or each "
        "in a study of its own with as many trials (READ)",
    )
    choose: Literal["curve", "best"] = Field(
        "curve",
        description="confirm the learning rate where the model of the curve is highest, or the one "
        "that was tried with the best score",
    )
    transfer: Literal["home"] | bool = Field(
        False,
        description="a study may begin where finished studies of other tasks were best; "
        "home = studies of other sweeps of the home too",
    )
    batch_sizes: list[Count] = Field(
        [],
        description="searched beside the learning rate; written as a list at training.batch_size",
    )
    startup_trials: Count = Field(
        3, description="trials evenly over the range before the model of the sampler is used"
    )
    seed: Seed = 0
    edge_guard: EdgeGuard = EdgeGuard()
    stop: StopRule | None = Field(
        StopRule(), description="ends studies early; null = every study uses up its budget"
    )
    pruner: PrunerName | None = Field(None, description="end weak search trials between two epochs")
    lanes: Count = Field(
        4,
        description="methods without gradients in the backbone (READ, LST) propose and train so "
        "many trials of a study side by side, over one frozen pass; 1 = one after another",
    )
    objective: Literal["score"] | list[Literal["score", "energy", "memory", "time"]] = Field(
        "score",
        description="[score, energy] searches their Pareto front (also memory or time); "
        "what is confirmed follows the score alone, as `choose` says",
    )

    @model_validator(mode="before")
    @classmethod
    def _front_without_stop(cls, given: Any) -> Any:
        """With two objectives the stop rule is off by default.

        It looks at the score alone and would cut the front short.
        """
        if isinstance(given, Mapping) and isinstance(given.get("objective"), list):
            return {"stop": None, **given}
        return given

    @model_validator(mode="after")
    def _goes_together(self) -> SearchConfig:
        # the rules below are about a second objective
        if self.objective == "score":
            return self
        # what is confirmed follows the score, so the score must be one of the two
        if len(self.objective) != 2 or self.objective[0] != "score" or self.objective[1] == "score":
            raise ValueError(
                f"objective: got {self.objective}, expected score, "
                "or [score, X] with X one of energy, memory, time"
            )
        if self.sampler == "grid":
            raise ValueError(
                "sampler grid follows no objective; with two of them take gp, tpe or random"
            )
        if self.stop is not None:
            raise ValueError(
                "stop looks at the score alone and would cut the Pareto front short; "
                "with two objectives set stop: null"
            )
        if self.pruner is not None:
            raise ValueError(
                f"pruner {self.pruner} compares scores alone; with two objectives set pruner: null"
            )
        return self

    @property
    def second(self) -> str | None:
        """The objective besides the score, of which less is better; None = there is none."""
        if self.objective == "score":
            return None
        return self.objective[1]

    @property
    def extra_trials(self) -> int:
        """Trials that a study gets with each extension of its range."""
        return self.edge_guard.trials or max(2, self.trials // 4)

    @property
    def by_curve(self) -> bool:
        """Whether the suite's own model of the curve proposes, which takes one objective alone."""
        return self.sampler == "gp" and self.second is None

    def most_trials(self, searched: LearningRateRange, choices: int) -> int:
        """Trials of a study with so many choices that is extended as often as it may be."""
        trials = searched.trials(self.trials, choices)
        # a fixed learning rate has no range to extend
        if not searched.fixed:
            # the end of the range is tried before the range grows beyond it
            trials += self.edge_guard.extensions * (1 + self.extra_trials)
        return trials

    @property
    def least_trials(self) -> int:
        """How many trials must have ended before the stop rule is asked."""
        # a model of the curve needs more points than those of the start
        least = self.startup_trials + 2
        if self.stop is not None and self.stop.min_trials is not None:
            least = max(least, self.stop.min_trials)
        return least


class ConfirmConfig(Strict):
    """Runs with the best learning rate; only these read test data."""

    # from 1 on, because a confirm run with the seed of the search would be no fresh draw
    seeds: Annotated[list[Annotated[int, Field(ge=1, le=MOST_SEED)]], Field(min_length=1)] = Field(
        [1, 2, 3, 4, 5],
        description="fresh seeds; the search uses 0, and one alone gives no rank and no p-value",
    )

    @model_validator(mode="after")
    def _distinct(self) -> ConfirmConfig:
        # two runs with one seed are equal, and would make the interval of a row too narrow
        if len(set(self.seeds)) < len(self.seeds):
            raise ValueError(f"seeds are not distinct: {self.seeds}")
        return self


class LimitConfig(Strict):
    """At most so many rows of each split, drawn by seed; null = all."""

    train: Count | None = None
    validation: Count | None = None
    test: Count | None = None


class ResourceConfig(Strict):
    """What one trial gets: by default a worker per GPU, or one CPU worker if there is no GPU.

    With `min_workers`, a trial goes on with fewer workers when the cluster has no more room for all
    of them. Its scores then agree in the first digits only, because sums are taken in another
    order. `provenance.world_sizes` of its result says what it ran on.
    """

    workers: Count | None = None
    workers_by_backbone: dict[str, Count] = Field(
        {}, description="other numbers of workers, by name of the backbone"
    )
    cpus_per_worker: PositiveAmount = 1.0
    gpus_per_worker: Amount | None = Field(
        None,
        description="null = 1 where there are GPUs; below 1, trials of one worker share a GPU: "
        "their times are those beside a neighbour, and their energy is null",
    )
    concurrent_trials: Count | None = Field(
        None, description="upper bound on trials at a time; null = what fits"
    )
    placement: Literal["pack", "strict-pack", "spread"] = Field(
        "pack",
        description="where a trial's workers run: on as few nodes as possible (pack), "
        "on one node (strict-pack), or on as many as there are (spread)",
    )
    interface: str | None = Field(
        None,
        description="network interface between a trial's nodes (gloo, NCCL, rendezvous); "
        "null = the one of the node's address in Ray",
    )
    min_workers: Count | None = Field(
        None,
        description="fewest workers that a trial may go on with when the cluster has shrunk; "
        "null = it waits for all of its workers",
    )
    room_wait_s: Seconds = Field(
        60.0, description="how long a trial waits for all of its workers, with min_workers"
    )
    frozen_states_gib: PositiveAmount = Field(
        16.0,
        description="most GiB of the home's cache for states that training.frozen_dropout: off "
        "keeps; those used longest ago go first",
    )

    @property
    def frozen_states_bytes(self) -> int:
        return int(self.frozen_states_gib * 2**30)

    @model_validator(mode="after")
    def _no_fewer_than_the_fewest(self) -> ResourceConfig:
        # with `workers` left open their number depends on the cluster
        if self.min_workers is None or self.workers is None:
            return self
        if self.min_workers > self.workers:
            raise ValueError(
                f"min_workers: got {self.min_workers}, expected at most workers ({self.workers})"
            )
        return self


class TimeoutConfig(Strict):
    """Deadlines in seconds; nothing waits for ever."""

    setup_s: Seconds = 900.0
    epoch_s: Seconds = 6 * 3600.0
    # a rank that dies leaves the others waiting inside a collective, which ends with this
    collective_s: Seconds = 600.0
    # how long a trial may wait for room on the cluster; a new node takes minutes to start
    placement_s: Seconds = 1800.0

    @property
    def patience_s(self) -> float:
        """For how long a storage that is away is asked again.

        Half of the shortest deadline: the rank that asks fails before another one waits too long.
        """
        return min(self.setup_s, self.epoch_s, self.collective_s) / 2


class FailureConfig(Strict):
    """What happens when a trial fails because of its machine, not because of its mathematics."""

    retries: WholeNumber = Field(
        3,
        description="further attempts before a trial is given up; "
        "an attempt that gets further than all before starts the count anew",
    )
    breaker: Annotated[int, Field(ge=2, le=MOST_COUNT)] | None = Field(
        3,
        description="pause the sweep when so many different trials in a row fail alike; "
        "null = never",
    )
    grace_s: Annotated[float, Field(ge=0, le=MOST_SECONDS)] = Field(
        30.0,
        description="seconds that running trials have to write a checkpoint when the sweep is "
        "stopped (Ctrl-C, SIGTERM, SIGHUP)",
    )


class SweepConfig(Strict):
    """One file `sweeps/<name>.yaml`."""

    name: Slug
    description: str = ""
    backbones: Annotated[list[Annotated[BackboneChoice, Named]], Field(min_length=1)]
    attention: Annotated[list[Annotated[AttentionChoice, Named]], Field(min_length=1)] = [
        AttentionChoice()
    ]
    methods: Annotated[list[Annotated[MethodChoice, Named]], Field(min_length=1)]
    tasks: Annotated[list[str], Field(min_length=1)]
    architectures: Literal["search", "first", "all"] = Field(
        "search",
        description="search = the best choice of the search space over all tasks; "
        "first = its first choice; all = a row per choice",
    )
    decoder_objective: Literal["head", "text"] = Field(
        "head", description="decoder-only backbones: classification head, or scoring of label words"
    )
    pretrain: PretrainConfig | None = Field(
        None, description="first pre-trains a model, for variants that have none"
    )
    search: SearchConfig = SearchConfig()
    confirm: ConfirmConfig = ConfirmConfig()
    limit: LimitConfig = LimitConfig()
    training: TrainingConfig = TrainingConfig()
    resources: ResourceConfig = ResourceConfig()
    timeouts: TimeoutConfig = TimeoutConfig()
    failures: FailureConfig = FailureConfig()
    tracking: TrackingConfig = TrackingConfig()
    lm_eval: LmEvalConfig | None = Field(
        None, description="evaluates the confirmed models with lm-eval, after the last trial"
    )
    reference: list[Reference] = Field(
        default=[], description="the numbers that a paper printed, by line of its table"
    )

    @property
    def threads_per_worker(self) -> int:
        """Threads of a worker: as many as it has processors, unless `training` says otherwise."""
        return self.training.threads_per_worker or max(1, int(self.resources.cpus_per_worker))

    @property
    def batch_sizes(self) -> list[int]:
        """The batch sizes that are searched; one where that is settled."""
        return self.search.batch_sizes or [self.training.batch_size]

    @model_validator(mode="before")
    @classmethod
    def _searched_batch_sizes(cls, given: Any) -> Any:
        """Take a list at `training.batch_size` as the batch sizes to search.

        The largest becomes the sweep's batch size, so that what fits is planned for it.
        """
        if not isinstance(given, Mapping) or not isinstance(given.get("training"), Mapping):
            return given
        sizes = given["training"].get("batch_size")
        if not isinstance(sizes, list):
            return given
        whole = all(type(size) is int and size > 0 for size in sizes)
        if not whole or len(sizes) < 2 or len(set(sizes)) < len(sizes):
            raise ValueError(
                f"training.batch_size: got {sizes}, expected one number, or a list of at least two "
                "different ones to search"
            )
        training = {**given["training"], "batch_size": max(sizes)}
        search = given.get("search")
        if isinstance(search, SearchConfig):
            search = search.model_dump()
        if search is None:
            search = {}
        # Pydantic says what is wrong with anything else.
        if not isinstance(search, Mapping):
            return given
        search = {**search, "batch_sizes": sorted(sizes)}
        return {**given, "training": training, "search": search}

    @model_validator(mode="after")
    def _batch_sizes_are_planned_for(self) -> SweepConfig:
        sizes = self.search.batch_sizes
        # what fits is planned for the largest
        if sizes and (len(set(sizes)) < 2 or max(sizes) != self.training.batch_size):
            raise ValueError(
                f"search.batch_sizes: got {sizes} beside training.batch_size "
                f"{self.training.batch_size}; write the list at training.batch_size alone"
            )
        return self

    @model_validator(mode="after")
    def _backbones_have_names_of_their_own(self) -> SweepConfig:
        # a backbone's name says in tables which rows are compared with one another
        names = [choice.name for choice in self.backbones]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(
                    f"backbones: {name!r} stands there {names.count(name)} times, and no table "
                    "could tell its rows apart; give each form of it a sweep of its own"
                )
        return self

    @model_validator(mode="after")
    def _backbones_with_workers_exist(self) -> SweepConfig:
        # a name that is mistyped would silently leave its backbone with the default
        names = [choice.name for choice in self.backbones]
        for name in self.resources.workers_by_backbone:
            if name not in names:
                raise ValueError(
                    f"resources.workers_by_backbone: {name!r} is no backbone of this sweep; "
                    f"it has {', '.join(names)}"
                )
        return self

    @model_validator(mode="after")
    def _pruner_can_prune(self) -> SweepConfig:
        # the pruner would never be asked, and the sweep would cost more than its author thinks
        if self.search.pruner is not None and self.training.epochs == 1:
            raise ValueError(
                f"search.pruner {self.search.pruner} ends trials between two epochs, but "
                "training.epochs is 1; set search.pruner: null, or train in more, shorter epochs "
                "(training.epoch_steps)"
            )
        return self
