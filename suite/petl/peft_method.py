"""Any method of the `peft` library by name: `peft:ia3`, `peft:vera`, `peft:ln-tuning`, ...

Source: https://github.com/huggingface/peft; the paper of each method stands in peft's
    documentation.
Deviations:
    - peft's own defaults hold, also for the modules it adapts (`target_modules`), as far as it
      knows the backbone.
    - The suite trains the task head itself, as for every method. peft is told to save the head
      (`modules_to_save`), so that no target, as `all-linear`, reaches into it; its copy of the head
      is taken out again.
    - Methods that lengthen the input (p-tuning, prompt-tuning) are refused on decoders. With a
      classification head peft 0.21 reads the last position, which is padding in a right-padded
      batch; in generation it drops `position_ids`, so that a written answer depends on how far its
      batch is padded. On encoders BERT's pooler reads the first prompt vector instead of [CLS].
      `prompt` has none of these faults.
    - Options of LoRA that need other adapters or a quantised backbone are refused: peft would train
      plain LoRA. Starts from data run before training, see `_lora_starts`.
    - KaSA trains without the paper's two penalties (arXiv 2412.06071, equations 9 to 11). peft
      leaves them to the training loop, so other `beta` and `gamma` are refused.
    - LoRA+ and LoRA-FA are peft's optimizers on the suite's AdamW, see `_lora_optimizers`.
    - The trained count is what peft reports; there is no formula of a paper behind it.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from functools import cache
from typing import Any, get_args, get_type_hints

import torch
from peft import (
    PEFT_TYPE_TO_CONFIG_MAPPING,
    KasaConfig,
    LoraConfig,
    PeftConfig,
    PeftModel,
    PeftType,
    TaskType,
    VeloraConfig,
    get_peft_model,
)
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import ModulesToSaveWrapper
from pydantic import ConfigDict
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from suite.backbones.base import Family
from suite.backbones.heads import has_own_forward
from suite.errors import ConfigError, IncompatibleError, UnknownNameError
from suite.petl._lora_optimizers import MOST_RATIO, freeze_a, loraplus_factors
from suite.petl._lora_starts import CONFIGS, MOVES_BASE, OF_WEIGHTS, check_rank, prepare_start
from suite.petl._peft_names import adaptable, check_names
from suite.petl._quiet import without_noise
from suite.petl.base import Architecture, Batch, Method, freeze, head_parameters, surplus

# fields of peft's configuration that the suite sets itself, or that say nothing about the method
OURS = frozenset(
    {
        "peft_type",
        "task_type",
        "inference_mode",
        "base_model_name_or_path",
        "modules_to_save",
        "auto_mapping",
        "revision",
        "peft_version",
    }
)
REQUIRED = frozenset({"num_virtual_tokens", "token_indices"})
"""Fields that are empty by default, which peft notices only in training."""
UNUSABLE = {
    "ADALORA": "its ranks are allocated by calls in a training loop of its own",
    "CARTRIDGE": "it starts from the cache of a long text",
    "CPT": "it needs labelled examples as token ids with their types",
    "LILY": "its router averages over the batch, so that an answer depends on the other rows",
    "MULTITASK_PROMPT_TUNING": "it needs task ids in every batch",
    "POLY": "it needs task ids in every batch",
    "XLORA": "it mixes LoRA adapters that have been trained before",
}
FORMS: dict[str, dict[str, Any]] = {
    "dora": {"use_dora": True},
    "rslora": {"use_rslora": True},
    "pissa": {"init_lora_weights": "pissa"},
    "olora": {"init_lora_weights": "olora"},
    "kasa": {"kasa_config": {}},
    # rho 1 keeps every rank
    "eva": {"init_lora_weights": "eva", "eva_config": {"rho": 1.0}},
    "corda": {"init_lora_weights": "corda", "corda_config": {}},
    "lora-ga": {"init_lora_weights": "lora_ga", "lora_ga_config": {}},
    # 16: the LoRA+ paper's recommendation, arXiv 2402.12354, section 5
    "lora-plus": {"loraplus_lr_ratio": 16.0},
    "lora-fa": {"lora_fa": True},
}
"""Forms of LoRA that have names of their own, with the options that make them."""
OPTIMIZERS = {"loraplus_lr_ratio": float, "lora_fa": bool}
"""Options of LoRA that peft keeps in its optimizers, and their types; without them plain AdamW."""
EXPECTED = {float: "a number with a point, as 16.0", bool: "true or false"}
FACTORS = frozenset(
    {"alpha", "d_initial", "lora_alpha", "psoft_alpha", "randlora_alpha", "scaling", "shadow_alpha"}
)
"""Options that multiply what a method adds to the backbone."""
REWRITES_BUFFERS = "it rewrites buffers while it trains, and a trial keeps parameters only"
UNUSABLE_OPTIONS = {
    "alora_invocation_tokens": "it acts after tokens that no task's inputs hold",
    "arrow_config": "it routes between LoRA adapters that have been trained before",
    "layer_replication": "it makes another backbone",
    "loftq_config": "it starts from what quantisation loses, and no backbone here is quantised",
    "megatron_config": "it needs Megatron's layers",
    "monteclora_config": REWRITES_BUFFERS,
    "runtime_config": "the suite says where everything is computed",
    "target_parameters": "it adapts mixtures of experts, which no family here has",
    "use_qalora": "it needs a quantised backbone, and is plain LoRA without one",
}
"""Options with which peft would train something else than they say, often plain LoRA."""
# These work on the rows of a real weight, of which the meta device knows nothing.
OF_ALL_ROWS = frozenset({"peft:adamss", "peft:deft", "peft:frod"})
REFUSALS = (ValueError, TypeError, KeyError, AttributeError, RuntimeError, ImportError)
"""What peft raises when a choice does not fit a backbone; it has no exception of its own."""


class PeftArchitecture(Architecture):
    """The fields of one of peft's configuration classes; they are checked against that class."""

    model_config = ConfigDict(extra="allow")


