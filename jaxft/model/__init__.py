"""One decoder for every model family."""
