"""From a backbone's name to its configuration, weights and tokenizer.

`resolve` reads configuration and tokenizer only and finds the user's mistakes; `build` makes the
model. Weights are read from safetensors files alone, and always as fp32. Code that comes with a
checkpoint runs only where the user names the checkpoint (see `suite.backbones.code`).

Token ids: the configuration and the tokenizer always agree on the padding id. A backbone without
one (GPT-2, Llama) pads with its end-of-sequence token, because classification takes the last token
that is not padding.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from difflib import get_close_matches
from functools import cache
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
from suite.backbones import all_families
from suite.backbones.base import Family
from suite.backbones.bpe import draft_bpe, parse_bpe
from suite.backbones.code import check_code, check_tokenizer_code, code_folder, own_config_class
from suite.backbones.depth import check_depth, shorten
from suite.backbones.heads import Head as Head
from suite.backbones.heads import auto_class, head_config, set_loss
from suite.backbones.presets import PRESETS, check_published
from suite.backbones.weights import mark_new_pooler
from suite.config.sweep import BackboneChoice
from suite.config.task import load_task
from suite.errors import BackboneError, ConfigError, HubUnreachableError, UnknownNameError

log = logging.getLogger(__name__)

Origin = Literal["hub", "folder", "package", "random"]
_TOKEN_KEYS = frozenset({"pad_token_id", "eos_token_id", "bos_token_id", "decoder_start_token_id"})
# only ModernBERT's configuration has them; nothing in its model asks for them
_PLACE_KEYS = frozenset({"cls_token_id", "sep_token_id"})
UNFIT = (ValueError, ArithmeticError, LookupError, AttributeError, TypeError)
"""What transformers raises of a configuration with a value that it cannot use."""
WITHOUT_HEAD = (
    "write the folder again without its head: "
    "AutoModel.from_pretrained(FOLDER).save_pretrained(OTHER)"
)
# keys of a configuration that the suite sets itself, from the tokenizer or the task
_RESERVED_KEYS = _TOKEN_KEYS | {
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
        choice: The backbone as a person wrote it.
        family: Its family.
        config: Its configuration; treat as read-only.
        origin: Where the weights come from.
        path: Hub id, or absolute folder; for random weights, where the configuration comes from.
        tokenizer: Folder of a tokenizer that was trained for it (`bpe:...`); None for any other
            tokenizer, or while it is not trained.
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
    """Find a backbone and check it.

    No weights are loaded. Presets, folders and packages need no network.

    Args:
        choice: Name and options as a person wrote them.
        where: File and key for messages.
        tokenizer: Folder of the tokenizer that `bpe:...` names, once it is trained
            (`suite.data.trained_tokenizer.open_backbone`).
        only_shape: Whether the caller only counts parameters; then a preset without published
            weights will do.

    Raises:
        UnknownNameError: The name, a key of `config`, or the task of `bpe:...` does not exist.
        ConfigError: A value of `config` is not valid.
        BackboneError: The files cannot be found, read or used.
    """
    prefix = f"{where}: " if where else ""
    named = f"{prefix}backbone {choice.name}: "
    if choice.config is None and not only_shape:
        check_published(choice.name, where=prefix)
    origin, path, raw = _locate(choice, prefix)
    family = _family_of(raw["model_type"], where=named)
    # with a changed configuration nothing of the checkpoint is read, so no code can run
    if choice.config is None:
        check_code(choice, raw, folder=None if origin == "hub" else Path(path), where=prefix)
        config = shorten(_config_of(choice, raw, origin, path, where=named), choice, where=prefix)
    else:
        config = _changed_config(raw, choice.config, where=f"{named}config")
        origin = "random"
    check_depth(config, where=named)
    if origin in ("folder", "package"):
        sources.weight_files(Path(path), where=prefix)
    resolved = ResolvedBackbone(choice, family, config, origin, path, tokenizer)
    _align_tokens(resolved, where=prefix)
    return resolved


def resolve_folder(
    choice: BackboneChoice, folder: Path, *, origin: Literal["folder", "random"]
) -> ResolvedBackbone:
    """Describe the backbone of a folder that somebody else may have made; read no weights.

    Args:
        choice: The backbone, trusted or not by whoever runs this, never by the folder.
        folder: Holds `config.json`.
        origin: Whether the weights lie there too, or the caller has them.

    Raises:
        BackboneError: The configuration cannot be read, or names code that nobody trusts.
    """
    raw = sources.read_config(folder)
    where = f"{folder}: "
    family = _family_of(raw["model_type"], where=where)
    # for random weights too, because code may also make a model without any
    check_code(choice, raw, folder=folder, where="")
    config = _config_of(choice, raw, "folder", str(folder), where=where)
    check_depth(config, where=where)
    return ResolvedBackbone(choice, family, config, origin, str(folder))


def build(
    resolved: ResolvedBackbone, head: Head, *, meta: bool = False, random_start: bool = False
) -> PreTrainedModel:
    """Make the model on the CPU in fp32, or without storage on the meta device.

    New weights (a task head, or everything for `origin` "random") draw from torch's global
    generator. A BERT pooler that the checkpoint lacks is marked `is_new` (`suite.backbones.bert`).
    On the meta device nobody looks at the checkpoint of a hub backbone; it is taken to be complete.

    Args:
        resolved: The backbone.
        head: What the model ends in.
        meta: Whether to make it on the meta device.
        random_start: Whether all weights are new, although the backbone has trained ones.

    Raises:
        IncompatibleError: The family has no such head.
        BackboneError: The weights cannot be read, do not fit the configuration or are not complete.
    """
    auto = auto_class(resolved.family, head)
    config = head_config(resolved.config, head)
    try:
        with _quiet():
            if meta or random_start or resolved.origin == "random":
                model = _new_model(resolved, auto, config, device="meta" if meta else "cpu")
            else:
                model = _load_model(resolved, auto, config)
    # transformers divides by sizes of the configuration, and looks up names of it.
    except (OSError, RuntimeError, SafetensorError, *UNFIT) as error:
        raise BackboneError(
            f"backbone {resolved.choice.name} cannot be built from {resolved.path}: {_said(error)}"
        ) from error
    # after loading, so that transformers sees a model of its own
    set_loss(model, head)
    _mark_new_pooler(resolved, model, meta=meta)
    _train_padding_row(model)
    return model


def check_weights(resolved: ResolvedBackbone, head: Head) -> None:
    """Check that the weights of a folder fit its configuration and the head; read no weights.

    What comes from the hub or a package was published whole, so it is left to `build`.

    Raises:
        BackboneError: A weight is absent, or has another shape; or a file is damaged.
    """
    if resolved.origin != "folder":
        return
    shapes = sources.weight_shapes(sources.weight_files(Path(resolved.path)))
    weights = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    config = head_config(resolved.config, head)
    with _quiet():
        empty = _new_model(resolved, auto_class(resolved.family, head), config, device="meta")
        _, report = type(empty).from_pretrained(
            None,
            config=config,
            state_dict=weights,
            device_map="meta",
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # as in `_load_model`
        )
    _check_complete(resolved, empty, report)
    # The others keep the language-model head that came with the weights.
    if head.kind not in ("text", "masked"):
        _say_old_head(resolved, empty, report)


def _say_old_head(
    resolved: ResolvedBackbone, model: PreTrainedModel, report: Mapping[str, Any]
) -> None:
    """Say where no weight of the task head is new: somebody has trained it."""
    names = [f"{name}." for name in resolved.family.head_names(model)]
    weights = {key for key in model.state_dict() if key.startswith(tuple(names))}
    if weights and weights.isdisjoint(report["missing_keys"]):
        _say_once(
            f"{resolved.path} brings a task head ({', '.join(sorted(weights))}): every run starts "
            f"from it; for a new head, {WITHOUT_HEAD}"
        )


def load_tokenizer(resolved: ResolvedBackbone, *, draft: bool = False) -> PreTrainedTokenizerBase:
    """Load the tokenizer, with the padding token that the configuration names.

    Args:
        resolved: The backbone.
        draft: Whether it only checks a plan; then a tokenizer of bytes stands in for one that is
            not trained yet or out of reach.

    Raises:
        BackboneError: It cannot be read, is not trained yet, or has more tokens than the backbone's
            vocabulary.
    """
    untrained = resolved.tokenizer is None and parse_bpe(resolved.choice.tokenizer) is not None
    if untrained and not draft:
        raise BackboneError(
            f"tokenizer {resolved.choice.tokenizer} is not trained; see"
            " suite.data.trained_tokenizer.open_backbone"
        )
    try:
        tokenizer = _read_tokenizer(resolved, where="")
    except HubUnreachableError as error:
        if not draft:
            raise
        # a plan can be checked without network; training still needs the real one
        _say_once(f"not checked: the tokenizer of {resolved.choice.name}, for {error}")
        return draft_bpe()
    _check_vocabulary(resolved, tokenizer, where="")
    if tokenizer.pad_token_id != resolved.config.pad_token_id:
        # GPT-2 and Llama bring none; _align_tokens took the end-of-sequence token
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(resolved.config.pad_token_id)
    return tokenizer


@cache
def _say_once(what: str) -> None:
    """Warn once, since a plan is checked in several passes."""
    log.warning("%s", what)


def identity(resolved: ResolvedBackbone) -> dict[str, str]:
    """Which weights and code were used exactly, for provenance.

    Returns:
        `origin` and `path`; for the hub, `revision` as asked for, and `commit` once the local cache
        has files of it; for folders and packages, `sha256` of the weights (kept in this process
        until a file's time or size changes); `own_code`, the commit of the checkpoint's own code,
        where that was run.
    """
    found = {"origin": resolved.origin, "path": resolved.path}
    if resolved.origin == "hub":
        found["revision"] = resolved.choice.revision
        with suppress(BackboneError):  # nothing was downloaded yet, so no commit is known
            folder = sources.hub_folder(
                resolved.path, resolved.choice.revision, sources.CONFIG_FILES, local_only=True
            )
            found["commit"] = folder.name
    elif resolved.origin != "random":
        found["sha256"] = sources.sha256_of(sources.weight_files(Path(resolved.path)))
    if resolved.choice.trust_remote_code:
        found["own_code"] = resolved.choice.revision
    return found


def _locate(choice: BackboneChoice, where: str) -> tuple[Origin, str, Mapping[str, Any]]:
    """Origin, path and configuration (as in `config.json`) of a name."""
    name = choice.name
    preset = PRESETS.get(name)
    if preset is not None:
        # a preset's own configuration is enough, unless a package's files are there to be read
        in_package = bool(preset.path) and not sources.is_hub_id(preset.path)
        name = preset.path or name
        if choice.config is not None or not in_package:
            return "hub", name, {"model_type": preset.model_type, **preset.config}
    folder = sources.local_folder(name, where=where)
    if folder is not None:
        origin: Origin = "package" if name.startswith("package:") else "folder"
        return origin, str(folder), sources.read_config(folder, where=where)
    if not sources.is_hub_id(name):
        raise UnknownNameError("backbone", name, PRESETS, where=where.removesuffix(": "))
    downloaded = sources.hub_folder(name, choice.revision, sources.CONFIG_FILES, where=where)
    return "hub", name, sources.read_config(downloaded, where=where)


def _family_of(model_type: str, *, where: str) -> Family:
    served = {}
    for family in all_families():
        served.update(dict.fromkeys(family.model_types, family))
    if model_type in served:
        return served[model_type]
    near = get_close_matches(model_type, served, n=1, cutoff=0)[0]
    raise BackboneError(
        f"{where}model type {model_type!r} belongs to no family; the nearest of"
        f" {', '.join(sorted(served))} is {near}, whose family {served[near].name} shows how to add"
        " one: a file of its own in a folder backbones/ of SUITE_PATH (see Adding in the"
        " documentation)"
    )


def _config_of(
    choice: BackboneChoice, raw: Mapping[str, Any], origin: Origin, path: str, *, where: str
) -> PreTrainedConfig:
    try:
        if not choice.trust_remote_code:
            return CONFIG_MAPPING[raw["model_type"]].from_dict(dict(raw))
        folder = code_folder(choice, origin, path)
        cls = own_config_class(raw, folder) or CONFIG_MAPPING[raw["model_type"]]
        config: PreTrainedConfig = cls.from_dict(dict(raw))
        config.name_or_path = str(folder)  # transformers looks for the checkpoint's code there
    except (StrictDataclassError, RecursionError, *UNFIT) as error:
        raise BackboneError(f"{where}its config.json is not valid: {_said(error)}") from error
    return config


def _said(error: Exception) -> str:
    """The words of an error; those of a KeyError are the key alone."""
    if isinstance(error, KeyError):
        return repr(error)
    return str(error)


def _changed_config(
    raw: Mapping[str, Any], changes: Mapping[str, Any], *, where: str
) -> PreTrainedConfig:
    """The configuration with the user's changes.

    Both spellings of a key (GPT-2: hidden_size, n_embd) mean the same.
    """
    cls = CONFIG_MAPPING[raw["model_type"]]
    own = {field.name for field in fields(cls)}
    known = (own | set(cls.attribute_map)) - _RESERVED_KEYS
    renamed = {}
    for key, value in changes.items():
        if key in _RESERVED_KEYS:
            raise ConfigError(
                f"{where}: {key} cannot be given; it follows from the tokenizer or the task"
            )
        if key not in known:
            raise UnknownNameError("key", key, known, where=where)
        renamed[cls.attribute_map.get(key, key)] = value
    # the preset's need not exist in the new vocabulary
    tokens = dict.fromkeys(_TOKEN_KEYS | (_PLACE_KEYS & own))
    try:
        config: PreTrainedConfig = cls.from_dict({**raw, **tokens, **renamed})
    except (StrictDataclassError, ValueError, TypeError) as error:
        raise ConfigError(f"{where}: {' '.join(str(error).split())}") from error
    heads = getattr(config, "num_attention_heads", None)
    shared = getattr(config, "num_key_value_heads", None)
    if heads and shared and heads % shared:
        raise ConfigError(
            f"{where}: {heads} attention heads do not split over {shared} key-value heads; give "
            "num_key_value_heads too, a divisor of num_attention_heads"
        )
    return config


def _tokenizer_name(choice: BackboneChoice) -> str | None:
    """The tokenizer that was asked for; None = the one that comes with the weights."""
    if not choice.tokenizer and choice.config is not None:
        return "bytes"  # a changed configuration has no weights that a tokenizer could come with
    return choice.tokenizer


def _align_tokens(resolved: ResolvedBackbone, *, where: str) -> None:
    """Set the configuration's token ids to the tokenizer's.

    The tokenizer of a hub checkpoint would need the network; there the ids in the configuration
    count.
    """
    config = resolved.config
    comes_with_weights = _tokenizer_name(resolved.choice) is None
    if not (comes_with_weights and resolved.origin == "hub"):
        tokenizer = _read_tokenizer(resolved, where=where)
        _check_vocabulary(resolved, tokenizer, where=where)
        if not comes_with_weights:
            config.eos_token_id = tokenizer.eos_token_id
            config.bos_token_id = tokenizer.bos_token_id
            config.pad_token_id = None  # of the old vocabulary
        if config.pad_token_id is None:
            config.pad_token_id = tokenizer.pad_token_id
    if config.pad_token_id is None:
        # some checkpoints (Llama 3 Instruct) name several; the first ends a text
        config.pad_token_id = next(iter(_eos_ids(config)), None)
    if config.pad_token_id is None:
        raise BackboneError(
            f"{where}backbone {resolved.choice.name} has neither a padding nor an end-of-sequence"
            " token; give a tokenizer"
        )
    if config.is_encoder_decoder:
        # T5 starts its answers with the padding token
        config.decoder_start_token_id = config.pad_token_id


def _eos_ids(config: PreTrainedConfig) -> list[int]:
    eos = config.eos_token_id
    if eos is None:
        return []
    return eos if isinstance(eos, list) else [eos]


def _read_tokenizer(resolved: ResolvedBackbone, *, where: str) -> PreTrainedTokenizerBase:
    name = _tokenizer_name(resolved.choice)
    if name == "bytes":
        return ByT5Tokenizer()
    bpe = parse_bpe(name, where=where)
    if bpe is not None and resolved.tokenizer is None:
        load_task(bpe.task, where=f"{where}tokenizer {name}")  # raises where there is no such task
        return draft_bpe()
    folder = resolved.tokenizer or _tokenizer_folder(resolved, name, where=where)
    # the user trusts the checkpoint's code, not that of another repository's tokenizer
    trust = resolved.choice.trust_remote_code and name is None
    if trust:
        check_tokenizer_code(folder, where=where)
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=trust
        )
    # Of a file that holds something else, each library raises what it stumbles on.
    except Exception as error:
        raise BackboneError(
            f"{where}the tokenizer in {folder} cannot be read: {error}; give another one"
            " (tokenizer: bytes)"
        ) from error
    # transformers 5 makes an empty tokenizer of a folder without a vocabulary
    has_vocabulary = any((folder / file).is_file() for file in sources.VOCABULARY_FILES)
    if not has_vocabulary and not isinstance(tokenizer, ByT5Tokenizer):
        raise BackboneError(
            f"{where}{folder} holds no tokenizer ({', '.join(sources.VOCABULARY_FILES)}); give one"
            " (tokenizer: bytes)"
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
    if folder is not None:
        return folder
    if not sources.is_hub_id(name):
        raise BackboneError(
            f"{where}tokenizer {name!r} is not bytes, a folder, package:NAME/FOLDER, bpe:SIZE:TASK"
            " or organisation/name"
        )
    # the choice's revision is the backbone's; another repository has its own
    return sources.hub_folder(name, "main", sources.TOKENIZER_FILES, where=where)


def _check_vocabulary(
    resolved: ResolvedBackbone, tokenizer: PreTrainedTokenizerBase, *, where: str
) -> None:
    # a draft of a bpe tokenizer is smaller than the one that it stands in for
    bpe = parse_bpe(_tokenizer_name(resolved.choice), where=where)
    tokens = len(tokenizer) if bpe is None else bpe.size
    if tokens > resolved.config.vocab_size:
        raise BackboneError(
            f"{where}backbone {resolved.choice.name}: vocab_size {resolved.config.vocab_size}, but"
            f" the tokenizer has {tokens} tokens; give a larger vocab_size or another tokenizer"
        )


def _new_model(
    resolved: ResolvedBackbone, auto: Any, config: PreTrainedConfig, *, device: str
) -> PreTrainedModel:
    # under torch.device("meta") every parameter is created without storage
    with torch.device(device):
        model: PreTrainedModel = auto.from_config(
            config,
            attn_implementation=resolved.family.implementation,
            dtype=torch.float32,
            trust_remote_code=resolved.choice.trust_remote_code,
        )
    return model


def _load_model(resolved: ResolvedBackbone, auto: Any, config: PreTrainedConfig) -> PreTrainedModel:
    model: PreTrainedModel
    model, report = auto.from_pretrained(
        str(weights_folder(resolved)),
        config=config,
        dtype=torch.float32,
        attn_implementation=resolved.family.implementation,
        use_safetensors=True,
        local_files_only=True,
        trust_remote_code=resolved.choice.trust_remote_code,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # _check_complete refuses them, and names them
    )
    _check_complete(resolved, model, report)
    return model


def _check_complete(
    resolved: ResolvedBackbone, model: PreTrainedModel, report: Mapping[str, Any]
) -> None:
    """Check that every weight comes from the checkpoint, in its shape.

    Only the task head and BERT's pooler may be new.
    """
    may_be_new = [*resolved.family.head_names(model), *_pooler_name(model)]
    prefixes = tuple(f"{name}." for name in may_be_new)
    lacking = sorted(key for key in report["missing_keys"] if not key.startswith(prefixes))
    if lacking:
        raise BackboneError(
            f"{resolved.path} lacks {len(lacking)} weights of backbone {resolved.choice.name}:"
            f" {', '.join(lacking[:5])}"
        )
    for key, got, expected in sorted(report["mismatched_keys"]):
        found = f"{resolved.path}: {key} has shape {tuple(got)}, but"
        if key.startswith(prefixes):
            raise BackboneError(
                f"{found} the head of this task needs {tuple(expected)}; {WITHOUT_HEAD}"
            )
        raise BackboneError(f"{found} the configuration expects {tuple(expected)}")


def weights_folder(resolved: ResolvedBackbone) -> Path:
    """The folder of the weights on this machine, downloaded first if necessary.

    Raises:
        BackboneError: The hub cannot be reached, or there are no safetensors files of its own.
    """
    if resolved.origin != "hub":
        folder = Path(resolved.path)
        sources.weight_files(folder)
        return folder
    folder = sources.hub_folder(resolved.path, resolved.choice.revision, sources.WEIGHT_FILES)
    if resolved.choice.trust_remote_code:
        code_folder(resolved.choice, resolved.origin, resolved.path)
    sources.weight_files(folder, where=f"{resolved.path}: ")
    return folder


def _pooler_name(model: PreTrainedModel) -> list[str]:
    pooler = getattr(model.base_model, "pooler", None)
    return [name for name, module in model.named_modules() if module is pooler]


def _mark_new_pooler(resolved: ResolvedBackbone, model: PreTrainedModel, *, meta: bool) -> None:
    if not _pooler_name(model) or resolved.origin == "random":
        return
    if meta and resolved.origin == "hub":  # looking would download the checkpoint
        return
    shapes = sources.weight_shapes(sources.weight_files(weights_folder(resolved)))
    mark_new_pooler(model, set(shapes))


def _train_padding_row(model: PreTrainedModel) -> None:
    """Let the embedding of padding learn where padding is also the end-of-sequence token.

    torch gives the row `padding_idx` of an embedding no gradient.
    """
    embedding = model.get_input_embeddings()
    if isinstance(embedding, nn.Embedding) and embedding.padding_idx in _eos_ids(model.config):
        embedding.padding_idx = None


def _is_error(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR


@contextmanager
def _quiet() -> Iterator[None]:
    """Show no progress bars, and no warning that a new head is new; errors still show."""
    logger = logging.getLogger("transformers.modeling_utils")
    bars = hf_logging.is_progress_bar_enabled()
    # a filter, because a raised level makes transformers warn of something else
    logger.addFilter(_is_error)
    hf_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        logger.removeFilter(_is_error)
        if bars:
            hf_logging.enable_progress_bar()  # type: ignore[no-untyped-call]
