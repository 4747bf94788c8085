import hypothesis
import hypothesis.strategies as st
import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from cnnjax import model, networks, partition


def test_mesh_text_is_read():
    assert partition.parse_mesh("data=4") == {"data": 4}
    assert partition.parse_mesh(" data = -1 ") == {"data": -1}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not AXIS=SIZE"),
        ("4", "'4' is not AXIS=SIZE"),
        ("data=4,", "is not AXIS=SIZE"),
        ("data=four", "is not AXIS=SIZE"),
        ("rows=4", "unknown axis 'rows'; allowed: data, fsdp, model, space"),
        ("data=2,data=2", "'data' is given twice"),
        ("data=0", "size 0; allowed: 1 or more, or -1"),
        ("data=-2", "size -2"),
    ],
)
def test_mesh_mistakes_name_the_flag(text, message):
    with pytest.raises(ValueError, match=f"^--mesh {text}") as caught:
        partition.parse_mesh(text)
    assert message in str(caught.value)


def test_mesh_is_made_of_the_first_devices():
    mesh, line = partition.make_mesh("data=4")
    assert mesh.devices.tolist() == jax.devices()[:4]
    assert "4 fake CPU devices" in line
    mesh, _ = partition.make_mesh("data=-1")
    assert mesh.shape == {"data": 8}
    with pytest.raises(ValueError, match=r"--mesh data=9 needs 9 devices, but there are 8 \(cpu\)"):
        partition.make_mesh("data=9")


def layout(text, **options):
    return partition.Layout(partition.make_mesh(text)[0], **options)


@hypothesis.settings(max_examples=40)  # each shape is dispatched anew
@hypothesis.given(st.integers(1, 40), st.integers(1, 5), st.sampled_from(["data=1", "data=4", "data=2,fsdp=2"]))
def test_every_sample_has_one_row_and_micro_batches_do_not_depend_on_the_mesh(batch, microbatches, text):
    one = layout(text, microbatches=microbatches)
    place = one.rows(batch)
    assert sorted(place[place >= 0]) == list(range(batch))
    assert len(place) % (one.ways * microbatches) == 0
    parts = np.asarray(one.split(jax.numpy.asarray(place)))
    chunk = -(-batch // microbatches)
    expected = [list(range(batch))[m * chunk : (m + 1) * chunk] for m in range(microbatches)]
    assert [sorted(part[part >= 0].tolist()) for part in parts] == expected


def test_the_first_matching_rule_decides():
    rules = ((r"conv_\d+/kernel$", P(None, None, None, "model")), (r".*", P()))
    state = {"params": {"conv_1": {"kernel": np.zeros((3, 3, 1, 4)), "bias": np.zeros(4)}}, "step": np.zeros(())}
    shardings, notes = partition.state_shardings(state, layout("model=2", rules=rules), ())
    assert shardings["params"]["conv_1"]["kernel"].spec == P(None, None, None, "model") and not notes
    assert shardings["params"]["conv_1"]["bias"].is_fully_replicated and shardings["step"].is_fully_replicated
    with pytest.raises(ValueError, match=r"no partition rule matches 'params.conv_1.bias'"):
        partition.state_shardings(state, layout("model=2", rules=rules[:1]), ())


def test_a_dimension_that_does_not_divide_is_left_whole_and_said():
    state = {"params": {"conv_1": {"kernel": np.zeros((3, 3, 3, 32))}}}
    rules = ((r".*", P(None, None, "model")),)
    shardings, notes = partition.state_shardings(state, layout("model=2", rules=rules), ())
    assert shardings["params"]["conv_1"]["kernel"].is_fully_replicated
    assert len(notes) == 1 and "params/conv_1/kernel (3, 3, 3, 32): dimension 2 does not divide by model=2" in notes[0]
    with pytest.raises(ValueError, match="--strict-sharding: params/conv_1/kernel"):
        partition.state_shardings(state, layout("model=2", rules=rules, strict=True), ())


def test_tensor_rules_alternate_outputs_and_inputs():
    network = networks.build_cnn("cifar10_slim", 10)
    abstract = jax.eval_shape(lambda key: model.init(key, network, (32, 32, 3)), jax.random.key(0))
    specs = jax.tree.map(lambda s: s.spec, partition.state_shardings(abstract, layout("model=2"), network)[0])
    params, out, into = specs["params"], P(None, None, None, "model"), P(None, None, "model")
    assert [params[f"conv_{i}"]["kernel"] for i in range(1, 6)] == [out, into, out, into, out]
    assert params["dense_1"]["kernel"] == P()
    assert [params[f"batch_norm_{i}"]["bias"] for i in range(1, 7)] == [
        P("model"),
        P(),
        P("model"),
        P(),
        P("model"),
        P(),
    ]
    assert specs["batch_stats"]["batch_norm_3"]["var"] == P("model")


def test_rules_of_a_residual_block_do_not_leak():
    network = networks.build_cnn("resnet18_cifar", 10)
    abstract = jax.eval_shape(lambda key: model.init(key, network, (32, 32, 3)), jax.random.key(0))
    params = partition.state_shardings(abstract, layout("model=2"), network)[0]["params"]
    for i in range(1, 9):
        body = params[f"residual_{i}"]["body"]
        assert body["conv_1"]["kernel"].spec == P(None, None, None, "model")
        assert body["conv_2"]["kernel"].spec == P(None, None, "model")
        assert body["batch_norm_2"]["scale"].is_fully_replicated
    assert params["residual_3"]["shortcut"]["conv_1"]["kernel"].is_fully_replicated
    assert params["conv_1"]["kernel"].is_fully_replicated


def test_fsdp_splits_the_largest_dimension_that_is_left_and_divides():
    state = {
        "params": {"a": np.zeros((3, 3, 8, 12)), "b": np.zeros(6), "c": np.zeros(8)},
        "batch_stats": {"mean": np.zeros(8)},
    }
    rules = ((r"params/a$", P(None, None, None, "model")), (r".*", P()))
    shardings = partition.state_shardings(state, layout("fsdp=4,model=2", rules=rules), ())[0]
    assert shardings["params"]["a"].spec == P(None, None, "fsdp", "model")
    assert shardings["params"]["b"].spec == P() and shardings["params"]["c"].spec == P("fsdp")
    assert shardings["batch_stats"]["mean"].spec == P()


@pytest.mark.parametrize(
    ("strategy", "text", "options", "message"),
    [
        ("shard_map", "data=2,model=2", {}, "--strategy shard_map knows the axes data, fsdp, but --mesh has model"),
        ("pmap", "fsdp=2", {}, "--strategy pmap knows the axes data, but --mesh has fsdp"),
        ("jit", "data=2", {"bn_scope": "local"}, "--bn-scope local needs --strategy shard_map or pmap"),
    ],
)
def test_a_strategy_refuses_what_it_does_not_know(strategy, text, options, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        partition.check_layout(strategy, layout(text, **options))
