"""What an arm costs, without training it: a few steps on random weights, measured and estimated.

>>> setting = Setting(batch=8, seq=64, device="cpu")
>>> if __name__ == "__main__":  # ranks are separate processes, which import this module again
...     profile = measure(choose(["t5-small"], ["full", "read"], ["pretrained"]), setting)
...     ratios(profile.arms[1], profile.arms[0])
"""

from __future__ import annotations

from suite.profiling.arms import choose
from suite.profiling.compare import ratios
from suite.profiling.record import ArmProfile, Profile
from suite.profiling.run import estimate_only, measure
from suite.profiling.setting import Setting

__all__ = ["ArmProfile", "Profile", "Setting", "choose", "estimate_only", "measure", "ratios"]
