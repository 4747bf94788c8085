"""Pickles are read as data: nothing in them is ever run, and none takes more time or memory than its size warrants."""

import contextlib
import copyreg
import pickle
import struct
import tracemalloc

import dataset_files as files
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cnnjax.datasets.cifar import read_cifar10
from cnnjax.datasets.safe_pickle import read_pickle

P2 = b"\x80\x02"
U1 = b"cnumpy\ndtype\n(X\x02\x00\x00\x00u1tR"


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value.encode())) + value.encode()


def live_attacks(path: str) -> dict[str, bytes]:
    """Pickles that make a folder at ``path`` when pickle.load reads them."""
    target, quoted = text(path), f"S'{path}'\n".encode()
    return {
        "global and reduce": P2 + b"cos\nmkdir\n" + target + b"\x85R.",
        "by protocol 0": b"cos\nmkdir\n(" + quoted + b"tR.",
        "shell command": b"cposix\nsystem\n(" + f"S'mkdir {path}'\n".encode() + b"tR.",
        "stack global": b"\x80\x04\x8c\x02os\x8c\x05mkdir\x93" + target + b"\x85R.",
        "dotted name": b"\x80\x04\x8c\x06shutil\x8c\x08os.mkdir\x93" + target + b"\x85R.",
        "dotted name under numpy": b"\x80\x04\x8c\x0anumpy.f2py\x8c\x08os.mkdir\x93" + target + b"\x85R.",
        "eval": P2 + b"cbuiltins\neval\n" + text(f"__import__('os').mkdir({path!r})") + b"\x85R.",
        "Python 2 builtins": P2 + b"c__builtin__\neval\n" + text(f"__import__('os').mkdir({path!r})") + b"\x85R.",
        "inst": b"(" + quoted + b"ios\nmkdir\n.",
        "obj": b"(cos\nmkdir\n" + quoted + b"o.",
        "in a key": P2 + b"}cos\nmkdir\n" + target + b"\x85RNs.",
        "in a list of labels": P2 + b"}" + text("labels") + b"](cos\nmkdir\n" + target + b"\x85Res.",
        "in the state of an array": (
            P2
            + b"cnumpy._core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85C\x01b\x87R"
            + b"cos\nmkdir\n"
            + target
            + b"\x85Rb."
        ),
        "partial": (P2 + b"cfunctools\npartial\ncos\nmkdir\n" + target + b"\x86R)R."),
        "extension code": P2 + b"\x82\xf0" + target + b"\x85R.",
    }


LIVE = tuple(live_attacks("x"))


@pytest.fixture
def registered_extension():
    copyreg.add_extension("os", "mkdir", 0xF0)
    # Once used, an extension code bypasses the check of names in the standard library.
    pickle.loads(P2 + b"\x82\xf0.")
    yield
    copyreg.remove_extension("os", "mkdir", 0xF0)
    copyreg.clear_extension_cache()


@pytest.mark.parametrize("attack", LIVE)
def test_attack_is_refused_by_name(attack, tmp_path, registered_extension):
    target = tmp_path / "made"
    data = live_attacks(str(target))[attack]
    with pytest.raises(ValueError, match="refuses ") as error:
        read_pickle(data, "data_batch_1")
    assert not target.exists()
    assert str(error.value).startswith("data_batch_1: refuses ")
    assert "\n" not in str(error.value)
    if attack == "extension code":
        assert "an extension code" in str(error.value)
    else:
        assert any(name in str(error.value) for name in ("mkdir", "system", "eval", "partial"))


@pytest.mark.parametrize("attack", LIVE)
def test_the_attacks_are_real(attack, tmp_path, registered_extension):
    target = tmp_path / "made"
    with contextlib.suppress(TypeError):  # raised after the harm is done
        pickle.loads(live_attacks(str(target))[attack])
    assert target.exists()


def test_attack_inside_a_data_set(tmp_path):
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    for name in (*files.TRAIN_BATCHES, "test_batch"):
        (folder / name).write_bytes(live_attacks(str(tmp_path / "made"))["global and reduce"])
    with pytest.raises(ValueError, match=r"cifar-10-batches-py/data_batch_1: refuses os\.mkdir at byte 2; expected"):
        read_cifar10(tmp_path)
    (folder / "data_batch_1").write_bytes(live_attacks(str(tmp_path / "made"))["shell command"])
    with pytest.raises(ValueError, match=r"refuses posix\.system"):
        read_cifar10(tmp_path)
    assert not (tmp_path / "made").exists()


