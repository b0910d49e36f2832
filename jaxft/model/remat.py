"""What a layer saves for its backward pass: one named policy."""

from collections.abc import Callable

import jax

from pallas_kernels.attention import RESIDUALS

LAYER_INPUT = "layer_input"  # name of the stream where it enters a layer
# layer: its input alone. attention: the attention's result too, so that it is not run again.
# offload: the input, in the host's pinned memory. false: everything.
POLICIES = ("layer", "attention", "offload", "false")


def rematerialise(body: Callable, policy: str) -> Callable:
    """The scanned body under a policy of `POLICIES`.

    Raises:
      ValueError: a policy that is not one of them.
    """
    policies = jax.checkpoint_policies
    match policy:
        case "false":
            return body
        case "layer":
            return jax.checkpoint(body, prevent_cse=False)
        case "attention":
            keep = policies.save_only_these_names(*RESIDUALS)
            return jax.checkpoint(body, prevent_cse=False, policy=keep)
        case "offload":
            move = policies.save_and_offload_only_these_names(
                names_which_can_be_saved=[],
                names_which_can_be_offloaded=[LAYER_INPUT],
                offload_src="device",
                offload_dst="pinned_host",
            )
            return jax.checkpoint(body, prevent_cse=False, policy=move)
    raise ValueError(f"checkpointing {policy!r} is unknown; known: {', '.join(POLICIES)}")