@cache
def peft_types() -> dict[str, str]:
    """The type in peft for each method's name here: `LN_TUNING` for `peft:ln-tuning`."""
    types = {}
    for kind in PEFT_TYPE_TO_CONFIG_MAPPING:
        name = kind.value.lower().replace("_", "-")
        types[f"peft:{name}"] = kind.value
    for form in FORMS:
        types[f"peft:{form}"] = "LORA"
    return types


@cache
def peft_method(name: str, *, where: str = "") -> type[Method[Any]]:
    """The method class of `peft:<type>`.

    Raises:
        UnknownNameError: peft has no such type; near names are offered.
        IncompatibleError: It needs more than a backbone and batches.
    """
    types = peft_types()
    if name not in types:
        raise UnknownNameError("method", name, types, where=where)
    if types[name] in UNUSABLE:
        prefix = f"{where}: " if where else ""
        raise IncompatibleError(f"{prefix}{name} does not fit a sweep: {UNUSABLE[types[name]]}")
    return _define(name, types[name])


def _define(method_name: str, kind: str) -> type[Method[Any]]:
    # PeftType is a str enum, so its members are found by their values
    config_class = PEFT_TYPE_TO_CONFIG_MAPPING[kind]  # type: ignore[index]
    why_projections = ""
    why_not_recomputed = ""
    if kind == "PREFIX_TUNING":
        why_projections = "its prefix is put into the cache as keys and values of their shape"
        why_not_recomputed = "transformers then drops the cache, which holds the prefix"

    class FromPeft(Method[PeftArchitecture]):
        name = method_name
        description = _description(method_name, kind)
        source = f"peft's documentation of {config_class.__name__}"
        Config = PeftArchitecture
        needs_projections = why_projections
        not_recomputed = why_not_recomputed

        @classmethod
        def configure(cls, architecture: Mapping[str, Any], *, where: str = "") -> Method[Any]:
            where = where or f"architecture of {method_name}"
            given = FORMS.get(method_name.removeprefix("peft:"), {}) | dict(architecture)
            complete = _complete_options(config_class, given, where=where)
            return cls(PeftArchitecture.model_validate(complete))

        @property
        def _start(self) -> str | None:
            """The start that reads training data, if it has one."""
            start = self.config.model_dump().get("init_lora_weights")
            if start in CONFIGS:
                return str(start)
            return None

        def attach(self, model: PreTrainedModel, family: Family) -> nn.Module:
            options = self.config.model_dump()
            own = {key: options.pop(key) for key in OPTIMIZERS if key in options}
            if self._start is not None:
                # as plain LoRA until `prepare`
                options |= {"init_lora_weights": True, f"{self._start}_config": None}
            wrapped = _attach(
                model,
                family,
                config_class,
                options,
                name=method_name,
                # A start that moves the base works on its rows, too, when it prepares.
                of_all_rows=method_name in OF_ALL_ROWS or self._start in MOVES_BASE,
            )
            start = str(options.get("init_lora_weights")).partition("_niter_")[0]
            if self._start is not None or start in OF_WEIGHTS:
                check_rank(self._start or start, wrapped)
            if own.get("lora_fa"):
                freeze_a(wrapped)
            return wrapped

        def extra_positions(self) -> int:
            return int(self.config.model_dump().get("num_virtual_tokens") or 0)

        @property
        def needs_preparation(self) -> bool:
            return self._start is not None

        def prepare(
            self,
            model: nn.Module,
            family: Family,
            batches: Iterable[Batch],
            loss: Callable[[nn.Module, Batch], torch.Tensor],
        ) -> None:
            start = self._start
            assert start is not None
            options = self.config.model_dump()[f"{start}_config"] or {}
            try:
                prepare_start(start, options, model, family, batches, loss)
            except REFUSALS as error:
                raise IncompatibleError(
                    f"{method_name}: peft cannot start it on this {family.name} backbone:"
                    f" {type(error).__name__}: {error}"
                ) from error

        def learning_rate_factors(self, model: nn.Module) -> Mapping[str, float]:
            ratio = self.config.model_dump().get("loraplus_lr_ratio")
            if ratio is None:
                return {}
            return loraplus_factors(model, float(ratio))

        def peft_config(self, model: nn.Module, family: Family) -> PeftConfig | None:
            assert isinstance(model, PeftModel)
            if self._start in MOVES_BASE:
                # peft would put the adapter on the checkpoint's own weights
                return None
            return copy.deepcopy(model.peft_config["default"])

        def expected_trainable(self, model: PreTrainedModel, family: Family) -> int:
            shapes = _meta_copy(model)  # the model itself must stay unmodified
            head = {id(p) for p in head_parameters(shapes, family)}
            trained = self.attach(shapes, family).parameters()
            return sum(p.numel() for p in trained if p.requires_grad and id(p) not in head)

    return FromPeft