RECONSTRUCT = b"cnumpy.core.multiarray\n_reconstruct\n"
EMPTY_ARRAY = RECONSTRUCT + b"cnumpy\nndarray\nK\x00\x85C\x01b\x87R"
HUGE = b"\x8a\x06" + (1 << 40).to_bytes(6, "little")
REFUSED = {
    "numpy.ndarray called": (P2 + b"cnumpy\nndarray\n" + HUGE + b"\x85\x85R.", "to call numpy.ndarray"),
    "numpy.ndarray as new object": (P2 + b"cnumpy\nndarray\n" + HUGE + b"\x85\x85\x81.", "to build an object"),
    "new object of another class": (P2 + b"csubprocess\nPopen\n" + text("true") + b"\x85\x81.", "subprocess.Popen"),
    "subclass of ndarray": (P2 + RECONSTRUCT + b"cnumpy\nmatrix\nK\x00\x85C\x01b\x87R.", "numpy.matrix"),
    "memmap": (P2 + b"cnumpy\nmemmap\n" + text("/etc/passwd") + b"\x85R.", "numpy.memmap"),
    "np.load": (P2 + b"cnumpy\nload\n" + text("/etc/passwd") + b"\x85R.", "numpy.load"),
    "reconstruct of a dtype": (P2 + RECONSTRUCT + b"cnumpy\ndtype\nK\x00\x85C\x01b\x87R.", "_reconstruct with unusual"),
    "object array": (P2 + b"cnumpy\ndtype\n" + text("O8") + b"K\x00K\x01\x87R.", "numpy.dtype('O8')"),
    "object scalar": (
        P2 + b"cnumpy._core.multiarray\nscalar\ncnumpy\ndtype\n" + text("O") + b"\x85RN\x86R.",
        "numpy.dtype('O')",
    ),
    "record dtype": (P2 + b"cnumpy\ndtype\n" + text("u1,O") + b"\x85R.", "numpy.dtype('u1,O')"),
    "huge dtype": (P2 + b"cnumpy\ndtype\n" + text("V2000000000") + b"\x85R.", "numpy.dtype('V2000000000')"),
    "dtype of a dict": (P2 + b"cnumpy\ndtype\n}\x85R.", "numpy.dtype('')"),
    "dtype with many arguments": (P2 + b"cnumpy\ndtype\n(" + text("u1") + b"NNNNtR.", "numpy.dtype('u1')"),
    "dtype with fields": (P2 + U1 + b"(K\x03" + text("|") + b"N}NJ\0\0\0\0J\0\0\0\0K\0tb.", "numpy.dtype with unusual"),
    "dtype state of another type": (P2 + U1 + b"}b.", "numpy.dtype with unusual"),
    "array from a list": (P2 + EMPTY_ARRAY + b"(K\x01K\x02\x85" + U1 + b"\x89](K\x01K\x02etb.", "made from list"),
    "array of a wrong shape": (P2 + EMPTY_ARRAY + b"(K\x01" + HUGE + b"\x85" + U1 + b"\x89C\x02abtb.", "unusual shape"),
    "array longer than its bytes": (
        P2 + EMPTY_ARRAY + b"(K\x01J\xff\xff\xff\x7f\x85" + U1 + b"\x89C\x02abtb.",
        "does not fit its 2 bytes",
    ),
    "array shorter than its bytes": (
        P2 + EMPTY_ARRAY + b"(K\x01K\x01\x85" + U1 + b"\x89C\x02abtb.",
        "does not fit its 2",
    ),
    "array of negative size": (P2 + EMPTY_ARRAY + b"(K\x01J\xff\xff\xff\xff\x85" + U1 + b"\x89C\x02abtb.", "unusual"),
    "array with many dimensions": (
        P2 + EMPTY_ARRAY + b"(K\x01(" + b"K\x01" * 99 + b"t" + U1 + b"\x89C\x01atb.",
        "unusual",
    ),
    "frombuffer of text": (
        b"\x80\x05cnumpy._core.numeric\n_frombuffer\n(" + text("ab") + U1 + b"K\x02\x85" + text("C") + b"tR.",
        "made from str",
    ),
    "another codec": (
        P2 + b"c_codecs\nencode\n" + text("a") + text("rot13") + b"\x86R.",
        "_codecs.encode with unusual",
    ),
    "packing codec": (P2 + b"c_codecs\nencode\nC\x01a" + text("zlib") + b"\x86R.", "_codecs.encode with unusual"),
    "decoding": (P2 + b"c_codecs\ndecode\nC\x01a" + text("zlib") + b"\x86R.", "_codecs.decode"),
    "bytes of a size": (P2 + b"cbuiltins\nbytes\n" + HUGE + b"\x85R.", "builtins.bytes with unusual"),
    "bytearray": (P2 + b"cbuiltins\nbytearray\n" + HUGE + b"\x85R.", "builtins.bytearray"),
    "getattr": (P2 + b"cbuiltins\ngetattr\n.", "builtins.getattr"),
    "attribute of an allowed name": (b"\x80\x04\x8c\x07_codecs\x8c\x0fencode.__self__\x93.", "_codecs.encode.__self__"),
    "attribute of ndarray": (b"\x80\x04\x8c\x05numpy\x8c\x0endarray.tofile\x93.", "numpy.ndarray.tofile"),
    "state set on a function": (P2 + b"c_codecs\nencode\n}" + text("__doc__") + b"Nsb.", "the state of _codecs.encode"),
    "state set on a class": (P2 + b"cnumpy\nndarray\n}b.", "the state of numpy.ndarray"),
    "state set on a dict": (P2 + b"}}b.", "the state of dict"),
    "call of a list": (P2 + b"])R.", "to call list"),
    "call without a tuple": (P2 + b"c_codecs\nencode\n]R.", "to call _codecs.encode"),
    "persistent id": (P2 + b"Nq\x00Q.", "a persistent id"),
    "persistent id as text": (b"Pmodule\n.", "a persistent id"),
    "extension code 2": (P2 + b"\x83\x01\x00.", "an extension code"),
    "extension code 4": (P2 + b"\x84\x01\x00\x00\x00.", "an extension code"),
    "outside buffer": (b"\x80\x05\x97.", "a buffer outside"),
    "set": (b"\x80\x04\x8f.", "a set"),
    "item of an array": (P2 + EMPTY_ARRAY + b"Na.", "to add items to numpy.ndarray"),
    "tuple as key": (P2 + b"})Ns.", "a dict key that is tuple"),
    "number as key": (P2 + b"}K\x01Ns.", "a dict key that is int"),
    "name with control characters": (b"c\x1b[31mos\nsystem\x07\n.", r"\x1b[31mos.system\x07"),
    "endless name": (b"cos\n" + b"x" * 100_000 + b"\n.", "os.xxx"),
}


