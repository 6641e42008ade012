"""LoRA's starts that read training data: EVA, CorDA and LoRA-GA, computed by peft's own functions.

Source: EVA, arXiv 2410.07170; CorDA, arXiv 2406.05223; LoRA-GA, arXiv 2407.05000.
Deviations:
    - They read 256 examples (CorDA's number), in the order of the task's preparation seed, which is
      the same for all seeds of a trial. EVA goes over them again until its vectors settle.
    - Dropout is off, also for LoRA-GA's gradients, and the task head has fixed weights meanwhile.
    - EVA keeps every layer's rank (`rho: 1.0`): ranks that follow from the data would make the
      number of trained parameters, and with it the arm, follow from them.
    - CorDA and LoRA-GA change the frozen weights under the adapters, so that the model answers as
      before at its first step. An export holds these weights, in the suite's own format.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

import torch
from peft.tuners.lora import LoraLayer
from peft.tuners.lora.config import CordaConfig, EvaConfig, LoraGAConfig
from peft.tuners.lora.corda import preprocess_corda
from peft.tuners.lora.eva import get_eva_state_dict
from peft.tuners.lora.loraga import preprocess_loraga
from torch import Tensor, nn
from torch.nn.functional import pad

from suite.backbones.base import Family
from suite.data.collate import IGNORED
from suite.errors import DataError, IncompatibleError
from suite.petl._pruning import fixed_head
from suite.petl.base import Batch

ADAPTER = "default"
MOVES_BASE = frozenset({"corda", "lora_ga"})
"""Starts that take what they put into the adapters out of the frozen weights."""
OF_WEIGHTS = frozenset({"pissa", "olora"})
"""Starts that peft takes from a map's own weight."""
CONFIGS = {"eva": EvaConfig, "corda": CordaConfig, "lora_ga": LoraGAConfig}
"""The class of each start's own options, which stand in the option `<start>_config`."""
EXAMPLES = 256
ROWS = 32
"""Examples of a batch for EVA, whose decomposition needs more tokens than ranks, and LoRA-GA."""
EVA_PASSES = 20
"""EVA gives up after so many passes over the examples (ours); it settles in one or two."""
SEED = 0
"""LoRA-GA's decomposition draws; all trials of an arm share what it finds."""
Loss = Callable[[nn.Module, Batch], Tensor]


def prepare_start(
    start: str,
    options: Mapping[str, Any],
    model: Any,
    family: Family,
    rows: Iterable[Batch],
    loss: Loss,
) -> None:
    """Give the adapters of peft's model the start, which may change the weights under them.

    Args:
        start: A key of `CONFIGS`.
        options: Of the class in `CONFIGS`.
        model: With adapters as plain LoRA starts them.
        rows: Training examples, one a batch.

    Raises:
        DataError: There is no example.
        IncompatibleError: The start does not settle, or finds too few directions for the rank.
    """
    examples = list(islice(rows, EXAMPLES))
    if not examples:
        raise DataError(f"{start}: got no training example, expected at least one to start from")
    layers = {name: module for name, module in model.named_modules() if _is_adapted(module)}
    config = _config_of(model, layers, start, options)
    training = model.training
    model.eval()
    with torch.random.fork_rng(), fixed_head(model, family):
        torch.manual_seed(SEED)
        if start == "eva":
            _start_eva(model, layers, config, examples, family)
        elif start == "corda":
            _start_corda(model, layers, config, examples, family)
        else:
            _start_lora_ga(model, layers, config, examples, family, loss)
    model.train(training)


def check_rank(start: str, model: nn.Module) -> None:
    """Check that a start has as many directions as the adapters have ranks; shapes are enough.

    Raises:
        IncompatibleError: It has fewer.
    """
    for name, module in model.named_modules():
        if not _is_adapted(module):
            continue
        layer: Any = module
        directions = min(layer.in_features, layer.out_features)
        # EVA decomposes inputs, which no output narrows.
        if start == "eva":
            directions = layer.in_features
        needed = layer.r[ADAPTER]
        if start == "lora_ga":
            needed *= 2  # one half for A, the other for B
        if needed > directions:
            raise IncompatibleError(
                f"{start}: r {layer.r[ADAPTER]} needs {needed} directions, but there are only"
                f" {directions} at {name}; lower r"
            )


def _is_adapted(module: nn.Module) -> bool:
    return isinstance(module, LoraLayer) and ADAPTER in module.lora_A


def _config_of(
    model: Any, layers: Mapping[str, nn.Module], start: str, options: Mapping[str, Any]
) -> Any:
    """peft's configuration for its functions, which look for maps by name and not for adapters."""
    config = copy.copy(model.peft_config[ADAPTER])
    setattr(config, f"{start}_config", CONFIGS[start](**options))
    config.target_modules = {f"{name}.base_layer" for name in layers}
    return config


