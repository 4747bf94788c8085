"""Stages of layers on different devices, against gradient accumulation over the same micro-batches on one."""

import dataclasses
import functools
import itertools

import commands
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import cnnjax.pipeline as pipeline
from cnnjax import model, networks, partition
from cnnjax.augment import Augmentation
from cnnjax.checkpoint import Checkpoints
from cnnjax.config import UsageError
from cnnjax.losses import CLASS_SAMPLES, Objective
from cnnjax.networks import BatchNorm, Conv, Dense, Dropout, Flatten, MaxPool, Relu, Residual
from cnnjax.optim import OptimizerConfig, make_optimizer, make_schedule
from cnnjax.partition import Layout
from cnnjax.step import Recipe
from cnnjax.strategy import compile_steps

# Every kind of layer that depends on its number or name: two dropouts, and two of most others.
NETWORK = (
    *(Conv(4, strides=(2, 2), use_bias=False), BatchNorm(0.9), Relu()),
    Residual((Conv(4, padding="SAME", use_bias=False), BatchNorm(0.8), Relu(), Dropout(0.2))),
    *(MaxPool(), Flatten(), Dropout(0.3), Dense(6), Relu(), Dropout(0.3), Dense(4)),
)
DENSE = (Flatten(), Dense(6), Relu(), Dense(5), Relu(), Dense(4))  # compiles fast
SHAPE = (8, 8, 3)
STEPS = 20


def layout(mesh, microbatches=1, stages=None, **options):
    return Layout(partition.make_mesh(mesh)[0], microbatches, stages=partition.parse_stages(stages), **options)


def recipe(network=NETWORK, optimizer="nesterov", **options):
    config = OptimizerConfig(optimizer, 0.05, schedule="cosine", weight_decay=1e-2)
    dtype = jnp.float64 if jax.config.jax_enable_x64 else jnp.float32
    options = {
        "augmentation": Augmentation(flip=True), "scaling": "unit", "objective": Objective(label_smoothing=0.1),
        "l2": 0.01, "ema": 0.9, "dtype": dtype, "param_dtype": dtype,
    } | options  # fmt: skip
    return Recipe(network, make_optimizer(config, STEPS), make_schedule(config, STEPS), 7, **options)


def batch(where, step, size=10, shape=SHAPE, classes=4):
    """Batches of fixed content; every other one ends in padding."""
    rng, valid = np.random.default_rng(step), size - step % 2
    place = where.rows(size)
    rows = {
        "image": rng.integers(0, 256, (size, *shape), np.uint8),
        "label": rng.integers(0, classes, size).astype(np.int32),
        "weight": (np.arange(size) < valid).astype(np.float32),
        "index": rng.permutation(100)[:size].astype(np.int32),
    }
    rows = {name: values[place] for name, values in rows.items()}
    return jax.device_put(rows | {"weight": rows["weight"] * (place >= 0)}, where.batch_sharding)


def train(steps, where, state, start=0, stop=STEPS, **options):
    records = []
    for step in range(start, stop):
        state, metrics = steps.train(state, batch(where, step, **options))
        records.append(metrics)
    evaluated = steps.evaluate(state, batch(where, 0, **options)) | dict.fromkeys(CLASS_SAMPLES, 0)
    return state, jax.device_get((records, state, evaluated))


@functools.cache
def on_one_device(microbatches, optimizer):
    with jax.enable_x64(True):
        where = layout("data=1", microbatches)
        steps = compile_steps(recipe(optimizer=optimizer), where, SHAPE)
        return train(steps, where, steps.init())[1]


