"""Pickles read as data: an interpreter with nothing in it to call.

``pickle.load`` runs what a file names, and stays risky with a restricted ``find_class``: the callables that remain take
odd arguments, BUILD sets attributes, hashing nested tuples never ends, and a huge memo index or shape fills the memory.
Here a global is only a name. The few names that NumPy writes are understood, everything else is refused by its name,
and time and memory stay in proportion to the size of the file.
"""

import codecs
import math
import struct
import warnings
from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np

from cnnjax.datasets.files import beginning

EXPECTED = "a pickle of NumPy arrays, numbers, text, lists and dicts"

_ENCODE = "_codecs.encode"
_NDARRAY = "numpy.ndarray"
_DTYPE = "numpy.dtype"
_BYTES = "builtins.bytes"
_RECONSTRUCT = "numpy._core.multiarray._reconstruct"
_SCALAR = "numpy._core.multiarray.scalar"
_FROM_BUFFER = "numpy._core.numeric._frombuffer"

# Each global that NumPy and Python write, in the spelling of every version, by module and name.
_KNOWN = {
    ("_codecs", "encode"): _ENCODE,
    ("numpy", "ndarray"): _NDARRAY,
    ("numpy", "dtype"): _DTYPE,
    ("builtins", "bytes"): _BYTES,
    ("__builtin__", "bytes"): _BYTES,
    ("numpy.core.multiarray", "_reconstruct"): _RECONSTRUCT,
    ("numpy._core.multiarray", "_reconstruct"): _RECONSTRUCT,
    ("numpy.core.multiarray", "scalar"): _SCALAR,
    ("numpy._core.multiarray", "scalar"): _SCALAR,
    ("numpy.core.numeric", "_frombuffer"): _FROM_BUFFER,
    ("numpy._core.numeric", "_frombuffer"): _FROM_BUFFER,
}
_NUMBER_TYPES = frozenset(["b1", "u1", "u2", "u4", "u8", "i1", "i2", "i4", "i8", "f2", "f4", "f8"])


def read_pickle(data: bytes, file: str) -> object:
    """The value that a pickle holds. Text is str, and so are dict keys; arrays are NumPy arrays of numbers.

    Args:
        data: The bytes of the pickle, protocol 0 to 5, written by Python 2 or 3.
        file: Name of the file, for messages.

    Returns:
        The value; byte strings, which Python 2 used for text, stay bytes except as dict keys.

    Raises:
        ValueError: If the bytes are no pickle, end early, or ask for anything but plain data.
    """
    if not data:
        raise ValueError(f"{file}: the file is empty; expected {EXPECTED}")
    if data[0] not in _OPERATIONS and data[0] not in _REFUSED:
        raise ValueError(f"{file}: begins with {beginning(data)}; expected {EXPECTED}")
    reader = _Reader(data)
    try:
        return reader.run()
    except _RefusedError as error:
        raise ValueError(f"{file}: refuses {error} at byte {reader.start}; expected {EXPECTED}") from None
    except (_MalformedError, ValueError, IndexError) as error:
        # UnicodeDecodeError, a bad number and an empty stack also mean a damaged file.
        reason = str(error) if isinstance(error, _MalformedError) else "the bytes make no sense"
        where = f"byte {reader.start} of {len(data)}, in a file that begins with {beginning(data)}"
        raise ValueError(f"{file}: {reason} at {where}; expected {EXPECTED}") from None


class _RefusedError(Exception):
    """The pickle asks for something that is not plain data."""


class _MalformedError(Exception):
    """The bytes are not a whole pickle."""