def _description(name: str, kind: str) -> str:
    form = FORMS.get(name.removeprefix("peft:"))
    if form is None:
        return f"{kind} of the peft library"
    options = ", ".join(f"{key}={value}" for key, value in form.items())
    return f"{kind} of the peft library with {options}"


def _complete_options(
    config_class: type[PeftConfig], architecture: Mapping[str, Any], *, where: str
) -> dict[str, Any]:
    """The options as plain data: what was given, and peft's defaults for the rest.

    Raises:
        ConfigError: The configuration class does not have a key, or refuses a value.
    """
    fields = {field.name for field in dataclasses.fields(config_class)} - OURS
    own = _optimizer_options(config_class, architecture, where=where)
    architecture = {key: value for key, value in architecture.items() if key not in own}
    for key in architecture:
        if key not in fields:
            known = fields
            if config_class is LoraConfig:
                known = fields | set(OPTIMIZERS)
            raise UnknownNameError("key", key, known, where=where)
    _check_usable(config_class, architecture, where=where)
    config = _peft_config(config_class, dict(architecture), where=where)
    for key in REQUIRED & fields:
        if not getattr(config, key):
            raise ConfigError(f"{where}: key {key!r} is missing")
    options = {}
    for key in sorted(fields):
        value = _plain(getattr(config, key))
        # a group of options is an object of peft's; `_peft_config` makes it again
        if key in architecture and dataclasses.is_dataclass(value):
            value = {k: _plain(v) for k, v in vars(value).items()}
        # defaults may be such objects too, and peft makes them itself
        if _is_plain(value):
            options[key] = value
    # not where they are absent, as in every stored arm that has none
    return options | own


