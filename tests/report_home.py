"""A home as a finished sweep leaves it, with ranks, a rejected arm and a trial that failed with an ugly message."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from suite.record.folder import Home
from suite.record.result import FailureRecord, Status, ValidityRecord
from tests.answers import some_right, write_confirmed
from tests.records import RATES, make_result, make_spec, synced, write_definition, write_trial

SHARES = {"full": 0.9, "lora": 0.895, "read": 0.6, "bitfit": 0.5}
"""How often each method is right: two that cannot be told apart, one that is worse, and one whose runs are rejected."""
TASKS = ("agreement", "entailment")
SECRET = "hunter2-hunter2"
ATTACK = f"<script>document.title='owned'</script></script><img src=x onerror=alert(1)> postgresql://me:{SECRET}@db/x"
GOOD: dict[str, Any] = {
    "trainable_as_intended": True,
    "output_start_sha256": "a",
    "output_end_sha256": "b",
    "loss_first": 1.0,
    "no_nan": True,
}
PROVENANCE = {
    "versions": {"torch": "2.13.0", "petl-suite": "0.1.0"},
    "git": {"revision": "f32476f1eccb54b2170082378ce60d719e99eab", "dirty": False},
    "hardware": {"cpu_model": "AMD <EPYC>", "usable_cores": 2, "memory_bytes": 2**34, "gpus": []},
    "meter": {"energy_sources": ["cpu-time-estimate"], "watts_per_core": 4.0},
    "device": "cpu",
    "world_size": 2,
}


def make_report_home(path: Path, empty_db: Path) -> Home:
    """Four methods on two tasks with two learning rates and three seeds each; synced."""
    home = Home(path)
    write_definition(home, [*SHARES], TASKS, trials=2)
    for task in TASKS:
        rng = np.random.default_rng(len(task))
        for method, share in SHARES.items():
            specs = write_confirmed(
                home, method, some_right(rng, [share - 0.01, share, share + 0.01], items=200), task
            )
            for spec in specs:
                validity = ValidityRecord(
                    **GOOD,
                    output_changed=method != "bitfit",
                    loss_fell=True,
                    loss_last=0.5,
                )
                result = home.trial(spec).result()
                assert result is not None
                home.trial(spec).write_result(
                    result.model_copy(update={"validity": validity, "provenance": PROVENANCE})
                )
            second = make_spec(method, task, number=1, learning_rate=RATES[1])
            failed = {
                "status": Status.DIVERGED,
                "failure": FailureRecord(
                    type="LossError", message=ATTACK, log_path="/somewhere/rank0.log"
                ),
            }
            write_trial(
                home,
                second,
                make_result(second, **(failed if method == "read" else {"score": 40.0})),
            )
    return synced(home, empty_db)