@torch.no_grad()
def _start_eva(
    model: Any,
    layers: Mapping[str, nn.Module],
    config: Any,
    examples: list[Batch],
    family: Family,
) -> None:
    batches = list(_joined(examples, family))
    left = EVA_PASSES * len(batches) + 1  # peft looks at the first batch once more

    def forward(model: nn.Module, batch: Batch) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise IncompatibleError(
                f"eva: its directions do not settle in {EVA_PASSES} passes over {len(examples)}"
                " examples; lower r or eva_config.tau"
            )
        model(**batch)

    def masks(batch: Batch, _config: Any) -> list[Tensor]:
        return _masks(batch, family, answers_alone=config.eva_config.use_label_mask)

    found = get_eva_state_dict(
        model,
        batches,
        peft_config=config,
        forward_fn=forward,
        prepare_model_inputs_fn=masks,
        prepare_layer_inputs_fn=_visible,
        gather_distributed_inputs=False,
        show_progress_bar=False,
    )
    for name, directions in found.items():
        layer: Any = layers[name]
        layer.lora_A[ADAPTER].weight.copy_(directions)


def _start_corda(
    model: Any,
    layers: Mapping[str, nn.Module],
    config: Any,
    examples: list[Batch],
    family: Family,
) -> None:
    def run() -> None:
        # One by one, because peft takes an input for one text.
        for example in examples:
            for text in _texts(example):
                model(**_cut(text, family))

    preprocess_corda(model, config, run)
    for module in layers.values():
        layer: Any = module
        layer.corda_init(ADAPTER, "corda")


def _start_lora_ga(
    model: Any,
    layers: Mapping[str, nn.Module],
    config: Any,
    examples: list[Batch],
    family: Family,
    loss: Loss,
) -> None:
    def run() -> None:
        model.eval()  # peft turns dropout on
        batches = list(_joined(examples, family))
        for batch in batches:
            # peft takes the mean over batches, of which the last may be smaller
            share = len(batch["input_ids"]) * len(batches) / len(examples)
            torch.autograd.backward(loss(model, batch) * share)

    preprocess_loraga(model, config, run)
    with torch.no_grad():
        for module in layers.values():
            layer: Any = module
            layer.lora_ga_init(ADAPTER, config.lora_ga_config)


def _masks(batch: Batch, family: Family, *, answers_alone: bool) -> list[Tensor]:
    """Which positions are no padding, for each length of sequence that layers see.

    Args:
        batch: As `_joined` makes it, so that no two lengths are the same.
        answers_alone: Whether a decoder's positions count only where the loss is.
    """
    mask = batch["attention_mask"].flatten(0, -2).bool()  # (B, T)
    labels = batch.get("labels")
    if labels is None or labels.ndim < 2:
        return [mask]
    labelled = labels != IGNORED
    if family.kind == "encoder-decoder":
        return [mask, labelled]
    if answers_alone:
        mask = mask & labelled
    return [mask]


def _visible(values: Any, masks: list[Tensor], _name: str) -> Tensor:
    """The inputs of a layer at positions that no mask hides, (N, d)."""
    if not isinstance(values, Tensor):
        values = values[0]
    for mask in masks:
        if mask.shape == values.shape[:-1]:
            visible: Tensor = values[mask]
            return visible
    # a layer over something else than positions
    flat: Tensor = values.flatten(0, -2)
    return flat


def _joined(rows: list[Batch], family: Family) -> Iterator[dict[str, Tensor]]:
    """Batches of several rows, each padded to the longest.

    An encoder-decoder's labels never have the length of its input.
    """
    for start in range(0, len(rows), ROWS):
        part = rows[start : start + ROWS]
        batch = {}
        for name in part[0]:
            tensors = [row[name] for row in part]
            longest = max(tensor.shape[-1] for tensor in tensors)
            fill = IGNORED if name == "labels" else 0
            if tensors[0].ndim > 1:
                tensors = [pad(each, (0, longest - each.shape[-1]), value=fill) for each in tensors]
            batch[name] = torch.cat(tensors)
        # a layer's input is told by its length: is it the encoder's or the decoder's?
        if family.kind == "encoder-decoder" and batch["labels"].shape == batch["input_ids"].shape:
            batch["labels"] = pad(batch["labels"], (0, 1), value=IGNORED)
        yield batch


def _texts(row: Batch) -> Iterator[Batch]:
    """A row of one text, or each choice of a row of (1, choices, T) by itself."""
    if row["input_ids"].ndim == 2:
        yield row
        return
    for choice in range(row["input_ids"].shape[1]):
        yield {name: tensor[:, [choice]] for name, tensor in row.items() if tensor.ndim > 2}


def _cut(row: Batch, family: Family) -> dict[str, Tensor]:
    """One row without its padding."""
    length = int(row["attention_mask"].sum(-1).max())
    found = {}
    for name, tensor in row.items():
        kept = length
        # an encoder-decoder's labels have a length of their own
        if name == "labels" and family.kind == "encoder-decoder":
            kept = int((tensor != IGNORED).sum(-1).max())
        if tensor.ndim > 1:
            tensor = tensor[..., :kept]
        found[name] = tensor
    return found
