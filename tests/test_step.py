"""One update: accumulation, normalisation, masks, schedules, clipping."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import FP32
from tiny import tiny_folder

from jaxft.formats.loading import load_decoder
from jaxft.formats.open import open_checkpoint
from jaxft.lora import add_adapters
from jaxft.lora_config import LoraConfig
from jaxft.optim import OptimConfig, make_optimizer, make_schedule
from jaxft.step import init_state, make_eval_step, make_train_step, split

LORA = LoraConfig(4, 8.0, 0.0, ("q_proj", "v_proj", "down_proj"), False)
OPTIM = OptimConfig(1e-2, "constant", 0, 0.01, 1.0)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Structure, trained tree with non-zero B, frozen tree."""
    decoder = load_decoder(open_checkpoint(str(tiny_folder(tmp_path_factory.mktemp("m")))), FP32)
    add_adapters(decoder, LORA, 0)
    structure, trained, frozen = split(decoder)
    leaves, tree = jax.tree.flatten(trained)
    random = np.random.default_rng(0)
    leaves = [x + 0.05 * random.normal(size=x.shape).astype(np.float32) for x in leaves]
    return structure, jax.tree.unflatten(tree, leaves), frozen


def documents(lengths, seed=0, supervised=None):
    """Documents of random tokens; `supervised` counts the targets at the end of each."""
    random = np.random.default_rng(seed)
    made = []
    for i, length in enumerate(lengths):
        tokens = random.integers(4, 250, length).astype(np.int32)
        count = length - 1 if supervised is None else supervised[i]
        mask = np.arange(length) >= length - count
        made.append((tokens, mask))
    return made


def batch(rows, shape):
    """Rows, each a list of documents, laid into `[A, B, T]`."""
    tokens, segments = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    targets = np.full(shape, -1, np.int32)
    for row, members in enumerate(rows):
        a, b = divmod(row, shape[1])
        start = 0
        for number, (ids, mask) in enumerate(members, 1):
            end = start + len(ids)
            tokens[a, b, start:end] = ids
            segments[a, b, start:end] = number
            targets[a, b, start : end - 1] = np.where(mask, ids, -1)[1:]
            start = end
    return {"tokens": tokens, "segment_ids": segments, "targets": targets}


def one_update(model, data, optim=OPTIM, steps=1, optimizer=None):
    """State and metrics, as numpy, after updates by AdamW or the optimiser given."""
    structure, trained, frozen = model
    trained = jax.tree.map(np.array, trained)
    optimizer = optimizer or make_optimizer(optim)
    step = make_train_step(
        structure,
        optimizer,
        make_schedule(optim, 10),
        seed=0,
        dropout=False,
        checkpointing="false",
    )
    state = init_state(trained, optimizer)
    for _ in range(steps):
        state, metrics = step(state, frozen, data)
    return jax.device_get((state, metrics))


def difference(a, b):
    """Largest difference of two trained trees."""
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return max(float(np.abs(np.array(x) - np.array(y)).max()) for x, y in pairs)


# Adam divides by the gradient's own size and so magnifies the last bits of a tiny one.
@pytest.mark.parametrize(("optimizer", "bound"), [(optax.scale(-1.0), 1e-6), (None, 1e-5)])
def test_accumulation_does_not_change_the_update(model, optimizer, bound):
    rows = [[d] for d in documents([20, 3, 9, 14])]
    packed = [[rows[0][0], rows[1][0]], [rows[2][0], rows[3][0]]]
    batches = [batch(rows, (a, b, 24)) for a, b in ((1, 4), (2, 2), (4, 1))]
    batches.append(batch(packed, (1, 2, 24)))
    results = [one_update(model, data, optimizer=optimizer) for data in batches]
    assert difference(results[0][0].trained, model[1]) > 100 * bound
    for state, metrics in results[1:]:
        assert difference(state.trained, results[0][0].trained) < bound
        assert abs(metrics.loss - results[0][1].loss) < 1e-5
        assert abs(metrics.grad_norm - results[0][1].grad_norm) < 1e-5
        assert metrics.target_tokens == 42


def test_the_loss_is_the_mean_over_tokens_not_over_batches(model):
    rows = [[d] for d in documents([12, 12], supervised=[8, 1])]
    _, together = one_update(model, batch(rows, (2, 1, 16)))
    _, first = one_update(model, batch(rows[:1], (1, 1, 16)))
    _, second = one_update(model, batch(rows[1:], (1, 1, 16)))
    assert together.loss == pytest.approx((8 * first.loss + second.loss) / 9, abs=1e-5)
    assert abs(together.loss - (first.loss + second.loss) / 2) > 1e-3  # the mean of means


def test_the_last_short_window_counts_its_own_targets(model):
    row = documents([10])
    _, full = one_update(model, batch([row] * 4, (4, 1, 16)))
    _, short = one_update(model, batch([row], (4, 1, 16)))
    assert short.loss == pytest.approx(full.loss, abs=1e-6)
    assert short.grad_norm == pytest.approx(full.grad_norm, abs=1e-5)


def test_a_masked_micro_batch_adds_nothing(model):
    rows = [[d] for d in documents([12, 12, 12, 12], supervised=[5, 0, 7, 3])]
    state, metrics = one_update(model, batch(rows, (4, 1, 16)))
    without, other = one_update(model, batch([rows[0], rows[2], rows[3]], (3, 1, 16)))
    assert difference(state.trained, without.trained) < 1e-7
    assert metrics.loss == pytest.approx(other.loss, abs=1e-6)


