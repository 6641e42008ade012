"""Put the record of an ended trial together: scores, cost, size, timing and provenance."""

from __future__ import annotations

import time
from typing import Any, Literal

import numpy as np
import torch

from suite.data.tokenizer import tokenizer_fingerprint
from suite.errors import OwnCodeError
from suite.meters import computes_on, hardware
from suite.record.provenance import git_state, versions
from suite.record.result import (
    PREPARE_PHASE,
    STATES_PHASE,
    EpochRecord,
    ParameterCount,
    Status,
    StepTiming,
    TrialResult,
    ValidityRecord,
)
from suite.train.evaluate import Evaluation
from suite.train.initial import check_buffers
from suite.train.running_trial import UNSCORED_STEPS, RunningTrial
from suite.train.warm import Warm


def build_result(
    run: RunningTrial, test: Evaluation | None, validity: ValidityRecord | None
) -> TrialResult:
    """The result of a trial that has ended. Collective.

    Args:
        test: What the best epoch's weights score on test; None in the search phase, and where
            the trial has no score.
        validity: What the trial checked about itself; None without a score.

    Raises:
        OwnCodeError: Frozen weights or a buffer changed: neither the best weights nor an export
            would have the change.
    """
    progress, warm = run.progress, run.warm
    trained_by = f"training of method {run.spec.arm.method}"
    frozen = warm.engine.fingerprint(trained=False)
    if frozen != warm.engine.frozen_fingerprint:
        raise OwnCodeError(
            f"{trained_by} changed frozen weights, and a trial keeps trained ones only: code that"
            " runs in a forward or backward pass must not write to them"
        )
    check_buffers(warm.engine.module, warm.initial_buffers, trained_by)
    phases, missing = run.accounts()
    made = {}
    for phase, record in ((PREPARE_PHASE, warm.preparation), (STATES_PHASE, warm.kept)):
        made[phase] = record
        if record is None:
            continue
        reused = record.made_by != run.folder.hash
        made[phase] = record.model_copy(update={"reused": reused})
        # The trial that did the work pays, also where an earlier attempt of it did.
        if not reused and record.cost is not None:
            phases[phase] = record.cost
            for name, why in record.missing.items():
                missing[f"phases.{phase}.{name}"] = why
    timing = _timing(run)
    if timing.p50_s is None:
        missing["timing"] = _why_no_timing(run)
    if progress.checkpoint_bytes is None:
        missing["checkpoint_bytes"] = "the attempt that ended the trial wrote no checkpoint"
    if run.status is not None:
        missing["score"] = why_no_score(run.status, progress.epoch)
    return TrialResult(
        trial=run.folder.hash,
        status=run.status or Status.COMPLETED,
        **_scores(run, test),
        # 0 means that no epoch was ever the best
        best_epoch=progress.best_epoch or None,
        epochs=[EpochRecord(**epoch) for epoch in progress.epochs],
        phases=phases,
        timing=timing,
        precision=warm.precision,
        lanes=progress.lanes,
        parameters=_parameters(warm),
        checkpoint_bytes=progress.checkpoint_bytes,
        pretrain=warm.pretrain,
        preparation=made[PREPARE_PHASE],
        frozen_dropout=_frozen_dropout(run),
        frozen_states=made[STATES_PHASE],
        # a pretrain run's last weights, or the best ones of a confirm run
        weights_sha256=run.weights_sha256 or progress.best_sha256,
        splits=warm.data.sizes,
        data_hash=warm.data.data_hash,
        frozen_sha256=frozen,
        validity=validity,
        missing=missing,
        resumed_from_epochs=progress.resumed_from,
        provenance=_provenance(run),
        started_at=progress.started_at,
        finished_at=time.time(),
    )


def why_no_score(status: Status, epochs: int) -> str:
    """Why a trial has no score although it met no error."""
    if status is Status.PRUNED:
        return f"pruned after epoch {epochs}; validation_score is that of its best epoch"
    return "a loss, a gradient or the score became NaN or infinite"


def _frozen_dropout(run: RunningTrial) -> Literal["off", "no effect"] | None:
    if run.spec.training.frozen_dropout:
        return None
    if run.warm.states is None:
        return "no effect"
    return "off"


def _scores(run: RunningTrial, test: Evaluation | None) -> dict[str, Any]:
    """The scores of a result: `score` is the test score, or else the best validation score.

    A pruned trial has only a validation score; one that failed or diverged has none.
    """
    progress = run.progress
    if run.status is Status.PRUNED:
        return {"score": None, "validation_score": progress.best_score}
    if run.status is not None:
        return {"score": None, "validation_score": None}
    if test is None:
        return {
            "score": progress.best_score,
            "scores": dict(progress.best),
            "validation_score": progress.best_score,
            "test_score": None,
        }
    return {
        "score": test.score,
        "scores": test.scores,
        "validation_score": progress.best_score,
        "test_score": test.score,
    }


def _timing(run: RunningTrial) -> StepTiming:
    steps = np.asarray(run.progress.step_s)
    if not len(steps):
        return StepTiming(p50_s=None, p95_s=None, samples_per_s=None, tokens_per_s=None)
    seconds = float(steps.sum())
    return StepTiming(
        p50_s=float(np.percentile(steps, 50)),
        p95_s=float(np.percentile(steps, 95)),
        samples_per_s=len(steps) * run.spec.training.batch_size / seconds,
        tokens_per_s=run.progress.step_tokens / seconds,
    )


def _why_no_timing(run: RunningTrial) -> str:
    if run.progress.lanes > 1:
        return f"trained as one of {run.progress.lanes} lanes, whose steps are not its own"
    return f"an epoch has {len(run.batches)} steps; the first {UNSCORED_STEPS} are not timed"


def _parameters(warm: Warm) -> ParameterCount:
    trainable = warm.engine.numel(trained_only=True)
    return ParameterCount(
        total=warm.engine.numel(),
        trainable=trainable,
        trainable_head=warm.head_parameters,
        # trained tensors are stored in fp32
        stored_bytes=4 * trainable,
        attention_parameters=warm.attention.with_output_projection,
        kv_bytes_per_token=warm.attention.kv_bytes_per_token,
    )


def _provenance(run: RunningTrial) -> dict[str, Any]:
    return {
        "recipe": run.spec.recipe,
        "versions": versions(),
        "git": git_state(),
        "hardware": hardware(),
        "machine": computes_on(run.warm.engine.device),
        "backbone": run.warm.backbone,
        "tokenizer_sha256": tokenizer_fingerprint(run.warm.objective.tokenizer),
        "metrics": run.warm.objective.signatures(),
        "data_revision": run.warm.data.revision,
        "engine": run.warm.engine.config,
        # The layout in use, where the specification may say `auto`.
        "partitioning": run.warm.engine.training.model_dump(
            include={"zero_stage", "frozen_weights"}
        ),
        "meter": run.meter.describe(),
        "device": run.warm.engine.device,
        "world_size": run.warm.engine.world_size,
        "world_sizes": run.progress.world_sizes,
        "hosts": run.progress.hosts,
        "threads_per_worker": torch.get_num_threads(),
        "streams": {name: run.spec.stream(name) for name in ("init", "order", "dropout")},
    }
