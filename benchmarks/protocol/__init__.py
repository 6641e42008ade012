"""Simulations of the protocol: what its rules do where the truth is known."""