class _Global:
    """A name that the pickle mentions. There is nothing behind it."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name


class _Type:
    """A dtype as the pickle builds it: its code first, its byte order later."""

    __slots__ = ("code", "order")

    def __init__(self, code: str) -> None:
        self.code = code
        self.order = "|"

    def dtype(self) -> np.dtype:
        return np.dtype(("" if self.order == "|" else self.order) + self.code)


class _Array:
    """An array as the pickle builds it: empty first, its contents later."""

    __slots__ = ("array",)

    def __init__(self) -> None:
        self.array: np.ndarray | None = None


class _Mark:
    __slots__ = ()


_MARK = _Mark()


def _text(value: object) -> str:
    """Text, however the writing Python stored it."""
    if isinstance(value, bytes):
        return value.decode("latin-1")
    if isinstance(value, str):
        return value
    raise _MalformedError("finds no text where a name belongs")


def _printable(name: str) -> str:
    """A name from the file, safe to print on one line."""
    return name[:80].encode("unicode_escape").decode("ascii")


def _kind(value: object) -> str:
    """What a value is, for messages."""
    if isinstance(value, _Global):
        return _printable(value.name)
    return {_Type: _DTYPE, _Array: _NDARRAY, _Mark: "a mark"}.get(type(value), type(value).__name__)


class _Reader:
    """One pass over the bytes of a pickle. ``start`` is where the current instruction begins."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.start = 0
        self.position = 0
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}
        # Honest files encode each string once; a file that repeats a long one would multiply its size in memory.
        self.encode_budget = len(data)

    def run(self) -> object:
        data, operations = self.data, _OPERATIONS
        while True:
            self.start = self.position
            if self.start >= len(data):
                raise _MalformedError("the file ends before the pickle does")
            code = data[self.start]
            self.position = self.start + 1
            if code == 0x2E:  # STOP
                return _finished(self.pop())
            operation = operations.get(code)
            if operation is None:
                self.refuse(code)
            else:
                operation(self)

    def refuse(self, code: int) -> None:
        if code in _REFUSED:
            what = _REFUSED[code]
            if code == ord("i"):
                what = _printable(f"{self.line().decode('latin-1')}.{self.line().decode('latin-1')}")
            raise _RefusedError(what)
        raise _MalformedError(f"instruction {code:#04x} is unknown")

    # Bytes

    def take(self, count: int) -> bytes:
        end = self.position + count
        if end > len(self.data):
            raise _MalformedError(f"the file ends {end - len(self.data)} bytes early")
        taken = self.data[self.position : end]
        self.position = end
        return taken

    def sized(self, width: int) -> bytes:
        return self.take(int.from_bytes(self.take(width), "little"))

    def line(self) -> bytes:
        end = self.data.find(b"\n", self.position)
        if end < 0:
            raise _MalformedError("the file ends inside a line")
        taken = self.data[self.position : end]
        self.position = end + 1
        return taken

    # Stack

    def push(self, value: object) -> None:
        self.stack.append(value)

    def pop(self) -> Any:
        value = self.stack.pop()
        if value is _MARK:
            raise _MalformedError("a value is missing")
        return value

    def pop_to_mark(self) -> list[Any]:
        for index in range(len(self.stack) - 1, -1, -1):
            if self.stack[index] is _MARK:
                items = self.stack[index + 1 :]
                del self.stack[index:]
                return items
        raise _MalformedError("a mark is missing")

    def top(self, kind: type) -> Any:
        value = self.stack[-1]
        if type(value) is not kind:
            raise _RefusedError(f"to add items to {_kind(value)}")
        return value

    def remember(self, index: int) -> None:
        if self.stack[-1] is _MARK:
            raise _MalformedError("a value is missing")
        self.memo[index] = self.stack[-1]

    def recall(self, index: int) -> None:
        if index not in self.memo:
            raise _MalformedError(f"memo {index} is empty")
        self.push(self.memo[index])

    def pop_tuple(self, length: int) -> None:
        items = [self.pop() for _ in range(length)]
        self.push(tuple(reversed(items)))

    # Containers

    def append(self) -> None:
        value = self.pop()
        self.top(list).append(value)

    def extend(self) -> None:
        items = self.pop_to_mark()
        self.top(list).extend(items)

    def set_item(self) -> None:
        value = self.pop()
        key = self.pop()
        self.top(dict).update(_dict([key, value]))

    def set_items(self) -> None:
        items = self.pop_to_mark()
        self.top(dict).update(_dict(items))

    # Text of protocol 0

    def quoted(self) -> None:
        line = self.line()
        if len(line) < 2 or line[:1] not in b"'\"" or line[-1:] != line[:1]:
            raise _MalformedError("a string has no quotes")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # an unknown escape stands for itself
            self.push(codecs.escape_decode(line[1:-1])[0])

    def integer(self) -> None:
        line = self.line()
        self.push({b"00": False, b"01": True}[line] if line in (b"00", b"01") else int(line.rstrip(b"L")))

    # Globals

    def global_line(self) -> None:
        module = self.line().decode("latin-1")
        self.push_global(module, self.line().decode("latin-1"))

    def global_stack(self) -> None:
        name = _text(self.pop())
        self.push_global(_text(self.pop()), name)

    def push_global(self, module: str, name: str) -> None:
        known = _KNOWN.get((module, name))
        if known is None:
            raise _RefusedError(_printable(f"{module}.{name}"))
        self.push(_Global(known))

    def reduce(self) -> None:
        arguments = self.pop()
        function = self.pop()
        if not isinstance(function, _Global) or type(arguments) is not tuple:
            raise _RefusedError(f"to call {_kind(function)}")
        makers: dict[str, Callable[[tuple], object]] = {
            _ENCODE: self.make_bytes,
            _BYTES: lambda arguments: b"" if not arguments else _odd(_BYTES),
            _DTYPE: _make_type,
            _RECONSTRUCT: _make_array,
            _SCALAR: _make_scalar,
            _FROM_BUFFER: _make_array_from_buffer,
        }
        if function.name not in makers:
            raise _RefusedError(f"to call {function.name}")
        self.push(makers[function.name](arguments))

    def make_bytes(self, arguments: tuple) -> bytes:
        # Protocols 0 to 2 of Python 3 write bytes as text that is to be encoded.
        if len(arguments) != 2 or type(arguments[0]) is not str or _text(arguments[1]) not in ("latin1", "latin-1"):
            _odd(_ENCODE)
        self.encode_budget -= len(arguments[0])
        if self.encode_budget < 0:
            raise _RefusedError("more bytes than the file has room for")
        return arguments[0].encode("latin-1")

    def build(self) -> None:
        state = self.pop()
        target = self.stack[-1]
        if isinstance(target, _Type):
            _build_type(target, state)
        elif isinstance(target, _Array):
            _build_array(target, state)
        else:
            raise _RefusedError(f"to set the state of {_kind(target)}")


