"""What a machine can do and measure, and what stands in the way: small checks, each a few findings with their remedy.

Here is what needs no Ray; `suite.doctor.cluster` asks every node of a cluster, `suite.doctor.mlflow` the stores.
"""

from suite.doctor.finding import Finding, Level, run_checks

__all__ = ["Finding", "Level", "run_checks"]