@pytest.mark.parametrize("attack", REFUSED)
def test_refused(attack):
    data, reason = REFUSED[attack]
    with pytest.raises(ValueError, match=r"^f: refuses .* at byte .*; expected a pickle of NumPy arrays") as error:
        read_pickle(data, "f")
    assert reason in str(error.value)
    assert str(error.value).isprintable() and len(str(error.value)) < 300


def deep_keys(depth: int) -> bytes:
    """A dict key made of a tuple that doubles ``depth`` times: hashing it would take 2**depth steps."""
    return P2 + b"})" + b"".join(b"q\x00h\x00\x86" for _ in range(depth)) + b"Ns."


BOMBS = {
    "memo index": P2 + b"Nr\xff\xff\xff\x7f.",
    "memo index as text": b"Np" + b"9" * 4000 + b"\n.",
    "memo index too long": b"Np" + b"9" * 400_000 + b"\n.",
    "array built with a huge shape": P2 + RECONSTRUCT + b"cnumpy\nndarray\n" + HUGE + b"\x85C\x01b\x87R.",
    "bytes longer than the file": b"\x80\x04\x8e" + struct.pack("<Q", 1 << 40) + b"abc",
    "bytearray longer than the file": b"\x80\x05\x96" + struct.pack("<Q", 1 << 40) + b"abc",
    "frame longer than the file": b"\x80\x04\x95" + struct.pack("<Q", 1 << 40) + b"N.",
    "nested key": deep_keys(100),
    "nested lists": P2 + b"]" * 300_000 + b"a" * 299_999 + b".",
    "nested tuples": P2 + b")" + b"\x85" * 300_000 + b".",
    "only marks": P2 + b"(" * 300_000 + b"t.",
    "list in itself": P2 + b"]q\x00h\x00a.",
    "one string encoded often": (
        P2
        + b"c_codecs\nencode\nq\x00"
        + text("x" * 50_000)
        + text("latin1")
        + b"\x86q\x01]"
        + b"h\x00h\x01Ra" * 50_000
        + b"."
    ),
    "long number": P2 + b"\x8b" + struct.pack("<I", 400_000) + b"\x7f" * 400_000 + b".",
    "long shape": (
        P2
        + EMPTY_ARRAY
        + b"(K\x01(\x8b"
        + struct.pack("<I", 400_000)
        + b"\x7f" * 400_000
        + b"q\x05h\x05h\x05h\x05t"
        + U1
        + b"\x89C\x00tb."
    ),
    "empty array with long sides": P2
    + EMPTY_ARRAY
    + b"(K\x01(K\x00"
    + HUGE[:-1]
    + b"\x00"
    + HUGE[:-1]
    + b"\x00t"
    + U1
    + b"\x89C\x00tb.",
}


