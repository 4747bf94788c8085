import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from cnnjax import partition


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
        ("rows=4", "unknown axis 'rows'; allowed: data"),
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


@pytest.mark.parametrize(("batch", "rows"), [(100, 104), (96, 96), (1, 8), (8, 8)])
def test_batch_rows_are_a_multiple_of_the_devices(batch, rows):
    mesh, _ = partition.make_mesh("data=8")
    assert partition.batch_rows(mesh, batch) == rows


def test_the_first_matching_rule_decides():
    mesh, _ = partition.make_mesh("data=2")
    rules = ((r"conv_\d+/kernel$", PartitionSpec(None, None, None, "data")), (r".*", PartitionSpec()))
    state = {"params": {"conv_1": {"kernel": np.zeros((3, 3, 1, 4)), "bias": np.zeros(4)}}, "step": np.zeros(())}
    shardings = partition.state_shardings(state, mesh, rules)
    assert shardings["params"]["conv_1"]["kernel"].spec == PartitionSpec(None, None, None, "data")
    assert shardings["params"]["conv_1"]["bias"].is_fully_replicated and shardings["step"].is_fully_replicated
    with pytest.raises(ValueError, match=r"no partition rule matches 'params.conv_1.bias'"):
        partition.state_shardings(state, mesh, rules[:1])
