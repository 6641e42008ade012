"""What a machine can do and measure, and what stands in the way: small checks, each a few findings with their remedy.

Here is what needs no Ray; `suite.tune.doctor` asks every node of a cluster, `suite.tracking.doctor` the stores.
"""

from suite.doctor.finding import Finding, Level, run_checks

__all__ = ["Finding", "Level", "run_checks"]