def test_a_step_without_targets_changes_nothing(model):
    rows = [[d] for d in documents([12, 12], supervised=[0, 0])]
    state, metrics = one_update(model, batch(rows, (2, 1, 16)))
    assert difference(state.trained, model[1]) == 0
    assert metrics.target_tokens == 0
    assert np.isnan(metrics.loss)
    moments = [np.array(x) for x in jax.tree.leaves(state.optimizer)]
    assert all((x == 0).all() for x in moments)
    assert state.step == 1


def test_a_gradient_that_is_not_finite_changes_nothing(model):
    structure, trained, frozen = model
    poisoned = jax.tree.map(lambda x: x * np.float32(np.nan) if x.ndim == 1 else x, frozen)
    data = batch([documents([12])], (1, 1, 16))
    state, metrics = one_update((structure, trained, poisoned), data)
    assert not np.isfinite(metrics.grad_norm)
    assert difference(state.trained, trained) == 0


def test_evaluation_does_not_depend_on_the_batches(model):
    structure, trained, frozen = model
    made = documents([12] * 5, supervised=[1, 2, 8, 3, 5])
    evaluate = make_eval_step(structure)
    means = []
    for rows in ([[d] for d in made], [made[:2], made[2:4], made[4:]], [[*made]]):
        data = batch(rows, (len(rows), 1, 64))
        total, count = evaluate(trained, frozen, data)
        assert count == 19
        means.append(float(total) / 19)
    assert max(means) - min(means) < 1e-6


@pytest.mark.parametrize(
    ("kind", "warmup", "total", "expected"),
    [
        ("cosine", 2, 6, [1 / 3, 2 / 3, 1, 0.853553, 0.5, 0.146447]),
        ("linear", 2, 6, [1 / 3, 2 / 3, 1, 0.75, 0.5, 0.25]),
        ("linear", 0, 4, [1, 0.75, 0.5, 0.25]),
        ("constant", 2, 4, [1 / 3, 2 / 3, 1, 1]),
        ("cosine", 6, 6, [k / 7 for k in range(1, 7)]),
        ("cosine", 10, 6, [k / 11 for k in range(1, 7)]),
        ("cosine", 0, 1, [1]),
    ],
)
def test_schedules(kind, warmup, total, expected):
    schedule = make_schedule(OptimConfig(1.0, kind, warmup, 0.0, 1.0), total)
    assert [float(schedule(i)) for i in range(total)] == pytest.approx(expected, abs=1e-6)
    assert all(value > 0 for value in expected)


@pytest.mark.parametrize("kind", ["linear", "cosine"])
def test_schedules_without_warmup_are_those_of_transformers(kind):
    torch = pytest.importorskip("torch")
    from transformers import get_scheduler

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.3)
    theirs = get_scheduler(kind, optimizer, num_warmup_steps=0, num_training_steps=7)
    ours = make_schedule(OptimConfig(0.3, kind, 0, 0.0, 1.0), 7)
    for i in range(7):
        assert float(ours(i)) == pytest.approx(theirs.get_last_lr()[0], rel=1e-5)
        optimizer.step()
        theirs.step()


def test_the_first_update_moves_the_adapter_by_the_logged_rate(model):
    optim = OptimConfig(1e-2, "linear", 2, 0.0, 0.0)
    state, metrics = one_update(model, batch([documents([12])], (1, 1, 16)), optim)
    assert metrics.learning_rate == pytest.approx(1e-2 / 3)
    # Adam's first step is the rate itself wherever the gradient is not tiny
    assert difference(state.trained, model[1]) == pytest.approx(1e-2 / 3, rel=1e-3)


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("clip", [0.05, 0.0])
def test_updates_are_those_of_torch_adamw(model, weight_decay, clip):
    torch = pytest.importorskip("torch")
    data = batch([documents([16])], (1, 1, 16))
    optim = OptimConfig(3e-3, "constant", 0, weight_decay, clip)
    structure, trained, frozen = model
    from flax import nnx

    from jaxft.loss import count_targets, sum_of_losses

    def mean_loss(tree):
        micro = {k: jnp.asarray(v[0]) for k, v in data.items()}
        total = sum_of_losses(nnx.merge(structure, tree, frozen), **micro)
        return total / count_targets(data["targets"])

    parameters = [torch.nn.Parameter(torch.tensor(np.array(x))) for x in jax.tree.leaves(trained)]
    adam = torch.optim.AdamW(parameters, lr=3e-3, weight_decay=weight_decay)
    tree = jax.tree.structure(trained)
    for _ in range(3):
        now = jax.tree.unflatten(tree, [jnp.asarray(p.detach().numpy()) for p in parameters])
        gradients = jax.jit(jax.grad(mean_loss))(now)
        for parameter, gradient in zip(parameters, jax.tree.leaves(gradients), strict=True):
            parameter.grad = torch.tensor(np.array(gradient))
        if clip:
            norm = torch.nn.utils.clip_grad_norm_(parameters, clip)
            assert norm > clip
        adam.step()
    state, _ = one_update(model, data, optim, steps=3)
    for ours, theirs in zip(jax.tree.leaves(state.trained), parameters, strict=True):
        np.testing.assert_allclose(np.array(ours), theirs.detach().numpy(), atol=2e-5)
    assert difference(state.trained, trained) > 5e-3