def _odd(name: str) -> NoReturn:
    raise _RefusedError(f"{name} with unusual arguments")


def _dict(items: list[Any]) -> dict[str, object]:
    if len(items) % 2:
        raise _MalformedError("a dict has a key without a value")
    # Text keys only: hashing nested tuples or chosen numbers takes unbounded time.
    result: dict[str, object] = {}
    for key, value in zip(items[::2], items[1::2], strict=True):
        if type(key) not in (bytes, str):
            raise _RefusedError(f"a dict key that is {_kind(key)}")
        result[_text(key)] = value
    return result


def _make_type(arguments: tuple) -> _Type:
    code = _text(arguments[0]) if arguments and isinstance(arguments[0], (bytes, str)) else ""
    if (
        len(arguments) > 3
        or code not in _NUMBER_TYPES
        or not all(type(value) in (bool, int) for value in arguments[1:])
    ):
        raise _RefusedError(f"{_DTYPE}({_printable(code)!r})")
    return _Type(code)


def _build_type(target: _Type, state: object) -> None:
    if type(state) is not tuple or len(state) not in (8, 9) or state[2:5] != (None, None, None):
        _odd(_DTYPE)
    order = _text(state[1])
    if order not in ("|", "<", ">", "="):
        _odd(_DTYPE)
    target.order = order


def _make_array(arguments: tuple) -> _Array:
    if len(arguments) != 3 or not isinstance(arguments[0], _Global) or arguments[0].name != _NDARRAY:
        _odd(_RECONSTRUCT)
    # The shape given here is a dummy; memory is only ever taken for bytes that are in the file.
    return _Array()


def _build_array(target: _Array, state: object) -> None:
    if type(state) is not tuple or len(state) != 5 or not isinstance(state[2], _Type):
        _odd(_NDARRAY)
    _, shape, kind, column_order, raw = state
    target.array = _array(raw, kind, shape, bool(column_order))


def _make_array_from_buffer(arguments: tuple) -> _Array:
    if len(arguments) != 4 or not isinstance(arguments[1], _Type) or arguments[3] not in ("C", "F"):
        _odd(_FROM_BUFFER)
    target = _Array()
    target.array = _array(arguments[0], arguments[1], arguments[2], arguments[3] == "F")
    return target


def _make_scalar(arguments: tuple) -> int | float | bool:
    if len(arguments) != 2 or not isinstance(arguments[0], _Type):
        _odd(_SCALAR)
    return _array(arguments[1], arguments[0], (), False).item()


def _array(raw: object, kind: _Type, shape: object, column_order: bool) -> np.ndarray:
    """The array over bytes that are already in memory; no copy."""
    if not isinstance(raw, (bytes, bytearray)):
        raise _RefusedError(f"an array made from {_kind(raw)}")
    if (
        type(shape) is not tuple
        or len(shape) > 8
        or not all(type(size) is int and 0 <= size < 1 << 40 for size in shape)
    ):
        raise _RefusedError("an array with an unusual shape")
    dtype = kind.dtype()
    if math.prod(shape) * dtype.itemsize != len(raw):
        raise _RefusedError(f"an array whose shape does not fit its {len(raw)} bytes")
    flat = np.frombuffer(raw, dtype)
    return flat.reshape(shape[::-1]).T if column_order else flat.reshape(shape)


