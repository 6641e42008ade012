"""From a backbone's name to its configuration, weights and tokenizer.

`resolve` reads configuration and tokenizer only and finds the user's mistakes; `build` makes the model. Weights are
read from safetensors alone, always as fp32; code that comes with a checkpoint runs only where it was named for that (`code.py`).

Token ids: the padding id of the configuration and of the tokenizer always agree. A backbone without one (GPT-2, Llama)
pads with its end-of-sequence token, as classification takes the last token that is not padding.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

import torch
import transformers.utils.logging as hf_logging
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import nn
from transformers import (
    AutoTokenizer,
    ByT5Tokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from suite.backbones import _sources as sources
from suite.backbones import families
from suite.backbones.base import Family
from suite.backbones.bpe import draft_bpe, parse_bpe
from suite.backbones.code import check_code, code_folder, own_config
from suite.backbones.depth import shorten
from suite.backbones.heads import Head as Head
from suite.backbones.heads import auto_class, head_config, set_loss
from suite.backbones.presets import PRESETS, check_published
from suite.config.sweep import BackboneChoice
from suite.config.task import load_task
from suite.errors import BackboneError, ConfigError, HubUnreachableError, UnknownNameError

log = logging.getLogger(__name__)

Origin = Literal["hub", "folder", "package", "random"]
_TOKEN_KEYS = frozenset({"pad_token_id", "eos_token_id", "bos_token_id", "decoder_start_token_id"})
_OWN_KEYS = _TOKEN_KEYS | {
    "architectures",
    "dtype",
    "id2label",
    "label2id",
    "problem_type",
    "transformers_version",
    "is_encoder_decoder",
}


@dataclass(frozen=True, slots=True)
class ResolvedBackbone:
    """A backbone whose name, configuration and tokenizer have been checked.

    Attributes:
        choice: What was asked for.
        family: Its family.
        config: Its configuration; treat as read-only.
        origin: Where the weights come from.
        path: Hub id, or absolute folder; for random weights what the configuration was taken from.
        tokenizer: Folder of a tokenizer that was trained for it (`bpe:...`); None for any other, or while it is not trained.
    """

    choice: BackboneChoice
    family: Family
    config: PreTrainedConfig
    origin: Origin
    path: str
    tokenizer: Path | None = None


def resolve(
    choice: BackboneChoice,
    *,
    where: str = "",
    tokenizer: Path | None = None,
    only_shape: bool = False,
) -> ResolvedBackbone:
    """Find a backbone and check it; loads no weights, and needs no network for presets, folders and packages.

    Args:
        choice: Name and options as a person wrote them.
        where: File and key for messages.
        tokenizer: Folder of the tokenizer that `bpe:...` names, once it is trained (`suite.data.trained_tokenizer.open_backbone`).
        only_shape: Whether it is only to be counted: then a preset without published weights is as good as any.

    Raises:
        UnknownNameError: The name, a key of `config`, or the task of `bpe:...` does not exist.
        ConfigError: A value of `config` is not valid.
        BackboneError: The files cannot be found, read or used.
    """
    prefix = f"{where}: " if where else ""
    if choice.config is None and not only_shape:
        check_published(choice.name, where=prefix)
    origin, path, raw = _locate(choice, prefix)
    family = _family_of(raw["model_type"], where=f"{prefix}backbone {choice.name}: ")
    if choice.config is None:
        check_code(choice, raw, folder=None if origin == "hub" else Path(path), where=prefix)
    if choice.config is not None:
        origin, config = (
            "random",
            _changed_config(raw, choice.config, where=f"{prefix}backbone {choice.name}: config"),
        )
    else:
        config = shorten(
            _config_of(choice, raw, origin, path, where=f"{prefix}backbone {choice.name}: "),
            choice,
            where=prefix,
        )
    if origin in ("folder", "package"):
        sources.weight_files(Path(path), where=prefix)
    resolved = ResolvedBackbone(choice, family, config, origin, path, tokenizer)
    _align_tokens(resolved, where=prefix)
    return resolved


def build(
    resolved: ResolvedBackbone, head: Head, *, meta: bool = False, random_start: bool = False
) -> PreTrainedModel:
    """The model on the CPU in fp32, or without storage on the meta device.

    New weights (a task head, or everything for `origin` "random") draw from torch's global generator.
    BERT: a pooler that the checkpoint lacks is marked `is_new` (see `suite.backbones.bert`); on the meta device the
    checkpoint of a hub backbone is not looked at and is taken to be complete.

    Args:
        random_start: New weights everywhere, although the backbone has others.

    Raises:
        IncompatibleError: The family has no such head.
        BackboneError: The weights cannot be read, do not fit the configuration or are not complete.
    """
    auto, config = auto_class(resolved.family, head), head_config(resolved.config, head)
    try:
        with _quiet():
            if meta or random_start or resolved.origin == "random":
                model = _new_model(
                    auto,
                    config,
                    device="meta" if meta else "cpu",
                    trust=resolved.choice.trust_remote_code,
                )
            else:
                model = _load_model(resolved, auto, config)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise BackboneError(
            f"backbone {resolved.choice.name} cannot be built from {resolved.path}: {error}"
        ) from error
    set_loss(model, head)
    _mark_new_pooler(resolved, model, meta=meta)
    _train_padding_row(model)
    return model


def load_tokenizer(resolved: ResolvedBackbone, *, draft: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer, with the padding token that the configuration names.

    Args:
        draft: To check a plan: one of bytes may stand in for a tokenizer that is not trained yet, or out of reach.

    Raises:
        BackboneError: It cannot be read, is not trained yet, or has more tokens than the backbone's vocabulary.
    """
    if (
        not draft
        and resolved.tokenizer is None
        and parse_bpe(resolved.choice.tokenizer) is not None
    ):
        raise BackboneError(
            f"tokenizer {resolved.choice.tokenizer} is not trained; see suite.data.trained_tokenizer.open_backbone"
        )
    try:
        tokenizer = _read_tokenizer(resolved, where="")
    except HubUnreachableError as error:
        if not draft:
            raise
        log.warning("not checked: the tokenizer of %s, for %s", resolved.choice.name, error)
        return draft_bpe()
    _check_vocabulary(resolved, tokenizer, where="")
    if tokenizer.pad_token_id != resolved.config.pad_token_id:
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(resolved.config.pad_token_id)
    return tokenizer


