"""`suite analyze`: a model's attention, layer by layer, and where learned head weights went."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from suite.cli import complete
from suite.cli.options import (
    AttentionOption,
    BackboneOption,
    DataRootOption,
    Format,
    FormatOption,
    SetOption,
)
from suite.cli.render import Column, brief, column, put, render, stdout_for_result
from suite.errors import ConfigError

if TYPE_CHECKING:
    from suite.attention.weights import WeightChange
    from suite.backbones.base import Family
    from suite.backbones.loading import ResolvedBackbone
    from suite.config.arm import Arm
    from suite.config.task import TaskConfig
    from suite.config.training import TrainingConfig
    from suite.data.objective import Batch, Objective
    from suite.data.prepare import Prepared
    from suite.metrics.attention_maps import MapStatistics

# The maps of all layers and heads of a batch are in memory at once: few rows are enough.
BATCH_ROWS = 4
# New weights, as of a head that the checkpoint lacks, are drawn with it.
SEED = 0
GROUPS = ("backbone", "attention", "training")
MAP_KEYS = (
    "site",
    "layer",
    "padded_next",
    "valid_next",
    "centred_next",
    "variance",
    "downstream_sum",
    "downstream_mean",
)
WEIGHT_KEYS = (
    "site",
    "layer",
    "projection",
    "start",
    "mean_difference",
    "mean_abs_difference",
    "t",
    "p_value",
)


def attention(
    backbone: BackboneOption,
    task: Annotated[
        str,
        typer.Option(
            "--task",
            metavar="T",
            autocompletion=complete.tasks,
            help="The task whose validation inputs are read (suite list tasks).",
        ),
    ],
    variant: AttentionOption = "pretrained",
    rows: Annotated[int, typer.Option(min=1, help="Number of inputs to read.")] = 64,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Where to write. (default: analysis/BACKBONE-VARIANT-TASK)"
        ),
    ] = None,
    data_root: DataRootOption = None,
    overrides: SetOption = None,
    fmt: FormatOption = Format.TABLE,
) -> None:
    """Show how alike the layers' self-attention probabilities are, and how much they vary.

    The command writes numbers (parquet, JSON) and figures (PNG). The table shows each layer's
    similarity to the next one by three measures: zero-padded and averaged over data (the Shared
    Attention paper's), on each input's valid pairs, and there less uniform attention. --set takes
    backbone.config.*, attention.options.* and training.max_length.
    """
    folder = out or Path("analysis") / f"{Path(backbone).name}-{variant}-{task}"
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"--out {folder}: got a file, expected a folder")
    with stdout_for_result():
        found, facts = measure(
            backbone, task, variant, rows=rows, data_root=data_root, overrides=overrides or ()
        )
        write_analysis(found, facts, folder)
    # On stderr, so that a pipe gets the table alone.
    put(f"written to {folder}", err=True)
    table: list[dict[str, Any]] = []
    for site, statistics in found.items():
        table += layer_rows(site, statistics)
    render(table, _columns(MAP_KEYS, names=2), fmt, keys=MAP_KEYS)


def weights(
    trial: Annotated[
        Path,
        typer.Option(
            "--trial",
            metavar="DIR",
            help="A finished trial of the confirm phase: HOME/trials/HASH.",
        ),
    ],
    fmt: FormatOption = Format.TABLE,
) -> None:
    """Show how far the learned head weights of a WGQA trial moved from their start.

    The one-sample test asks whether the mean of a map moved. The weights of a map are not
    independent draws, so the test describes and proves nothing.
    """
    changes = [asdict(change) for change in trained_changes(trial)]
    # A table has no room for a list per row; JSON and CSV have it.
    keys = (*WEIGHT_KEYS, "mean_abs_difference_by_head")
    render(changes, _columns(WEIGHT_KEYS, names=3), fmt, keys=keys)


def _columns(keys: Sequence[str], *, names: int) -> list[Column]:
    """Columns of a table whose first ones are names and whose others are numbers."""
    columns = [column(key) for key in keys[:names]]
    for key in keys[names:]:
        columns.append(column(key, key.replace("_", " "), brief))
    return columns


def measure(
    backbone: str,
    task: str,
    variant: str,
    *,
    rows: int,
    data_root: Path | None,
    overrides: Sequence[str],
) -> tuple[dict[str, MapStatistics], dict[str, Any]]:
    """Statistics of every site, and what they were taken from.

    Raises:
        ConfigError: The choices cannot be used, or the variant has no attention probabilities.
        DataError: The data cannot be read.
    """
    # Imported here: torch takes seconds, and `--help` must not wait for it.
    import tempfile

    import torch

    from suite.backbones.loading import identity
    from suite.config.sweep import LimitConfig
    from suite.data.prepare import prepare
    from suite.data.trained_tokenizer import open_backbone
    from suite.petl.arm import build_arm

    arm, config, training = _chosen(backbone, task, variant, overrides)
    # A few rows are tokenized in a moment: no home has to keep them.
    with tempfile.TemporaryDirectory() as cache:
        resolved = open_backbone(
            arm.backbone, data_root=data_root, cache=Path(cache), where="--backbone"
        )
        objective = _objective(resolved, config, training)
        torch.manual_seed(SEED)
        model, _ = build_arm(resolved, objective.head, arm)
        data = prepare(
            config,
            objective,
            # The training rows are not used: the limit keeps their preparation short.
            limit=LimitConfig(train=rows, validation=rows),
            data_root=data_root,
            cache=Path(cache),
        )
        # Dropout would make every run show other maps.
        found = observed(model.eval(), resolved.family, batches(data, objective))
    return found, {
        "backbone": identity(resolved),
        "arm": arm.model_dump(mode="json", include={"backbone", "attention"}),
        "task": task,
        "split": "validation",
        "data_hash": data.data_hash,
        "data_revision": data.revision,
        "max_length_tokens": training.max_length,
        "seed": SEED,
    }


def _chosen(
    backbone: str, task: str, variant: str, overrides: Sequence[str]
) -> tuple[Arm, TaskConfig, TrainingConfig]:
    from suite.config.loader import validate
    from suite.config.task import load_task
    from suite.config.training import TrainingConfig
    from suite.train.arms import make_arm, read_overrides

    given = read_overrides({}, overrides, method="full", groups=GROUPS)
    training = validate(TrainingConfig, given.pop("training", {}), where="--set training")
    # `full` adds nothing to the model: what is seen is the attention alone.
    return make_arm(backbone, "full", variant, given), load_task(task, where="--task"), training


def _objective(resolved: ResolvedBackbone, task: TaskConfig, training: TrainingConfig) -> Objective:
    from suite.backbones.loading import load_tokenizer
    from suite.data.make_objective import make_objective

    kind = resolved.family.kind
    tokenizer = load_tokenizer(resolved)
    return make_objective(
        # A decoder reads the whole input either way; a head saves it from writing an answer.
        task,
        kind=kind,
        tokenizer=tokenizer,
        training=training,
        decoder_objective="head",
    )


def batches(data: Prepared, objective: Objective) -> Iterator[Batch]:
    """The validation inputs in order."""
    split = data.split("validation", confirm=False)
    for start in range(0, len(split), BATCH_ROWS):
        end = min(start + BATCH_ROWS, len(split))
        yield objective.collate([split[index] for index in range(start, end)])


def observed(model: Any, family: Family, inputs: Iterable[Batch]) -> dict[str, MapStatistics]:
    """Run a model over inputs and summarise the self-attention of each of its stacks."""
    import torch

    from suite.attention.maps import reach, self_attentions, watched
    from suite.data.collate import IGNORED
    from suite.metrics.attention_maps import AttentionMaps

    sites = self_attentions(model, family)
    taken = {}
    for name, of_stack in sites.items():
        # Only a decoder's maps are triangular; uniform attention there has fewer positions.
        taken[name] = AttentionMaps(
            causal=of_stack[0].role == "decoder", reach=[reach(site) for site in of_stack]
        )
    with torch.no_grad(), watched(sites) as seen:
        for batch in inputs:
            model(**batch)
            for name, maps in seen.items():
                # The mask of a multiple-choice task is (rows, choices, T).
                valid = batch["attention_mask"].flatten(0, -2) != 0  # (B, T)
                # The decoder of an encoder-decoder reads the target, not the input.
                if family.kind == "encoder-decoder" and name == "decoder-self":
                    valid = batch["labels"] != IGNORED
                taken[name].add(maps, valid)
                # One batch at a time: the maps of all inputs would fill the memory.
                maps.clear()
    return {name: maps.statistics() for name, maps in taken.items()}


def trained_changes(path: Path) -> list[WeightChange]:
    """The head weights of a trial's best epoch against those it started with.

    Raises:
        ConfigError: The folder is no finished trial's, it kept no weights, or none of them are
            head weights.
    """
    from suite.attention.weights import weight_changes
    from suite.record.folder import Home, TrialFolder
    from suite.train.restore import restore

    # `start_of` keeps the head weights as they were before training, to compare with.
    # The parent of `/` is itself, while `parents` has none of it.
    home = Home(path.resolve().parent.parent)
    trained = restore(TrialFolder(path), home, start_of="head_weight")
    changes = weight_changes(trained.model, trained.resolved.family, trained.start)  # type: ignore[arg-type]  # families look inside wrappers
    if not changes:
        raise ConfigError(
            f"--trial {path}: attention {trained.spec.arm.attention.name} learns no head weights; "
            "expected one of the WGQA family"
        )
    return changes


def layer_rows(site: str, statistics: MapStatistics) -> Iterator[dict[str, Any]]:
    """One row for each layer: its likeness to the next one (head mean), and its variance."""
    depth = len(statistics.variance)
    for layer in range(depth):
        row: dict[str, Any] = {"site": site, "layer": layer}
        for name, matrix in statistics.head_mean.items():
            # The last layer has no next one.
            is_last = layer + 1 == depth
            row[f"{name}_next"] = None if is_last else float(matrix[layer, layer + 1])
        # The mean over heads; variance.parquet has each of them.
        row["variance"] = float(statistics.variance[layer].mean())
        row["downstream_sum"] = float(statistics.downstream_sum[layer])
        row["downstream_mean"] = float(statistics.downstream_mean[layer])
        yield row


def similarity_rows(site: str, statistics: MapStatistics) -> Iterator[dict[str, Any]]:
    """One row for each measure, head (null = maps averaged over heads first) and pair of layers."""
    for name, by_head in statistics.by_head.items():
        for head, matrix in (*enumerate(by_head), (None, statistics.head_mean[name])):
            for first, line in enumerate(matrix.tolist()):
                for second, cosine in enumerate(line):
                    yield {
                        "site": site,
                        "measure": name,
                        "head": head,
                        "layer": first,
                        "other": second,
                        "cosine": cosine,
                    }


def variance_rows(site: str, statistics: MapStatistics) -> Iterator[dict[str, Any]]:
    """One row for each layer and head."""
    for layer, heads in enumerate(statistics.variance.tolist()):
        for head, value in enumerate(heads):
            yield {"site": site, "layer": layer, "head": head, "variance": value}


def write_analysis(found: dict[str, MapStatistics], facts: dict[str, Any], folder: Path) -> None:
    """Write `similarity.parquet`, `variance.parquet`, `analysis.json` and each site's figures."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from suite.cli.figures import heads_figure, similarity_figure, variance_figure

    folder.mkdir(parents=True, exist_ok=True)
    similarity: list[dict[str, Any]] = []
    variance: list[dict[str, Any]] = []
    sites = {}
    for site, statistics in found.items():
        similarity += similarity_rows(site, statistics)
        variance += variance_rows(site, statistics)
        layers = list(layer_rows(site, statistics))
        sites[site] = {"inputs": statistics.inputs, "layers": layers}
    pq.write_table(pa.Table.from_pylist(similarity), folder / "similarity.parquet")
    pq.write_table(pa.Table.from_pylist(variance), folder / "variance.parquet")
    # NaN is no JSON; other programs could not read the file.
    text = json.dumps({**facts, "sites": sites}, indent=1, allow_nan=False)
    (folder / "analysis.json").write_text(text + "\n", encoding="utf-8")
    arm = facts["arm"]
    for site, statistics in found.items():
        title = (
            f"{arm['backbone']['name']}, {arm['attention']['name']}, {site}: "
            f"{statistics.inputs} inputs of {facts['task']}"
        )
        similarity_figure(statistics, folder / f"similarity-{site}.png", title=title)
        heads_figure(statistics, folder / f"similarity-heads-{site}.png", title=title)
        variance_figure(statistics, folder / f"variance-{site}.png", title=title)
