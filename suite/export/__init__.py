"""Write trained models for others: transformers weights, peft adapters, `suite.load` folders."""

from suite.export.load import load as load
from suite.export.write import Exported as Exported
from suite.export.write import export as export
