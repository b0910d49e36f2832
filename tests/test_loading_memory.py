"""Loading streams: the host never holds more dense weights than one layer has."""

import gc
import weakref

import numpy as np
from helpers import NF4_FP32
from tiny import tiny_folder

from jaxft.formats.loading import load_decoder
from jaxft.formats.open import open_checkpoint

LAYERS = 6


class Watched:
    """A checkpoint that counts the bytes it has handed out and that are still held."""

    def __init__(self, checkpoint):
        self._checkpoint = checkpoint
        self.held = self.most = 0

    def __getattr__(self, name):
        return getattr(self._checkpoint, name)

    def read(self, name: str) -> np.ndarray:
        array = np.array(self._checkpoint.read(name)).view(_Counted)
        self.held += array.nbytes
        self.most = max(self.most, self.held)
        weakref.finalize(array, self._released, array.nbytes)
        return array

    def _released(self, size: int) -> None:
        self.held -= size


class _Counted(np.ndarray):
    """An ndarray that takes weak references."""


def test_at_most_one_layer_is_held(tmp_path):
    folder = tiny_folder(tmp_path, num_hidden_layers=LAYERS)
    checkpoint = Watched(open_checkpoint(str(folder)))
    sizes = {n: 4 * int(np.prod(checkpoint.shape(n))) for n in checkpoint.names()}
    layer = sum(size for name, size in sizes.items() if name.startswith("model.layers.0."))
    rest = sum(size for name, size in sizes.items() if not name.startswith("model.layers."))
    gc.collect()
    decoder = load_decoder(checkpoint, NF4_FP32)
    # the tables stay in the checkpoint's precision: on a CPU the device's memory is the host's
    assert checkpoint.most <= layer + rest
    assert layer + rest < 0.7 * sum(sizes.values())  # the control: all of it would not pass
    assert decoder.groups[0].size == LAYERS