def _finished(value: object) -> object:
    """The value with arrays in place of their builders. Data files hold arrays directly in their dict, not deeper."""
    if isinstance(value, _Array):
        return value.array
    if isinstance(value, dict):
        return {key: item.array if isinstance(item, _Array) else item for key, item in value.items()}
    return value


_Operation = Callable[[_Reader], None]

_OPERATIONS: dict[int, _Operation] = {
    ord(code): operation
    for code, operation in {
        # Protocol, frames and the memo
        "\x80": lambda r: _check_protocol(r.take(1)[0]),
        "\x95": lambda r: r.take(8) and None,
        "p": lambda r: r.remember(int(r.line())),
        "q": lambda r: r.remember(r.take(1)[0]),
        "r": lambda r: r.remember(int.from_bytes(r.take(4), "little")),
        "\x94": lambda r: r.remember(len(r.memo)),
        "g": lambda r: r.recall(int(r.line())),
        "h": lambda r: r.recall(r.take(1)[0]),
        "j": lambda r: r.recall(int.from_bytes(r.take(4), "little")),
        # Numbers
        "N": lambda r: r.push(None),
        "\x88": lambda r: r.push(True),
        "\x89": lambda r: r.push(False),
        "I": _Reader.integer,
        "L": _Reader.integer,
        "J": lambda r: r.push(int.from_bytes(r.take(4), "little", signed=True)),
        "K": lambda r: r.push(r.take(1)[0]),
        "M": lambda r: r.push(int.from_bytes(r.take(2), "little")),
        "\x8a": lambda r: r.push(int.from_bytes(r.sized(1), "little", signed=True)),
        "\x8b": lambda r: r.push(int.from_bytes(r.sized(4), "little", signed=True)),
        "F": lambda r: r.push(float(r.line())),
        "G": lambda r: r.push(struct.unpack(">d", r.take(8))[0]),
        # Text and bytes
        "S": _Reader.quoted,
        "U": lambda r: r.push(r.sized(1)),
        "T": lambda r: r.push(r.sized(4)),
        "V": lambda r: r.push(r.line().decode("raw-unicode-escape")),
        "X": lambda r: r.push(r.sized(4).decode("utf-8", "surrogatepass")),
        "\x8c": lambda r: r.push(r.sized(1).decode("utf-8", "surrogatepass")),
        "\x8d": lambda r: r.push(r.sized(8).decode("utf-8", "surrogatepass")),
        "B": lambda r: r.push(r.sized(4)),
        "C": lambda r: r.push(r.sized(1)),
        "\x8e": lambda r: r.push(r.sized(8)),
        "\x96": lambda r: r.push(r.sized(8)),
        # Containers
        "(": lambda r: r.push(_MARK),
        ")": lambda r: r.push(()),
        "t": lambda r: r.push(tuple(r.pop_to_mark())),
        "\x85": lambda r: r.pop_tuple(1),
        "\x86": lambda r: r.pop_tuple(2),
        "\x87": lambda r: r.pop_tuple(3),
        "]": lambda r: r.push([]),
        "l": lambda r: r.push(r.pop_to_mark()),
        "a": _Reader.append,
        "e": _Reader.extend,
        "}": lambda r: r.push({}),
        "d": lambda r: r.push(_dict(r.pop_to_mark())),
        "s": _Reader.set_item,
        "u": _Reader.set_items,
        # Names
        "c": _Reader.global_line,
        "\x93": _Reader.global_stack,
        "R": _Reader.reduce,
        "b": _Reader.build,
    }.items()
}

# Instructions that real pickles may hold, but that plain data never needs.
_REFUSED = {
    ord("P"): "a persistent id",
    ord("Q"): "a persistent id",
    ord("i"): "an instance",
    ord("o"): "to build an object",
    ord("\x81"): "to build an object",
    ord("\x92"): "to build an object",
    ord("\x82"): "an extension code",
    ord("\x83"): "an extension code",
    ord("\x84"): "an extension code",
    ord("\x97"): "a buffer outside the file",
    ord("\x98"): "a buffer outside the file",
    ord("\x8f"): "a set",
    ord("\x90"): "a set",
    ord("\x91"): "a set",
    ord("0"): "to drop a value",
    ord("1"): "to drop a value",
    ord("2"): "to copy a value",
}


def _check_protocol(protocol: int) -> None:
    if protocol > 5:
        raise _MalformedError(f"pickle protocol {protocol} is unknown")
