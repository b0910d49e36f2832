"""Which implementation of an op serves a call: a pure function of what each one can do."""

from collections.abc import Mapping


def choose(op: str, implementation: str, candidates: Mapping[str, str | None]) -> str:
    """Name of the implementation to run.

    Args:
      op: name of the op, for messages.
      implementation: `"auto"`, or the name of one implementation.
      candidates: implementation names in order of preference; the value is None where it can
        serve this call, else the reason why it cannot.

    Raises:
      ValueError: an unknown name, or a named implementation that cannot serve the call.
    """
    if implementation == "auto":
        for name, reason in candidates.items():
            if reason is None:
                return name
        raise ValueError(f"{op}: no implementation serves this call: {dict(candidates)}")
    if implementation not in candidates:
        known = ", ".join(("auto", *candidates))
        raise ValueError(f"{op}: implementation {implementation!r} is unknown; known: {known}")
    reason = candidates[implementation]
    if reason is not None:
        raise ValueError(
            f"{op}: implementation {implementation!r} cannot serve this call: {reason}"
        )
    return implementation
