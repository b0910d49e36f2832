"""Files in and out: checkpoints, adapters, resumable state."""
