"""A Ray distributed benchmark suite for attention variants and parameter-efficient transfer learning."""

__version__ = "0.1.0"