def difference(a, b):
    """Largest difference of an array relative to its largest value."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    each = jax.tree.map(lambda x, y: np.max(np.abs(x - y)) / max(np.max(np.abs(y)), 1e-30), a, b)
    return max(jax.tree.leaves(each))


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("mesh", "microbatches", "stages", "optimizer"),
    [
        pytest.param("pipe=2", 3, "4", "nesterov", marks=SLOW),  # 10 samples do not divide by 3
        pytest.param("pipe=3", 3, None, "nesterov", marks=SLOW),
        pytest.param("pipe=2", 1, None, "nesterov", marks=SLOW),
        pytest.param("pipe=1", 2, None, "nesterov", marks=SLOW),
        pytest.param("pipe=4", 3, "1,2,10", "adamw", marks=SLOW),  # uneven; the third stage has most layers
        pytest.param("pipe=4", 3, "2,4,6", "adamw", marks=SLOW),  # the third stage has no parameters
        pytest.param("data=2,pipe=2", 3, None, "nesterov", marks=SLOW),
        pytest.param("fsdp=2,pipe=2", 3, None, "adamw", marks=SLOW),
        pytest.param("pipe=2,data=2,model=2", 3, None, "nesterov", marks=SLOW),
    ],
)
def test_stages_equal_accumulation_on_one_device(x64, mesh, microbatches, stages, optimizer):
    where = layout(mesh, microbatches, stages)
    steps = compile_steps(recipe(optimizer=optimizer), where, SHAPE)
    records, state, evaluated = train(steps, where, steps.init())[1]
    expected = on_one_device(microbatches, optimizer)
    losses = [record["loss"] / record["count"] for record in records]
    assert len(set(losses)) == STEPS and state.step == STEPS
    assert difference(records, expected[0]) < 1e-9
    assert difference(state, expected[1]) < 1e-9
    assert difference(evaluated, expected[2]) < 1e-9


MESHES = ["pipe=2", "pipe=3", "data=2,pipe=2", "data=2,model=2,pipe=2", "fsdp=2,pipe=2"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("network", "mesh", "shape", "count", "samples"),
    [
        *(("cifar10_slim", mesh, (32, 32, 3), 4, 8) for mesh in MESHES),
        *(("cnn2d_3layer_fullconnected_3layer", mesh, (24, 24, 3), 4, 8) for mesh in MESHES),
        ("resnet18_cifar", "data=2,pipe=2", (16, 16, 3), 1, 8),
    ],
)
def test_registered_networks_equal_one_device(x64, network, mesh, shape, count, samples):
    results = []
    for text in (mesh, "data=1"):
        where = layout(text, 2)
        steps = compile_steps(recipe(networks.build_cnn(network, 10)), where, shape)
        results.append(train(steps, where, steps.init(), 0, count, size=samples, shape=shape, classes=10)[1])
    assert difference(*results) < 1e-9


@pytest.mark.slow
def test_every_array_lives_on_the_devices_of_its_stage_and_is_donated():
    network = (Conv(4, strides=(2, 2), use_bias=False), BatchNorm(), Relu(), Flatten(), Dense(6), Relu(), Dense(4))
    where = layout("data=2,pipe=2", 2, "3")
    steps = compile_steps(recipe(network, "adamw"), where, SHAPE)
    state, records = steps.init(), []
    before = state
    state, _ = steps.train(before, batch(where, 0))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(before))
    names = [name for name, _ in networks.named_layers(network)]
    devices = where.mesh.devices
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        layer = next((key.key for key in path if getattr(key, "key", None) in names), None)
        stage = 0 if layer is None else int(names.index(layer) >= 3)
        assert leaf.sharding.device_set == set(devices[:, stage]), path
        records.append((layer, leaf.size))
    held = dict.fromkeys(devices.flat, 0)
    for leaf in jax.tree.leaves((state.params, state.opt_state, state.ema)):
        for shard in leaf.addressable_shards:
            held[shard.device] += shard.data.nbytes
    # A convolution of 3*3*3*4 and a batch norm of 2*4 in stage 0; dense 3*3*4*6+6 and 6*4+4 in stage 1.
    sizes = (108 + 8, 216 + 6 + 28)
    for stage, size in enumerate(sizes):
        expected = 4 * 4 * size + (4 * 2 if stage == 0 else 0)  # parameters, two moments, average; two counters
        assert [held[device] for device in devices[:, stage]] == [expected, expected]


def test_fsdp_splits_the_arrays_of_a_stage():
    where = layout("fsdp=2,pipe=2", 2, "4")
    state = compile_steps(recipe(), where, SHAPE).init()
    kernel = state.params["dense_1"]["kernel"]
    assert kernel.sharding.device_set == set(where.mesh.devices[:, 1])
    assert {shard.data.size for shard in kernel.addressable_shards} == {12}


def test_each_micro_batch_adds_its_gradient():
    """The last above all: what each adds, alone in a batch of padding, sums up to the gradient of all."""
    where = layout("pipe=2", 5)
    plain = recipe(DENSE, l2=0.0, ema=0.0, augmentation=Augmentation())
    steps = compile_steps(dataclasses.replace(plain, optimizer=optax.sgd(1.0)), where, SHAPE)
    start = jax.device_get(steps.init().params)

    def summed_gradient(weight):
        one = batch(where, 0) | {"weight": jax.device_put(weight, where.batch_sharding)}
        state, metrics = steps.train(steps.init(), one)
        assert metrics["count"] == weight.sum()
        return jax.tree.map(lambda a, b: (a - np.asarray(b)) * weight.sum(), start, state.params)

    alone = [summed_gradient((np.arange(10) // 2 == number).astype(np.float32)) for number in range(5)]
    together = summed_gradient(np.ones(10, np.float32))
    assert all(np.abs(part["dense_1"]["kernel"]).max() > 0.01 for part in alone)
    jax.tree.map(lambda whole, *parts: np.testing.assert_allclose(whole, sum(parts), atol=1e-4), together, *alone)


def test_nothing_is_traced_again_after_the_first_step(monkeypatch):
    traces, original = [], model.apply

    def traced(*arguments, **options):
        traces.append(options["span"])
        return original(*arguments, **options)

    monkeypatch.setattr(pipeline.model, "apply", traced)
    where = layout("pipe=2", 2, "3")
    steps = compile_steps(recipe(DENSE), where, SHAPE)
    state = steps.init()
    for step in range(3):  # the second batch is padded
        state, _ = steps.train(state, batch(where, step))
        steps.evaluate(state, batch(where, step))
    assert sorted(traces) == [(0, 3), (0, 3), (3, 6), (3, 6)]  # forward and evaluation


@pytest.mark.slow
def test_compiled_ahead_it_gives_the_same_bits_and_traces_nothing_more(monkeypatch):
    where = layout("pipe=2", 2)
    plain, ahead = (compile_steps(recipe(DENSE), where, SHAPE) for _ in range(2))
    state, one = ahead.init(), batch(where, 1)
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), one)
    train_step = ahead.train.lower(state, abstract).compile()
    eval_step = ahead.evaluate.lower(state, abstract).compile()
    monkeypatch.setattr(pipeline.model, "apply", None)
    state, metrics = train_step(state, one)
    results = jax.device_get((metrics, eval_step(state, one)))
    monkeypatch.undo()
    state, metrics = plain.train(plain.init(), one)
    expected = jax.device_get((metrics, plain.evaluate(state, one)))
    jax.tree.map(np.testing.assert_array_equal, results, expected)


def test_the_backward_pass_holds_no_copies_of_the_parameters():
    network = (Flatten(), Dense(50), Relu(), Dense(60), Relu(), Dense(4))
    where = layout("pipe=2", 2, "3")
    made = pipeline.Pipeline(recipe(network), where, SHAPE)
    state = made.init()
    stage, own = made.stages[1], made._select(state, 1)
    x = jax.device_put(jnp.ones((5, 50)), stage.layout.batch_sharding)
    small = made._batches(batch(where, 0))[1]
    step = jax.device_put(state.step, stage.layout.replicated)
    _, vjp, _, _ = stage.run_forward(own.params, {}, x, small, step, np.int32(0))
    saved = [leaf.shape for leaf in jax.tree.leaves(vjp)]
    assert saved and not {(50, 60), (60, 4), (5, 50)} & set(saved)


@pytest.mark.slow
def test_a_checkpoint_of_stages_continues_on_other_layouts_and_back(tmp_path, x64):
    made = {}
    for text in ("pipe=2", "data=4", "data=1"):
        where = layout(text, 2)
        made[text] = compile_steps(recipe(optimizer="adamw"), where, SHAPE), where
    steps, where = made["pipe=2"]
    half, _ = train(steps, where, steps.init(), 0, 3)
    folder = Checkpoints(tmp_path, keep=9)
    folder.save(3, half, {}, {})
    whole = train(steps, where, half, 3, 6)[1]
    folder.wait()
    for step, text in enumerate(("pipe=2", "data=4", "data=1"), 6):
        steps, where = made[text]
        state, _ = folder.restore(3, jax.eval_shape(steps.init), steps.state_shardings)
        state, continued = train(steps, where, state, 3, 6)
        assert difference(continued, whole) < 1e-9
        folder.save(step, state, {}, {})
        expected = train(steps, where, state, 6, 8)[1]
        folder.wait()
        steps, where = made["pipe=2"]  # and back
        state, _ = folder.restore(step, jax.eval_shape(steps.init), steps.state_shardings)
        assert difference(train(steps, where, state, 6, 8)[1], expected) < 1e-9
    folder.close()


@pytest.mark.slow
def test_a_run_of_stages_is_resumed_on_one_device_and_on_more_stages(tmp_path):
    flags = (*commands.SMALL, "--x64", "--microbatches", 2, "--log-every", 1, "--epochs", 3)
    expected, resumed = tmp_path / "expected", tmp_path / "resumed"
    done = commands.run(*flags, "--steps", 8, "--run-dir", expected)
    assert done.returncode == 0, done.stderr
    for mesh, stop in (("pipe=2", 2), ("data=1", 5), ("pipe=3,data=2", 8)):
        done = commands.run(*flags, "--mesh", mesh, "--steps", stop, "--run-dir", resumed, "--resume")
        assert done.returncode == 0, done.stderr
        assert ("stage 0 of pipe: layers 0 to" in done.stdout + done.stderr) == ("pipe" in mesh)
    names = ("loss", "accuracy", "learning_rate")
    results = [[[step[name] for name in names] for step in commands.steps(run)] for run in (resumed, expected)]
    assert len(results[0]) == 8
    np.testing.assert_allclose(*results, rtol=1e-9)
    assert commands.rows(resumed)[-1]["mesh"] == "pipe=3,data=2"


# ---------------------------------------------------------------------------------------------------------------------
# Where the cuts are
# ---------------------------------------------------------------------------------------------------------------------


@hypothesis.settings(deadline=None)
@hypothesis.given(st.data())
def test_stages_are_balanced_as_well_as_any_cut_can(data):
    layers = data.draw(st.integers(1, 7))
    costs = data.draw(st.lists(st.integers(0, 9), min_size=layers, max_size=layers))
    inputs = data.draw(st.lists(st.integers(1, 9), min_size=layers, max_size=layers))
    stages = data.draw(st.integers(1, layers))

    def score(starts):
        spans = itertools.pairwise((*starts, layers))
        return max(sum(costs[a:b]) for a, b in spans), sum(inputs[a] for a in starts[1:])

    every = [(0, *cut) for cut in itertools.combinations(range(1, layers), stages - 1)]
    starts = pipeline.balanced_starts(costs, inputs, stages)
    assert tuple(starts) in every
    assert score(starts) == min(map(score, every))


def test_residual_blocks_count_with_their_inside_and_cuts_are_where_least_crosses():
    network = networks.build_cnn("resnet18_cifar", 10)
    spans = pipeline.stage_spans(network, (32, 32, 3), layout("pipe=2"))
    names = [name for name, _ in networks.named_layers(network)]
    rows = networks.summary(network, (32, 32, 3))
    work = [
        sum(row.multiply_adds for row in rows if row.name.split("/")[0] in names[start:stop]) for start, stop in spans
    ]
    assert sum(work) == sum(row.multiply_adds for row in rows)
    assert max(work) < 0.55 * sum(work)
    # Between layers of no cost the cut is after the pooling, where a quarter of the values is left.
    pooled = (Conv(4, padding="SAME"), Relu(), MaxPool(), Conv(16, padding="SAME"), Flatten(), Dense(2))
    assert pipeline.stage_spans(pooled, (8, 8, 4), layout("pipe=2")) == [(0, 3), (3, 6)]
    assert pipeline.stage_spans(pooled, (8, 8, 4), layout("pipe=2", stages="1")) == [(0, 1), (1, 6)]


@pytest.mark.parametrize(
    ("mesh", "stages", "message"),
    [
        ("pipe=8", None, r"--mesh pipe=8 asks for more stages than the network's 6 top-level layers"),
        ("pipe=2", "6", "--stages starts a stage at layer 6; allowed: 1 to 5, the last"),
    ],
)
def test_cuts_that_the_network_does_not_have(mesh, stages, message):
    network = (Conv(4), Relu(), MaxPool(), Conv(4), Flatten(), Dense(2))
    with pytest.raises(UsageError, match=message):
        compile_steps(recipe(network), layout(mesh, stages=stages), (12, 12, 3))


@pytest.mark.parametrize("text", ["", "0", "3,3", "7,3", "a", "3,", "-1", "1.5"])
def test_stages_that_are_no_rising_numbers(text):
    with pytest.raises(ValueError, match=f"--stages is {text!r}; allowed: rising numbers of layers, from 1"):
        partition.parse_stages(text)


@pytest.mark.parametrize(
    ("strategy", "mesh", "stages", "message"),
    [
        ("jit", "pipe=2", "3,7", "--stages names 2 starts, so 3 stages, but --mesh pipe=2 has pipe=2"),
        ("jit", "data=2", "3", "--stages names 1 starts, so 2 stages, but --mesh data=2 has pipe=1"),
        ("jit", "pipe=2,space=2", None, "--mesh pipe=2,space=2: pipe and space do not go together"),
        ("shard_map", "pipe=2", None, "--strategy shard_map knows the axes data, fsdp, but --mesh has pipe"),
    ],
)
def test_layouts_that_are_refused(strategy, mesh, stages, message):
    with pytest.raises(ValueError, match=message):
        partition.check_layout(strategy, layout(mesh, stages=stages))


def test_an_optimizer_that_mixes_stages_is_refused():
    mixing = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1))
    with pytest.raises(ValueError, match="the optimiser updates a layer by the gradients of others"):
        compile_steps(dataclasses.replace(recipe(), optimizer=mixing), layout("pipe=2"), SHAPE)
    per_array = optax.chain(optax.clip(1.0), optax.sgd(0.1))
    compile_steps(dataclasses.replace(recipe(), optimizer=per_array), layout("pipe=2"), SHAPE)
