"""How a frozen weight is stored and multiplied."""