def _optimizer_options(
    config_class: type[PeftConfig], architecture: Mapping[str, Any], *, where: str
) -> dict[str, Any]:
    """The options of `OPTIMIZERS` among the given ones.

    Raises:
        ConfigError: A value is of another type or out of range, or LoRA-FA's fixed A would start
            from data.
    """
    own: dict[str, Any] = {}
    if config_class is not LoraConfig:
        return own
    for key, kind in OPTIMIZERS.items():
        if key in architecture:
            own[key] = architecture[key]
            if not isinstance(own[key], kind):
                raise ConfigError(f"{where}: {key}: got {own[key]!r}, expected {EXPECTED[kind]}")
    if not 1 <= own.get("loraplus_lr_ratio", 1) <= MOST_RATIO:
        raise ConfigError(
            f"{where}: loraplus_lr_ratio: got {own['loraplus_lr_ratio']}, expected 1 to"
            f" {MOST_RATIO}: how many times faster B learns than A"
        )
    if own.get("lora_fa") and architecture.get("init_lora_weights") in CONFIGS:
        raise ConfigError(
            f"{where}: lora_fa: true does not fit init_lora_weights:"
            f" {architecture['init_lora_weights']}: it corrects gradients by A as it is drawn;"
            " leave one of them out"
        )
    return own


def _check_usable(
    config_class: type[PeftConfig], architecture: Mapping[str, Any], *, where: str
) -> None:
    """Check that no option asks for what peft would not do here.

    Raises:
        ConfigError: One does. Where it has its default, as in a stored arm, it asks for nothing.
    """
    check_shadow(architecture, where=where)
    for key, value in architecture.items():
        if key in FACTORS and value == 0:
            raise ConfigError(
                f"{where}: {key}: got 0, which multiplies what the method adds, so that it would"
                " never train"
            )
        if key.endswith("dropout") and isinstance(value, (int, float)) and not 0 <= value < 1:
            raise ConfigError(f"{where}: {key}: got {value}, expected at least 0 and below 1")
        # Of AdaMSS.
        if key == "use_asa" and value:
            raise ConfigError(
                f"{where}: use_asa: {value} does not fit a sweep: its subspaces are chosen by calls"
                " in a training loop of its own"
            )
    if config_class is not LoraConfig:
        return
    default = LoraConfig()
    for key, value in architecture.items():
        reason = UNUSABLE_OPTIONS.get(key)
        if reason is not None and value != getattr(default, key):
            raise ConfigError(f"{where}: {key}: {value} does not fit a sweep: {reason}")
    _check_groups(architecture, where=where)
    _check_start_options(architecture, where=where)