@pytest.mark.timeout(20)
@pytest.mark.parametrize("bomb", BOMBS)
def test_bomb_takes_no_memory(bomb):
    data = BOMBS[bomb]
    tracemalloc.start()
    try:
        read_pickle(data, "f")
    except ValueError as error:
        assert str(error).startswith("f: ") and len(str(error)) < 300
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 1_000_000 + 150 * len(data)


@pytest.mark.parametrize("length", [0, 1, 5, 40, 200, -40, -1])
def test_truncated(length):
    whole = files.python2_pickle({b"labels": [1, 2, 3], b"data": np.arange(96, dtype=np.uint8).reshape(2, 48)})
    data = whole[:length]
    with pytest.raises(ValueError, match=r"^f: .*; expected a pickle"):
        read_pickle(data, "f")


@pytest.mark.parametrize("data", [b"<!DOCTYPE html>\n<html>", b"\x1f\x8b\x08\x00", b"PK\x03\x04", b"\n", b"\x80\x09N."])
def test_not_a_pickle(data):
    with pytest.raises(ValueError, match=r"^f: .*; expected a pickle"):
        read_pickle(data, "f")


@given(st.binary(max_size=200))
@settings(max_examples=300, deadline=None)
def test_any_bytes_give_a_value_or_a_clear_error(data):
    for start in (b"", P2, P2 + EMPTY_ARRAY, P2 + b"}("):
        try:
            read_pickle(start + data, "f")
        except ValueError as error:
            assert str(error).startswith("f: ") and str(error).isprintable()


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_damaged_pickles_give_a_value_or_a_clear_error(data):
    whole = bytearray(pickle.dumps({b"data": np.arange(12, dtype=np.uint8), b"labels": [np.int64(3), 4]}, 2))
    for position in data.draw(st.lists(st.integers(0, len(whole) - 1), min_size=1, max_size=4)):
        whole[position] = data.draw(st.integers(0, 255))
    try:
        read_pickle(bytes(whole), "f")
    except ValueError as error:
        assert str(error).startswith("f: ") and str(error).isprintable()


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner) | st.tuples(inner, inner),
    max_leaves=10,
)


@given(st.dictionaries(st.text(), PLAIN, max_size=4), st.integers(0, 5))
@settings(max_examples=200, deadline=None)
def test_plain_values_come_back(value, protocol):
    assert read_pickle(pickle.dumps(value, protocol), "f") == value


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("code", ["u1", "<i8", ">i4", "<f4", "?", "<u2"])
@pytest.mark.parametrize("order", "CF")
def test_arrays_come_back(protocol, code, order):
    array = np.arange(24).reshape(2, 3, 4).astype(code, order=order)
    back = read_pickle(pickle.dumps({"a": array, "scalars": [array[1, 2, 3], array[0, 0, 0]]}, protocol), "f")
    assert back["a"].dtype == array.dtype
    np.testing.assert_array_equal(back["a"], array)
    assert back["scalars"] == [array[1, 2, 3], array[0, 0, 0]]
    assert type(back["scalars"][0]) in (int, float, bool)


def test_old_names_of_numpy():
    data = pickle.dumps({"a": np.arange(3)}, 2).replace(b"numpy._core.", b"numpy.core.")
    assert read_pickle(data, "f")["a"].tolist() == [0, 1, 2]


def test_python2_text_of_protocol_0():
    assert read_pickle(b"(dp0\nS'label\\x41\\n'\np1\nI01\ns.", "f") == {"labelA\n": True}
