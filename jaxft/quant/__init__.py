"""How a frozen weight is stored and multiplied."""

from jaxft.quant.linear import Adapter, linear
from jaxft.quant.weight import NF4, Dense, Storage, Weight, dense

__all__ = ["NF4", "Adapter", "Dense", "Storage", "Weight", "dense", "linear"]
