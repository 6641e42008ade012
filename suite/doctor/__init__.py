"""Checks what a machine can do and measure, and says how to mend what is wrong.

The names here need no Ray. `suite.doctor.cluster` asks every node of a cluster, and
`suite.doctor.mlflow` and `suite.doctor.optuna` look at the stores.
"""

from suite.doctor.finding import Finding, Level, run_checks

__all__ = ["Finding", "Level", "run_checks"]
