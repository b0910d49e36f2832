"""Checkpoints for resuming, through Orbax: written atomically, only whole ones are found."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from jaxft.errors import UserError


class Checkpoints:
    """A run's `checkpoints/<step>/`: a tree of arrays and a little JSON for each step.

    Orbax writes under a temporary name and renames the folder when all of it is on disk, so what
    a killed run leaves half-written is never taken for a checkpoint.
    """

    def __init__(self, folder: Path):
        self.folder = folder.absolute()
        options = ocp.CheckpointManagerOptions(enable_async_checkpointing=False)
        self._manager = ocp.CheckpointManager(self.folder, options=options)

    def steps(self) -> list[int]:
        """Steps of all whole checkpoints, rising."""
        return sorted(self._manager.all_steps())

    def save(self, step: int, tree: Any, meta: dict[str, Any]) -> None:
        """Write a checkpoint; nothing where this step has one already.

        Raises:
          UserError: the disk does not take it.
        """
        if step in self._manager.all_steps():
            return
        args = ocp.args.Composite(
            tree=ocp.args.StandardSave(_flat(tree)), meta=ocp.args.JsonSave(meta)
        )
        try:
            self._manager.save(step, args=args)
        except (ValueError, OSError) as fault:
            if "RESOURCE_EXHAUSTED" not in str(fault) and not isinstance(fault, OSError):
                raise
            raise UserError(
                f"{self.folder / str(step)} cannot be written: {_short(fault)}"
            ) from fault

    def meta(self, step: int) -> dict[str, Any]:
        """The JSON of a step's checkpoint."""
        self._check(step)
        args = ocp.args.Composite(meta=ocp.args.JsonRestore())
        try:
            return self._manager.restore(step, args=args)["meta"]
        except (ValueError, KeyError, OSError) as fault:
            raise self._damaged(step, fault) from fault

    def restore(self, step: int, like: Any) -> Any:
        """The tree of a step's checkpoint, with the structure, shapes and dtypes of `like`.

        Raises:
          UserError: there is no whole checkpoint of this step, or it holds another tree.
        """
        self._check(step)
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, _flat(like))
        args = ocp.args.Composite(tree=ocp.args.StandardRestore(abstract))
        try:
            tree = self._manager.restore(step, args=args)["tree"]
        except (ValueError, KeyError, OSError) as fault:
            raise self._damaged(step, fault) from fault
        names = _flat(like)
        return jax.tree.unflatten(jax.tree.structure(like), [tree[name] for name in names])

    def forget(self, steps: Iterable[int]) -> None:
        """Delete the checkpoints of these steps."""
        for step in sorted(steps):
            self._manager.delete(step)

    def close(self) -> None:
        """Release Orbax's threads."""
        self._manager.close()

    def _damaged(self, step: int, fault: Exception) -> UserError:
        return UserError(
            f"{self.folder / str(step)} is damaged or holds another adapter: remove it, or name an "
            f"earlier one ({_short(fault)})"
        )

    def _check(self, step: int) -> None:
        if step not in self._manager.all_steps():
            raise UserError(f"{self.folder / str(step)} is no whole checkpoint")


def _short(fault: Exception) -> str:
    """The beginning and the end of what may be pages of text."""
    text = " ".join(str(fault).split())
    return text if len(text) <= 240 else f"{text[:80]} ... {text[-150:]}"


def _flat(tree: Any) -> dict[str, Any]:
    """The leaves by their paths, so that no class of ours is part of what is on disk."""
    leaves = jax.tree.leaves_with_path(tree)
    return {jax.tree_util.keystr(path): leaf for path, leaf in leaves}