def _check_groups(architecture: Mapping[str, Any], *, where: str) -> None:
    """Check two groups of options of LoRA, of which peft does not do all.

    Raises:
        ConfigError: VeLoRA would rewrite buffers, or KaSA's penalties are set.
    """
    velora = architecture.get("velora_config")
    # What is no mapping peft refuses by itself, as it does unknown keys.
    if isinstance(velora, Mapping):
        start = velora.get("init_type", VeloraConfig().init_type)
        if start != "random":
            raise ConfigError(
                f"{where}: velora_config.init_type: got {start!r}, expected 'random': otherwise"
                f" {REWRITES_BUFFERS}"
            )
    kasa = architecture.get("kasa_config")
    if isinstance(kasa, Mapping):
        default = KasaConfig()
        for key in ("beta", "gamma"):
            if kasa.get(key, getattr(default, key)) != getattr(default, key):
                raise ConfigError(
                    f"{where}: kasa_config.{key}: got {kasa[key]}, expected"
                    f" {getattr(default, key):g}, peft's default: it adds the penalty to no loss"
                )


def check_shadow(options: Mapping[str, Any], *, where: str) -> None:
    """Check that the network of `peft:shadow` is a new one.

    Raises:
        ConfigError: peft would read it from any folder or the hub, also from pickled weights.
    """
    shadow = options.get("shadow_model", "mirror")
    if shadow != "mirror":
        raise ConfigError(
            f"{where}: shadow_model: got {shadow!r}, expected mirror: a network of its own, and"
            " not the weights of another checkpoint"
        )


def _check_start_options(architecture: Mapping[str, Any], *, where: str) -> None:
    """Check the options of starts that read training data.

    Raises:
        ConfigError: An option is of another start, or asks for what `prepare` does not do.
    """
    start = architecture.get("init_lora_weights")
    for name in CONFIGS:
        key = f"{name}_config"
        options = architecture.get(key)
        if options is not None and start != name:
            raise ConfigError(
                f"{where}: {key}: {options} does not fit init_lora_weights: {start}: it is read"
                f" with init_lora_weights: {name} alone"
            )
    if start == "eva" and (architecture.get("eva_config") or {}).get("rho") != 1.0:
        raise ConfigError(
            f"{where}: init_lora_weights: eva: expected eva_config: {{rho: 1.0}}, because with a"
            " larger rho (peft's default is 2.0) data decide the ranks and so how much trains"
        )
    for key in ("cache_file", "covariance_file"):
        if (architecture.get("corda_config") or {}).get(key) is not None:
            raise ConfigError(
                f"{where}: corda_config.{key}: the home's cache keeps what is prepared; leave it"
                " out"
            )


def _peft_config(
    config_class: type[PeftConfig], options: dict[str, Any], *, where: str
) -> PeftConfig:
    groups = _groups(config_class)
    try:
        made = {}
        for key, value in options.items():
            # peft takes a mapping as it is and then ignores it
            if isinstance(value, Mapping) and key in groups:
                value = groups[key](**value)
            made[key] = value
        with without_noise():
            return config_class(**made)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{where}: peft's {config_class.__name__} refuses it: {error}") from error


def _groups(config_class: type[PeftConfig]) -> dict[str, type]:
    """The options that are groups of options, with the class of each."""
    found = {}
    for key, hint in get_type_hints(config_class).items():
        for kind in (hint, *get_args(hint)):
            if isinstance(kind, type) and dataclasses.is_dataclass(kind):
                found[key] = kind
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, set):
        return sorted(value)  # a set's order changes from run to run, and with it a trial's hash
    return value


def _is_plain(value: Any) -> bool:
    """Whether a trial's specification can hold the value: text, numbers, lists and mappings."""
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and _is_plain(item) for key, item in value.items())
    if isinstance(value, list):
        return all(_is_plain(item) for item in value)
    return value is None or isinstance(value, (bool, int, float, str))