def identity(resolved: ResolvedBackbone) -> dict[str, str]:
    """What exactly was used, for provenance: `origin`, `path`, and, for the hub, `revision` as asked for and `commit` once
    files of it are in the local cache; for folders and packages `sha256` of the weights (cached here by files' time and size);
    `own_code`, the commit of the code that it brings, where that was run.
    """
    found = {"origin": resolved.origin, "path": resolved.path}
    if resolved.origin == "hub":
        found["revision"] = resolved.choice.revision
        with suppress(BackboneError):  # nothing was downloaded yet, so no commit is known
            found["commit"] = sources.hub_folder(
                resolved.path, resolved.choice.revision, sources.CONFIG_FILES, local_only=True
            ).name
    elif resolved.origin != "random":
        found["sha256"] = sources.sha256_of(sources.weight_files(Path(resolved.path)))
    return found | (
        {"own_code": resolved.choice.revision} if resolved.choice.trust_remote_code else {}
    )


def _locate(choice: BackboneChoice, where: str) -> tuple[Origin, str, Mapping[str, Any]]:
    """Origin, path and configuration (as in `config.json`) of a name."""
    preset = PRESETS.get(choice.name)
    name = (preset.path if preset else "") or choice.name
    if preset is not None and (
        choice.config is not None or not preset.path or sources.is_hub_id(name)
    ):
        return "hub", name, {"model_type": preset.model_type, **preset.config}
    folder = sources.local_folder(name, where=where)
    if folder is not None:
        origin: Origin = "package" if name.startswith("package:") else "folder"
        return origin, str(folder), sources.read_config(folder, where=where)
    if not sources.is_hub_id(name):
        raise UnknownNameError("backbone", name, PRESETS, where=where.removesuffix(": "))
    return (
        "hub",
        name,
        sources.read_config(
            sources.hub_folder(name, choice.revision, sources.CONFIG_FILES, where=where),
            where=where,
        ),
    )


def _family_of(model_type: str, *, where: str) -> Family:
    served = {}
    for name in families.names():
        family = families.get(name)()
        served[name] = ", ".join(family.model_types)
        if model_type in family.model_types:
            return family
    known = "; ".join(f"{name} ({types})" for name, types in served.items())
    raise BackboneError(
        f"{where}model type {model_type!r} belongs to no family; families (model types): {known}"
    )


def _config_of(
    choice: BackboneChoice, raw: Mapping[str, Any], origin: Origin, path: str, *, where: str
) -> PreTrainedConfig:
    try:
        if not choice.trust_remote_code:
            return CONFIG_MAPPING[raw["model_type"]].from_dict(dict(raw))
        folder = code_folder(choice, origin, path)
        config: PreTrainedConfig = (
            own_config(raw, folder) or CONFIG_MAPPING[raw["model_type"]]
        ).from_dict(dict(raw))
        config._name_or_path = str(folder)  # where transformers looks for the code
    except (StrictDataclassError, ValueError, TypeError, KeyError) as error:
        raise BackboneError(f"{where}its config.json is not valid: {error}") from error
    return config


