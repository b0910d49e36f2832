"""Loss and LoRA gradients against transformers + PEFT + torch autograd on the same NF4 weights."""

from pathlib import Path

import numpy as np
import pytest
from helpers import LLAMA3_ROPE, NF4_FP32, load, save_llama
from model_oracles import (
    add_lora,
    in_peft,
    loss_and_gradients,
    open_in_transformers,
    pack_rows,
    peft_loss_and_gradients,
    relative,
    write_dense_weights,
)

torch = pytest.importorskip("torch")
pytest.importorskip("peft")

LENGTH = 32
RANDOM = np.random.default_rng(0)
DOCUMENTS = [RANDOM.integers(0, 64, n).tolist() for n in (7, 5, 11, 1, 2)]
RUN_ON = [token for document in DOCUMENTS for token in document]


@pytest.fixture(scope="module")
def folder(tmp_path_factory, fixtures) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    # two scales a row of 128, blocks across rows of 48 and 32
    save_llama(fixtures, folder, rope_parameters={**LLAMA3_ROPE, "rope_theta": 500000.0})
    return folder


@pytest.fixture(scope="module")
def ours(folder):
    """Decoder, loss and gradients of the packed documents."""
    decoder = add_lora(load(folder, NF4_FP32))
    return decoder, *loss_and_gradients(decoder)(pack_rows([DOCUMENTS], LENGTH))


def test_packed_matches_peft(ours, folder):
    """Five documents in one row, against PEFT that sees each alone."""
    decoder, loss, gradients = ours
    model = write_dense_weights(open_in_transformers(folder), decoder)
    peft_model = in_peft(model, decoder)
    their_loss, want = peft_loss_and_gradients(peft_model, DOCUMENTS)
    assert len(gradients) == 2 * 7
    assert loss == pytest.approx(their_loss, rel=1e-5)
    assert relative(gradients, want) < 1e-4

    # the same documents as one sequence are another loss, with other gradients
    their_loss, want = peft_loss_and_gradients(peft_model, [RUN_ON])
    assert abs(loss - their_loss) > 1
    assert relative(gradients, want) > 0.1


def test_rank_stabilised_scale(ours, folder):
    """With alpha / sqrt(r); the same adapters under alpha / r are another model."""
    plain, plain_loss, plain_gradients = ours
    decoder = add_lora(load(folder, NF4_FP32), rslora=True)
    loss, gradients = loss_and_gradients(decoder)(pack_rows([DOCUMENTS], LENGTH))
    model = write_dense_weights(open_in_transformers(folder), decoder)
    their_loss, want = peft_loss_and_gradients(in_peft(model, plain, rslora=True), DOCUMENTS)
    assert loss == pytest.approx(their_loss, rel=1e-5)
    assert relative(gradients, want) < 1e-4
    assert abs(plain_loss - their_loss) > 0.1
    assert relative(plain_gradients, want) > 0.1


def test_weights_before_quantisation_differ(ours, folder):
    """So the comparison is on the NF4 weights, and would see a wrongly decoded one."""
    decoder, loss, gradients = ours
    their_loss, want = peft_loss_and_gradients(
        in_peft(open_in_transformers(folder), decoder), DOCUMENTS
    )
    assert abs(loss - their_loss) > 0.1
    assert relative(gradients, want) > 0.1