def _attach(
    model: PreTrainedModel,
    family: Family,
    config_class: type[PeftConfig],
    options: dict[str, Any],
    *,
    name: str,
    of_all_rows: bool,
) -> nn.Module:
    config = _peft_config(config_class, options, where=name)
    _check_start(model, options, name=name)
    if config.peft_type == PeftType.SHADOW and has_own_forward(model):
        raise IncompatibleError(
            f"{name}: its network reads one text with one answer only; use another method"
        )
    if config.is_prompt_learning:
        _set_task(config, model, family, name=name)
        _set_shape(config, model, family)
    else:
        _keep_from_head(config, model, family)
    check_names(model, family, options, name=name)
    # first, so that only what peft adds or unfreezes trains
    freeze(model)
    try:
        wrapped = _wrap(model, config)
    except REFUSALS as error:
        raise IncompatibleError(
            f"{name}: peft cannot attach it to this {family.name} backbone:"
            f" {type(error).__name__}: {error}{_remedy(model, error, name=name)}"
        ) from error
    for place, module in list(wrapped.named_modules()):
        # peft's trained copy of the head; the suite trains the head itself
        if isinstance(module, ModulesToSaveWrapper):
            wrapped.set_submodule(place, module.original_module)
    _check_folded(wrapped, name=name, of_all_rows=of_all_rows)
    _check_butterfly(wrapped, options, name=name)
    if not any(parameter.requires_grad for parameter in wrapped.parameters()):
        raise IncompatibleError(
            f"{name}: nothing trains on this {family.name} backbone; it needs something peft does"
            " not get here"
        )
    return wrapped


def _keep_from_head(config: PeftConfig, model: PreTrainedModel, family: Family) -> None:
    """Let no target of peft's lie in the task head.

    `exclude_modules` would say it more plainly, but half of peft's methods lack it, as OSF.
    """
    known: Any = config
    known.modules_to_save = list(family.head_names(model)) or None


def _check_start(model: PreTrainedModel, options: Mapping[str, Any], *, name: str) -> None:
    # peft 0.21 takes a Conv1D's weight for a Linear's, and the layer then fails in training
    if options.get("init_lora_weights") != "olora":
        return
    if any(isinstance(module, Conv1D) for module in model.modules()):
        raise IncompatibleError(f"{name}: peft starts OLoRA from nn.Linear alone, not from Conv1D")


def _set_task(config: PeftConfig, model: PreTrainedModel, family: Family, *, name: str) -> None:
    """Tell peft what the model answers; its model class for a prompt or prefix depends on it.

    Raises:
        IncompatibleError: peft's class for this answer is wrong, or does not fit.
    """
    if has_own_forward(model):
        raise IncompatibleError(
            f"{name}: peft puts its vectors in front of one text with one answer only; use method"
            " prompt"
        )
    has_head = bool(family.head_names(model))
    # a prefix lengthens the cache and not the input, so the last position stays where it is
    if family.kind == "decoder" and name != "peft:prefix-tuning":
        fault = "in generation peft counts a batch's padding as positions"
        if has_head:
            fault = "with a classification head peft reads the wrong position"
        raise IncompatibleError(f"{name}: {fault} of {family.name}; use method prompt")
    if has_head:
        config.task_type = TaskType.SEQ_CLS
    elif family.kind == "encoder-decoder":
        config.task_type = TaskType.SEQ_2_SEQ_LM
    else:
        config.task_type = TaskType.CAUSAL_LM


def _set_shape(config: Any, model: PreTrainedModel, family: Family) -> None:
    """Tell peft how many layers a prefix is for, and how wide their keys and values are.

    peft takes the encoder's layers for the decoder's, and the backbone's width for that of its
    heads, which is another in T5 3B and 11B.
    """
    if config.peft_type != PeftType.PREFIX_TUNING:
        return
    if config.num_layers is None:
        config.num_layers = len(family.stacks(model)[-1].blocks)
    if config.token_dim is None:
        site = next(iter(family.attention_sites(model)))
        # of all query heads: peft itself takes the share of grouped keys and values
        config.token_dim = site.heads * site.head_dim


def _check_butterfly(wrapped: nn.Module, options: Mapping[str, Any], *, name: str) -> None:
    """Check that peft trains with as many butterfly factors as BOFT was given.

    Raises:
        IncompatibleError: It would train with one.
    """
    factors = options.get("boft_n_butterfly_factor", 1)
    if factors == 1 or all(getattr(m, "fbd_cuda_available", True) for m in wrapped.modules()):
        return
    raise IncompatibleError(
        f"{name}: boft_n_butterfly_factor: got {factors}, but peft would train with 1, because its"
        " CUDA extension does not build here; leave it at 1, or install nvcc, ninja and a PyTorch"
        " with CUDA"
    )