def _changed_config(
    raw: Mapping[str, Any], changes: Mapping[str, Any], *, where: str
) -> PreTrainedConfig:
    """The configuration with the user's changes; both spellings of a key (GPT-2: hidden_size, n_embd) mean the same."""
    cls = CONFIG_MAPPING[raw["model_type"]]
    known = ({field.name for field in fields(cls)} | set(cls.attribute_map)) - _OWN_KEYS
    for key in changes:
        if key in _OWN_KEYS:
            raise ConfigError(
                f"{where}: {key} cannot be given; it follows from the tokenizer or the task"
            )
        if key not in known:
            raise UnknownNameError("key", key, known, where=where)
    renamed = {cls.attribute_map.get(key, key): value for key, value in changes.items()}
    tokens = dict.fromkeys(_TOKEN_KEYS)  # the preset's need not exist in the new vocabulary
    try:
        config: PreTrainedConfig = cls.from_dict({**raw, **tokens, **renamed})
    except (StrictDataclassError, ValueError, TypeError) as error:
        raise ConfigError(f"{where}: {' '.join(str(error).split())}") from error
    return config


def _tokenizer_name(choice: BackboneChoice) -> str | None:
    """The tokenizer asked for; None = the one that comes with the weights."""
    return choice.tokenizer or (None if choice.config is None else "bytes")


def _align_tokens(resolved: ResolvedBackbone, *, where: str) -> None:
    """Set the configuration's token ids, from the tokenizer unless it is the hub's own (which would need the network)."""
    config, own = resolved.config, _tokenizer_name(resolved.choice) is None
    if not (own and resolved.origin == "hub"):
        tokenizer = _read_tokenizer(resolved, where=where)
        _check_vocabulary(resolved, tokenizer, where=where)
        if not own:
            config.eos_token_id, config.bos_token_id, config.pad_token_id = (
                tokenizer.eos_token_id,
                tokenizer.bos_token_id,
                None,
            )
        if config.pad_token_id is None:
            config.pad_token_id = tokenizer.pad_token_id
    if config.pad_token_id is None:
        config.pad_token_id = next(iter(_eos_ids(config)), None)
    if config.pad_token_id is None:
        raise BackboneError(
            f"{where}backbone {resolved.choice.name} has neither a padding nor an end-of-sequence token; give a tokenizer"
        )
    if config.is_encoder_decoder:
        config.decoder_start_token_id = (
            config.pad_token_id
        )  # T5 starts its answers with the padding token


def _eos_ids(config: PreTrainedConfig) -> list[int]:
    eos = config.eos_token_id
    return eos if isinstance(eos, list) else [] if eos is None else [eos]


def _read_tokenizer(resolved: ResolvedBackbone, *, where: str) -> PreTrainedTokenizerBase:
    name = _tokenizer_name(resolved.choice)
    if name == "bytes":
        return ByT5Tokenizer()
    if (bpe := parse_bpe(name, where=where)) is not None and resolved.tokenizer is None:
        load_task(bpe.task, where=f"{where}tokenizer {name}")
        return draft_bpe()
    folder = resolved.tokenizer or _tokenizer_folder(resolved, name, where=where)
    trust = resolved.choice.trust_remote_code and name is None
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=trust
        )
    except (OSError, ValueError, ImportError, KeyError) as error:
        raise BackboneError(
            f"{where}the tokenizer in {folder} cannot be read: {error}; give another one (tokenizer: bytes)"
        ) from error
    if not isinstance(tokenizer, ByT5Tokenizer) and not any(
        (folder / name).is_file() for name in sources.VOCABULARY_FILES
    ):
        # transformers 5 makes an empty tokenizer of a folder that holds none
        raise BackboneError(
            f"{where}{folder} holds no tokenizer ({', '.join(sources.VOCABULARY_FILES)}); give one (tokenizer: bytes)"
        )
    return tokenizer


def _tokenizer_folder(resolved: ResolvedBackbone, name: str | None, *, where: str) -> Path:
    if name is None and resolved.origin != "hub":
        return Path(resolved.path)
    if name is None:
        return sources.hub_folder(
            resolved.path, resolved.choice.revision, sources.TOKENIZER_FILES, where=where
        )
    folder = sources.local_folder(name, where=where)
    if folder is None and not sources.is_hub_id(name):
        raise BackboneError(
            f"{where}tokenizer {name!r} is not bytes, a folder, package:NAME/FOLDER, bpe:SIZE:TASK or organisation/name"
        )
    return folder or sources.hub_folder(name, "main", sources.TOKENIZER_FILES, where=where)


