"""Time and cache of every attention variant beside plain multi-head attention, in one run.

    python benchmarks/attention.py [--size small] [--families bert llama] [--variants gqa shared] [--rounds 5]
    python benchmarks/attention.py --device cuda --dtype bf16 --size t5-base     # or llama
    python benchmarks/attention.py --size long --prompt 4096 --dtype bf16 --variants gqa:kv_heads=4 shared:anchor=previous,span=2-7

Per family and variant, on random weights: a training step (forward and backward of a batch) and
decoding token by token with a cache, as ratios to the same backbone unconverted. Rounds alternate between the two models, so
that a noisy machine slows both: the ratio is the median of the rounds' own ratios, with the middle half of them behind it.
The row `pretrained` compares the backbone with itself: it shows the noise.

Variants that fold are folded before they decode, as they would be served. "by formula" is what the cache holds over the bytes per
token that `suite params` counts, times tokens: 1 where they agree. FLOPs are counted operation by operation on one
forward pass, in the attention sublayers only, as are their weights. Where a variant is slower than the limit, the table says
which operations took longer by the profiler's count (GPU time on a GPU; a decode is all its tokens).
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import yaml
from torch import Tensor
from torch.autograd import DeviceType
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from suite.attention import variants
from suite.attention._cache import cache_bytes
from suite.attention.base import Variant
from suite.attention.counts import AttentionCount, Dtype, count_attention
from suite.backbones.base import Family
from suite.backbones.fit import variant_refusal
from suite.backbones.loading import Head, ResolvedBackbone, build, resolve
from suite.config.sweep import AttentionChoice, BackboneChoice

LIMIT = 1.1
"""What takes longer than this many times multi-head attention's time must say why."""
PROFILED = 5
"""Runs under the profiler, of which it reports the median."""
DTYPES: dict[Dtype, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
VOCABULARY = 384
"""Small, so that the attention is not hidden behind an output map."""
PRESETS = {"t5": "t5-small", "bert": "bert-base", "gpt2": "gpt2", "llama": "llama2-7b"}


@dataclass(frozen=True, slots=True)
class Shape:
    """A stack of blocks; `families` are those that the size is meant for."""

    width: int
    layers: int
    heads: int
    inner: int
    batch: int
    families: tuple[str, ...] = tuple(PRESETS)


SIZES = {
    "tiny": Shape(64, 2, 4, 128, 1),
    "small": Shape(256, 4, 8, 1024, 2),
    "long": Shape(1024, 8, 16, 2752, 4, ("llama",)),
    "t5-base": Shape(768, 12, 12, 3072, 8, ("t5",)),
    "llama": Shape(4096, 8, 32, 11008, 2, ("llama",)),
}
"""`llama` is Llama 2 7B's width with 8 of its 32 layers: two models and their gradients fit on one board."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What all measurements of a run have in common."""

    shape: Shape
    device: torch.device
    dtype: Dtype
    sequence: int
    prompt: int
    decoded: int
    rounds: int


@dataclass(frozen=True, slots=True)
class Spread:
    """Ratios of the rounds: median, lower and upper quartile."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f}-{self.high:.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--size", choices=SIZES, default="small", help="shape of the backbones (default: small)"
    )
    parser.add_argument(
        "--families", nargs="+", choices=PRESETS, help="default: all that the size is meant for"
    )
    parser.add_argument(
        "--variants",
        nargs="+",
        metavar="V",
        help="NAME, or NAME:KEY=VALUE,... with options; default: all (suite list attention)",
    )
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--dtype", choices=DTYPES, default="fp32")
    parser.add_argument(
        "--sequence",
        type=int,
        default=512,
        help="tokens per row of a training step",
    )
    parser.add_argument(
        "--prompt",
        type=int,
        help="tokens of a row before the first one is decoded (default: half of --sequence)",
    )
    parser.add_argument("--decoded", type=int, default=16, help="tokens decoded per round")
    parser.add_argument("--batch", type=int, help="rows (default: the size's)")
    parser.add_argument(
        "--rounds", type=int, choices=range(2, 100), default=7, metavar="N", help="at least 2"
    )
    options = parser.parse_args()
    shape = SIZES[options.size]
    if options.batch is not None:
        shape = replace(shape, batch=options.batch)
    setting = Setting(
        shape,
        torch.device(options.device),
        options.dtype,
        options.sequence,
        options.prompt or options.sequence // 2,
        options.decoded,
        options.rounds,
    )
    print(
        f"{options.size}: d {shape.width}, {shape.layers} layers, {shape.heads} heads; batch {shape.batch} x {setting.sequence} tokens, decoding after {setting.prompt}"
    )
    print(
        f"{device_name(setting.device)}, {options.dtype}, torch {torch.__version__}; median (middle half) of {setting.rounds} rounds\n"
    )
    print(
        "| family | variant | fwd + bwd | decode | ms per token | cache bytes | of MHA's | by formula | FLOPs | parameters | why slower |"
    )
    print("| --- | --- | --: | --: | --: | --: | --: | --: | --: | --: | --- |")
    for family in options.families or shape.families:
        for row in compare(family, options.variants or variants.names(), setting):
            print(row.line(), flush=True)


@dataclass(frozen=True, slots=True)
class Decoded:
    """Decoding with a variant.

    Attributes:
        seconds: Per token, as a ratio to plain attention's.
        token_ms: Median milliseconds of one token for all rows.
        cache_bytes: Measured, after the prompt and one token.
        of_plain: `cache_bytes` over plain attention's.
        of_formula: `cache_bytes` over what is counted without running the model.
    """

    seconds: Spread
    token_ms: float
    cache_bytes: int
    of_plain: float
    of_formula: float


@dataclass(frozen=True, slots=True)
class Row:
    """One variant on one family; encoders do not decode."""

    family: str
    variant: str
    step: Spread
    flops_frac: float
    parameters_frac: float
    reason: str
    decoded: Decoded | None = None

    def line(self) -> str:
        decoded = ["-"] * 5
        if self.decoded is not None:
            d = self.decoded
            decoded = [str(d.seconds), f"{d.token_ms:.1f}", f"{d.cache_bytes:,}"]
            decoded += [f"{d.of_plain:.3f}", f"{d.of_formula:.3f}"]
        numbers = [str(self.step), *decoded]
        numbers += [f"{self.flops_frac:.3f}", f"{self.parameters_frac:.3f}"]
        return f"| {' | '.join([self.family, self.variant, *numbers, self.reason])} |"


def compare(family: str, names: list[str], setting: Setting) -> Iterator[Row]:
    """Every variant that works on a family, the unconverted backbone first."""
    resolved = resolve(choice(family, setting))
    plain = make(resolved, "pretrained", setting)
    for name in sorted(names, key=lambda name: name != "pretrained"):
        variant = variants.get(name.partition(":")[0])
        if variant_refusal(variant, resolved.family) is None:
            yield measure(plain, make(resolved, name, setting), setting)


@dataclass(frozen=True, slots=True)
class Arm:
    """A backbone, what converted it, under which name, and what its attention is counted to have."""

    name: str
    model: Any
    family: Family
    variant: Variant[Any]
    counted: AttentionCount


def choice(family: str, setting: Setting) -> BackboneChoice:
    """A backbone of the setting's shape with random weights, without dropout; Llama with as many key as query heads."""
    shape = setting.shape
    config: dict[str, Any] = {"vocab_size": VOCABULARY}
    names = {
        "t5": ("d_model", "d_ff", "num_layers", "num_heads", "dropout_rate"),
        "bert": (
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "hidden_dropout_prob",
        ),
        "gpt2": ("n_embd", "n_inner", "n_layer", "n_head", "resid_pdrop"),
        "llama": (
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "attention_dropout",
        ),
    }
    config |= dict(
        zip(names[family], (shape.width, shape.inner, shape.layers, shape.heads, 0.0), strict=True)
    )
    longest = max(setting.sequence, setting.prompt + setting.decoded)
    own: dict[str, dict[str, Any]] = {
        "t5": {"d_kv": shape.width // shape.heads, "num_decoder_layers": shape.layers},
        "bert": {"max_position_embeddings": longest, "attention_probs_dropout_prob": 0.0},
        "gpt2": {"n_positions": longest, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
        "llama": {"max_position_embeddings": longest, "num_key_value_heads": shape.heads},
    }
    return BackboneChoice(name=PRESETS[family], config=config | own[family], tokenizer="bytes")


def make(resolved: ResolvedBackbone, name: str, setting: Setting) -> Arm:
    """A backbone with random weights, converted by a variant: `NAME`, or `NAME:KEY=VALUE,...`."""
    torch.manual_seed(0)
    model: Any = build(resolved, head_of(resolved.family))
    bare, _, given = name.partition(":")
    options = dict(item.split("=", 1) for item in given.split(",") if item)
    choice = AttentionChoice(name=bare, options={k: yaml.safe_load(v) for k, v in options.items()})
    variant = variants.get(choice.name).configure(choice.options)
    variant.convert(model, resolved.family)
    counted = count_attention(resolved, head_of(resolved.family), choice, dtype=setting.dtype)
    model = model.to(setting.device, DTYPES[setting.dtype])
    return Arm(name, model, resolved.family, variant, counted)


def head_of(family: Family) -> Head:
    return Head("classification", 2) if family.kind == "encoder" else Head("text")


def measure(plain: Arm, arm: Arm, setting: Setting) -> Row:
    """Training first; then the variant is folded, as it would be served, and decodes."""
    names = attention_names(plain)
    flops_frac = attention_flops(arm, names, setting) / attention_flops(plain, names, setting)
    step, reason = timed(
        plain, arm, setting, what="fwd + bwd", run=lambda a: train_step(a, setting)
    )
    weights = [a.counted.with_output_projection for a in (arm, plain)]
    row = Row(arm.family.name, arm.name, step, flops_frac, weights[0] / weights[1], reason)
    if arm.family.kind == "encoder":
        return row
    arm.variant.fold(arm.model, arm.family)
    of = {id(a): Decoding(a, setting) for a in (plain, arm)}
    seconds: list[float] = []

    def decode(a: Arm) -> float:
        took = of[id(a)].run()
        if a is arm:
            seconds.append(took)
        return took

    ratio, reason = timed(plain, arm, setting, what="decode", run=decode)
    cached = of[id(arm)].cached_bytes()
    decoded = Decoded(
        ratio,
        1000 * statistics.median(seconds[1 : setting.rounds + 1]),
        cached,
        cached / of[id(plain)].cached_bytes(),
        cached / of[id(arm)].counted_bytes(),
    )
    return replace(row, decoded=decoded, reason="; ".join(filter(None, (row.reason, reason))))


def timed(
    plain: Arm, arm: Arm, setting: Setting, *, what: str, run: Callable[[Arm], float]
) -> tuple[Spread, str]:
    """The ratio of seconds, and where it is above the limit which operations took longer."""
    ratio = alternate(plain, arm, setting, run)
    slower = slower_operations(plain, arm, run) if ratio.median > LIMIT else ""
    return ratio, slower and f"{what}: {slower}"


# ---- what is timed ----------------------------------------------------------------------------------------------------


def tokens(setting: Setting, length: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(10, VOCABULARY, (setting.shape.batch, length), generator=generator).to(
        setting.device
    )


def batch_of(arm: Arm, setting: Setting) -> dict[str, Tensor]:
    ids = tokens(setting, setting.sequence)
    return {"input_ids": ids, "labels": ids[:, 0] % 2 if arm.family.kind == "encoder" else ids}


def train_step(arm: Arm, setting: Setting) -> float:
    """Seconds of forward and backward."""
    arm.model.train()
    batch = batch_of(arm, setting)
    arm.model.zero_grad(set_to_none=True)
    with Stopwatch(setting.device) as watch:
        arm.model(
            **batch, **({} if arm.family.kind == "encoder" else {"use_cache": False})
        ).loss.backward()
    arm.model.zero_grad(set_to_none=True)
    return watch.seconds


class Decoding:
    """A prompt (T5: a source of the whole sequence and one decoder token), then one token after another, as often as wanted."""

    def __init__(self, arm: Arm, setting: Setting) -> None:
        self.arm, self.setting = arm, setting
        arm.model.eval()
        with torch.no_grad():
            self.prompted, self.fixed = self._prompt()

    def run(self) -> float:
        """Seconds per decoded token, from the prompt on."""
        steps = tokens(self.setting, self.setting.decoded)
        cache = copy.deepcopy(self.prompted)
        with torch.no_grad(), Stopwatch(self.setting.device) as watch:
            for t in range(self.setting.decoded):
                self._step(steps[:, t : t + 1], cache)
        return watch.seconds / self.setting.decoded

    def cached_bytes(self) -> int:
        """What the cache holds after the prompt and one token."""
        cache = copy.deepcopy(self.prompted)
        with torch.no_grad():
            self._step(tokens(self.setting, 1), cache)
        return cache_bytes(cache)

    def counted_bytes(self) -> int:
        """The same without a run: bytes per token by tokens, and rows."""
        counted = self.arm.counted
        is_decoder = self.arm.family.kind == "decoder"
        kept = 1 + (self.setting.prompt if is_decoder else 1)
        if counted.kv_tokens is not None:
            kept = min(kept, counted.kv_tokens)
        found = (counted.kv_bytes_per_token or 0) * kept
        found += (counted.cross_kv_bytes_per_token or 0) * self.setting.sequence
        return found * self.setting.shape.batch

    def _prompt(self) -> tuple[Any, dict[str, Any]]:
        """The cache after the prompt, and what every step is given."""
        model, setting = self.arm.model, self.setting
        if self.arm.family.kind == "decoder":
            ids = tokens(setting, setting.prompt)
            return model(input_ids=ids, use_cache=True, logits_to_keep=1).past_key_values, {}
        fixed = {"encoder_outputs": model.encoder(input_ids=tokens(setting, setting.sequence))}
        found = model(decoder_input_ids=tokens(setting, 1), use_cache=True, **fixed)
        return found.past_key_values, fixed

    def _step(self, token: Tensor, cache: Any) -> None:
        name = "input_ids" if self.arm.family.kind == "decoder" else "decoder_input_ids"
        self.arm.model(**{name: token}, past_key_values=cache, use_cache=True, **self.fixed)


class Stopwatch:
    """Wall clock of a block, with the device idle at both ends."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.seconds = device, 0.0

    def __enter__(self) -> Stopwatch:
        self._wait()
        self._began = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self._wait()
        self.seconds = time.perf_counter() - self._began

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def alternate(plain: Arm, arm: Arm, setting: Setting, run: Callable[[Arm], float]) -> Spread:
    """The ratio of seconds, round by round; which of the two goes first changes each round. The first round is not counted."""
    ratios = []
    for round_ in range(setting.rounds + 1):
        if round_ % 2:
            before, after = run(plain), run(arm)
        else:
            after, before = run(arm), run(plain)
        ratios.append(after / before)
    low, median, high = statistics.quantiles(ratios[1:], n=4, method="inclusive")
    return Spread(median, low, high)


# ---- what explains it -------------------------------------------------------------------------------------------------


def attention_names(plain: Arm) -> set[str]:
    """Qualified names of every attention sublayer, and of its output map where another module holds that."""
    names = {id(module): name for name, module in plain.model.named_modules()}
    found: set[str] = set()
    for site in plain.family.attention_sites(plain.model):
        inside = {id(module) for module in site.module.modules()}
        output = site.owner.get_submodule(site.o)
        found |= {names[id(site.module)]} | (
            {names[id(output)]} if id(output) not in inside else set()
        )
    return found


def attention_flops(arm: Arm, names: set[str], setting: Setting) -> int:
    """Operations of the modules of these names in one forward pass of the training batch, as plain matrix products; FFTs have none."""
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        arm.model(**batch_of(arm, setting))
    prefix, counts = type(arm.model).__name__, counter.get_flop_counts()
    return sum(
        sum(counts[f"{prefix}.{name}"].values()) for name in names if f"{prefix}.{name}" in counts
    )


def slower_operations(plain: Arm, arm: Arm, run: Callable[[Arm], object]) -> str:
    """The two operations whose own time grew most, and how many more there are: `aten::bmm +3.10 ms, ... (x1.04 operations)`."""
    (before, count_before), (after, count_after) = profiled(plain, run), profiled(arm, run)
    grown = {name: ms - before.get(name, 0.0) for name, ms in after.items()}
    worst = sorted(((ms, name) for name, ms in grown.items() if ms > 0), reverse=True)[:2]
    return (
        ", ".join(f"{name} +{ms:.2f} ms" for ms, name in worst)
        + f" (x{count_after / count_before:.2f} operations)"
    )


def profiled(arm: Arm, run: Callable[[Arm], object]) -> tuple[dict[str, float], int]:
    """Milliseconds by operation, without what they call, as the median over runs; and operations in a run."""
    on_cuda = next(arm.model.parameters()).is_cuda
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_cuda else [])]
    run(arm)
    found, count = defaultdict[str, list[float]](list), 0
    for _ in range(PROFILED):
        with profile(activities=activities) as recorded:
            run(arm)
        # Of operations alone: a kernel's time stands in its operation's too, and an event of the
        # kernel's own would count it twice.
        events = [e for e in recorded.key_averages() if e.device_type == DeviceType.CPU]
        count = sum(e.count for e in events)
        for e in events:
            found[e.key].append(
                (e.self_device_time_total if on_cuda else e.self_cpu_time_total) / 1000
            )
    return {key: statistics.median(times) for key, times in found.items()}, count


def device_name(device: torch.device) -> str:
    return (
        torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"{torch.get_num_threads()} CPU threads"
    )


if __name__ == "__main__":
    main()