def _check_folded(wrapped: nn.Module, *, name: str, of_all_rows: bool) -> None:
    """Check that what peft puts beside a map fits what an attention variant makes of it.

    Attention variants with learned weights over heads have maps that return fewer features than
    their weight has rows, and MLA's key map returns more. Only shapes are checked, on the meta
    device, where every arm is built before it runs.

    Raises:
        IncompatibleError: A layer returns as many features as a folded weight has rows, or weights
            of it would never train.
    """
    for place, module in wrapped.named_modules():
        if not isinstance(module, BaseTunerLayer):
            continue
        layer: Any = module
        base = layer.get_base_layer()
        if not isinstance(base, nn.Linear) or not base.weight.is_meta:
            continue
        rows = base.weight.shape[0]
        if rows == base.out_features:
            continue
        if surplus(base):
            raise IncompatibleError(
                f"{name}: at {place} the attention variant drops {surplus(base)} of"
                f" {base.out_features} features, so that weights for them would never train; name"
                " the other maps in architecture.target_modules"
            )
        if of_all_rows or not _keeps_width(layer):
            raise IncompatibleError(
                f"{name}: at {place} it computes with a weight of {rows} rows, which are folded to"
                f" {base.out_features} features; use a method that leaves the weight alone"
                " (lora, peft:ia3), or attention gqa"
            )


def _keeps_width(layer: Any) -> bool:
    """Whether a peft layer returns as many features as the map inside of it.

    True where shapes alone do not tell.
    """
    base = layer.get_base_layer()
    try:
        width = layer(torch.empty(1, 1, base.in_features, device="meta")).shape[-1]
    except NotImplementedError:  # the meta device lacks an operation
        return True
    except REFUSALS:
        return False
    return bool(width == base.out_features)


def _remedy(model: PreTrainedModel, error: Exception, *, name: str) -> str:
    """What to type where peft does not know which modules of a backbone to adapt."""
    if "target_modules" not in str(error).lower().replace(" ", "_"):
        return ""
    return (
        f"; name them in the sweep: {{name: {name}, architecture: {{target_modules: [...]}}}},"
        f" with some of {', '.join(adaptable(model))}"
    )


def _wrap(model: PreTrainedModel, config: PeftConfig) -> PeftModel:
    """peft's model around `model`; on the meta device it is a copy of it."""
    with without_noise():
        return _wrapped(model, config)


def _wrapped(model: PreTrainedModel, config: PeftConfig) -> PeftModel:
    if next(model.parameters()).device.type != "meta":
        return get_peft_model(model, config)
    try:
        with torch.device("meta"):
            return get_peft_model(copy.deepcopy(model), copy.deepcopy(config))
    except (NotImplementedError, RuntimeError):
        # some methods compute with the weights (BOFT, FRoD, ...), so give them random ones
        filled = copy.deepcopy(model).to_empty(device="cpu")
        filled.tie_weights()
        for parameter in filled.parameters():
            nn.init.normal_(parameter)
        freeze(filled)
        wrapped = get_peft_model(filled, config).to("meta")
        # On their way to the meta device tied weights become two, and would be counted twice.
        wrapped.get_base_model().tie_weights()  # type: ignore[operator]
        return wrapped


def _meta_copy(model: PreTrainedModel) -> PreTrainedModel:
    """A copy of `model` on the meta device."""
    # deepcopy takes from its memo what it has copied already, so no weight is ever duplicated
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        shape = parameter.detach().to("meta")
        memo[id(parameter)] = nn.Parameter(shape, requires_grad=parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = buffer.to("meta")
    return copy.deepcopy(model, memo)