def _check_vocabulary(
    resolved: ResolvedBackbone, tokenizer: PreTrainedTokenizerBase, *, where: str
) -> None:
    bpe = parse_bpe(_tokenizer_name(resolved.choice), where=where)
    tokens = len(tokenizer) if bpe is None else bpe.size
    if tokens > resolved.config.vocab_size:
        got = f"vocab_size {resolved.config.vocab_size}, but the tokenizer has {tokens} tokens"
        raise BackboneError(
            f"{where}backbone {resolved.choice.name}: {got}; give a larger vocab_size or another tokenizer"
        )


def _new_model(auto: Any, config: PreTrainedConfig, *, device: str, trust: bool) -> PreTrainedModel:
    with torch.device(device):
        model: PreTrainedModel = auto.from_config(
            config, attn_implementation="sdpa", dtype=torch.float32, trust_remote_code=trust
        )
    return model


def _load_model(resolved: ResolvedBackbone, auto: Any, config: PreTrainedConfig) -> PreTrainedModel:
    model: PreTrainedModel
    model, report = auto.from_pretrained(
        str(weights_folder(resolved)),
        config=config,
        dtype=torch.float32,
        attn_implementation="sdpa",
        use_safetensors=True,
        local_files_only=True,
        trust_remote_code=resolved.choice.trust_remote_code,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # checked below, with names
    )
    _check_complete(resolved, model, report)
    return model


def _check_complete(
    resolved: ResolvedBackbone, model: PreTrainedModel, report: Mapping[str, Any]
) -> None:
    """Every weight must come from the checkpoint in its shape, but the task head and BERT's pooler may be new."""
    new = (*resolved.family.head_names(model), *_pooler_name(model))
    lacking = sorted(
        key
        for key in report["missing_keys"]
        if not key.startswith(tuple(f"{name}." for name in new))
    )
    if lacking:
        raise BackboneError(
            f"{resolved.path} lacks {len(lacking)} weights of backbone {resolved.choice.name}: {', '.join(lacking[:5])}"
        )
    for key, got, expected in sorted(report["mismatched_keys"]):
        raise BackboneError(
            f"{resolved.path}: {key} has shape {tuple(got)}, but the configuration (or the task's head) expects {tuple(expected)}"
        )


def weights_folder(resolved: ResolvedBackbone) -> Path:
    """Where the weights lie on this machine, downloaded first where they have to be."""
    if resolved.origin != "hub":
        return Path(resolved.path)
    folder = sources.hub_folder(resolved.path, resolved.choice.revision, sources.WEIGHT_FILES)
    if resolved.choice.trust_remote_code:
        code_folder(resolved.choice, resolved.origin, resolved.path)
    sources.weight_files(folder, where=f"{resolved.path}: ")
    return folder


def _pooler_name(model: PreTrainedModel) -> list[str]:
    pooler = getattr(model.base_model, "pooler", None)
    return [name for name, module in model.named_modules() if module is pooler]


def _mark_new_pooler(resolved: ResolvedBackbone, model: PreTrainedModel, *, meta: bool) -> None:
    if (
        not _pooler_name(model)
        or resolved.origin == "random"
        or (meta and resolved.origin == "hub")
    ):
        return
    names = sources.weight_names(sources.weight_files(weights_folder(resolved)))
    pooler: Any = model.base_model.pooler
    pooler.is_new = not any("pooler." in name for name in names)


def _train_padding_row(model: PreTrainedModel) -> None:
    """Where padding is also the end-of-sequence token, its embedding must learn like any other (torch skips `padding_idx`)."""
    embedding = model.get_input_embeddings()
    if isinstance(embedding, nn.Embedding) and embedding.padding_idx in _eos_ids(model.config):
        embedding.padding_idx = None


def _is_error(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR


@contextmanager
def _quiet() -> Iterator[None]:
    """No progress bars, and no warning that a new head is new; errors still show."""
    logger, bars = (
        logging.getLogger("transformers.modeling_utils"),
        hf_logging.is_progress_bar_enabled(),
    )
    logger.addFilter(
        _is_error
    )  # a filter, as a raised level makes transformers warn of something else
    hf_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        logger.removeFilter(_is_error)
        if bars:
            hf_logging.enable_progress_bar()  # type: ignore[no-untyped-call]
