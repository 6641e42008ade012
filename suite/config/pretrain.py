"""Pre-training before a sweep: which arms get a model first, from what, and how it is trained."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from suite.config.loader import Strict
from suite.config.numbers import MOST_COUNT, Amount, Count, PositiveAmount, Seed
from suite.config.space import MOST
from suite.config.task import ObjectiveName
from suite.config.training import Beta, Fraction, check_micro_batch


class PretrainConfig(Strict):
    """Pre-training: one checkpoint per backbone and attention variant, shared by all their cells.

    Variants whose `start` is "scratch" begin with random weights everywhere, whatever the
    backbone's checkpoint holds, and take all `steps`. With `attention: all` the other variants (the
    unchanged backbone too) do the same, so that all are compared on equal terms. With `fraction`
    these others are uptrained instead: from the converted checkpoint, for that share of `steps`.

    Where MHE states a pre-training setting (arXiv 2310.07911, table 11), it is the default. The
    other defaults say "ours".
    """

    corpus: str = Field(
        description="a task (suite list tasks), of which only the text columns are read"
    )
    objective: ObjectiveName | None = Field(
        None,
        description="null = the backbone's own: mlm (encoder), causal-lm (decoder), "
        "span-corruption (encoder-decoder)",
    )
    attention: Literal["scratch", "all"] = Field(
        "scratch", description="variants that start from scratch, or every entry of the sweep"
    )
    fraction: Annotated[float, Field(gt=0, le=1)] | None = Field(
        None,
        description="with attention: all, uptrain what can be converted, for this share of steps "
        "(GQA, arXiv 2305.13245: 0.05)",
    )
    steps: Count = Field(1_000_000, description="optimizer steps (MHE: 1,000,000)")
    batch_size: Count = Field(
        128, description="blocks of text per step over all workers (MHE: 32 on each of 4 GPUs)"
    )
    micro_batch_size: Count | None = Field(
        None, description="blocks per worker and forward pass; null = batch_size / workers"
    )
    eval_batch_size: Count = Field(
        32, description="blocks per worker and forward pass in validation (ours)"
    )
    max_length: Count = Field(512, description="tokens of a sequence (MHE: 512)")
    learning_rate: Annotated[float, Field(gt=0, le=MOST)] = Field(
        1e-4, description="peak (MHE: 1e-4)"
    )
    schedule: Literal["linear", "cosine", "constant"] = Field(
        "linear", description="after warm-up (MHE: linear)"
    )
    warmup_frac: Fraction = Field(
        0.01, description="share of steps with a rising learning rate (MHE: 10,000 of 1,000,000)"
    )
    weight_decay: Amount = Field(0.01, description="AdamW's decoupled decay (MHE: 0.01)")
    adam_beta1: Beta = Field(0.9, description="MHE: 0.9")
    adam_beta2: Beta = Field(0.9999, description="MHE: 0.9999, as printed; BERT: 0.999")
    adam_eps: PositiveAmount = Field(1e-8, description="MHE: 1e-8")
    gradient_clipping: Amount = Field(1.0, description="global gradient norm; 0 = off (ours)")
    corrupted_frac: Annotated[float, Field(gt=0, lt=1)] = Field(
        0.15, description="share of tokens to predict (BERT and T5: 0.15)"
    )
    mean_span_tokens: Annotated[float, Field(ge=1, le=MOST_COUNT)] = Field(
        3.0, description="span-corruption: mean length of a span (T5: 3)"
    )
    checkpoint_every_steps: Count = Field(
        10_000, description="steps from one validation and checkpoint to the next (ours)"
    )
    limit: Count | None = Field(
        None, description="at most so many rows of the corpus, the first ones"
    )
    validation_limit: Count | None = Field(
        None, description="at most so many rows of its validation split"
    )
    seed: Seed = Field(
        0, description="seed of the initial weights, the order of the data and the corruption"
    )

    @property
    def uptraining_steps(self) -> int:
        """Steps of a variant that starts from a converted checkpoint."""
        # a small share of few steps would round to none
        return max(1, round(self.steps * (self.fraction or 1.0)))

    @model_validator(mode="after")
    def _fits_together(self) -> PretrainConfig:
        if self.fraction is not None and self.attention == "scratch":
            raise ValueError(
                "fraction is for variants that are converted, and attention: scratch leaves them "
                "out; set attention: all"
            )
        for name, steps in (("steps", self.steps), ("steps x fraction", self.uptraining_steps)):
            # the last step must end with a validation and a checkpoint
            every = min(self.checkpoint_every_steps, steps)
            if steps % every:
                raise ValueError(
                    f"{name} {steps} is not a multiple of checkpoint_every_steps {every}"
                )
        check_micro_batch(self.batch_size, self.micro_batch_size)
        return self
