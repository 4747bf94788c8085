"""A network is a tuple of plain layer records, and this module is the whole vocabulary.

Nothing here computes: it imports only the standard library, so that a network can be named, checked, counted
and translated to another framework without JAX. Every number that a framework would otherwise default
(initialisers, padding, strides, bias flags, epsilon, momentum) is written in the record.

Shapes are ``(height, width, channels)`` while the data is an image and ``(features,)`` after `Flatten`.

    python -m cnnjax.networks cifar10_slim
"""

import dataclasses
import difflib
import math
import re
import sys
from collections.abc import Callable, Iterator
from typing import Literal, TypeAlias

Padding: TypeAlias = Literal["SAME", "VALID"] | tuple[tuple[int, int], tuple[int, int]]
Shape: TypeAlias = tuple[int, ...]

# ---------------------------------------------------------------------------------------------------------------------
# Records
# ---------------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Init:
    """How a parameter starts. ``fan_in`` and ``fan_out`` count kernel positions times channels.

    Attributes:
        kind: ``constant`` fills with ``scale``; ``truncated_normal`` draws a normal of standard deviation ``scale``
            cut at two deviations (not rescaled, as TensorFlow does); ``glorot_uniform`` is uniform in
            +-sqrt(6 / (fan_in + fan_out)) (Glorot & Bengio 2010); ``lecun_uniform`` uniform in +-sqrt(3 / fan_in)
            (LeCun 1998); ``he_normal`` a normal of variance 2 / fan_in (He et al. 2015), cut at two deviations and
            rescaled.
        scale: The constant, or the standard deviation; unused by the last three kinds.
    """

    kind: Literal["constant", "truncated_normal", "glorot_uniform", "lecun_uniform", "he_normal"]
    scale: float = 0.0


ZEROS = Init("constant", 0.0)
ONES = Init("constant", 1.0)
GLOROT_UNIFORM = Init("glorot_uniform")


@dataclasses.dataclass(frozen=True)
class Conv:
    """2-D convolution (cross-correlation). Explicit padding is ``((top, bottom), (left, right))`` zeros."""

    features: int
    kernel: tuple[int, int] = (3, 3)
    strides: tuple[int, int] = (1, 1)
    padding: Padding = "VALID"
    use_bias: bool = True
    kernel_init: Init = GLOROT_UNIFORM
    bias_init: Init = ZEROS


@dataclasses.dataclass(frozen=True)
class MaxPool:
    """Largest value of each window; padding never wins."""

    window: tuple[int, int] = (2, 2)
    strides: tuple[int, int] = (2, 2)
    padding: Padding = "VALID"


@dataclasses.dataclass(frozen=True)
class AvgPool:
    """Mean of each window; ``window=None`` takes the whole image. No padding."""

    window: tuple[int, int] | None = None
    strides: tuple[int, int] = (1, 1)


@dataclasses.dataclass(frozen=True)
class BatchNorm:
    """Batch normalisation over all dimensions but the last.

    Training normalises with the batch mean and the biased batch variance; the moving statistics follow
    ``moving = momentum * moving + (1 - momentum) * batch`` and start at mean 0, variance 1.
    """

    momentum: float = 0.9
    epsilon: float = 1e-5
    use_scale: bool = True
    use_bias: bool = True
    scale_init: Init = ONES
    bias_init: Init = ZEROS


@dataclasses.dataclass(frozen=True)
class Relu:
    """max(x, 0)."""


@dataclasses.dataclass(frozen=True)
class Dropout:
    """Zeroes each value with probability ``rate`` in training and divides the rest by ``1 - rate``."""

    rate: float


@dataclasses.dataclass(frozen=True)
class Flatten:
    """Image to vector in height, width, channel order."""


@dataclasses.dataclass(frozen=True)
class Dense:
    """Fully connected layer, ``x @ kernel + bias`` with kernel ``[in, out]``."""

    features: int
    use_bias: bool = True
    kernel_init: Init = GLOROT_UNIFORM
    bias_init: Init = ZEROS


@dataclasses.dataclass(frozen=True)
class Residual:
    """``body(x) + shortcut(x)``; an empty shortcut is the identity."""

    body: "Network"
    shortcut: "Network" = ()


Layer: TypeAlias = Conv | MaxPool | AvgPool | BatchNorm | Relu | Dropout | Flatten | Dense | Residual
Network: TypeAlias = tuple[Layer, ...]

_PREFIX = {
    Conv: "conv",
    MaxPool: "max_pool",
    AvgPool: "avg_pool",
    BatchNorm: "batch_norm",
    Relu: "relu",
    Dropout: "dropout",
    Flatten: "flatten",
    Dense: "dense",
    Residual: "residual",
}


def named_layers(network: Network) -> list[tuple[str, Layer]]:
    """Pairs each layer with its name: the kind and its number among that kind, such as ``conv_2``.

    These names are the parameter paths of every framework and what partition rules match.
    """
    counts: dict[type, int] = {}
    named = []
    for layer in network:
        counts[type(layer)] = counts.get(type(layer), 0) + 1
        named.append((f"{_PREFIX[type(layer)]}_{counts[type(layer)]}", layer))
    return named


# ---------------------------------------------------------------------------------------------------------------------
# Shapes and counts
# ---------------------------------------------------------------------------------------------------------------------


def pad_widths(
    size: tuple[int, int], window: tuple[int, int], strides: tuple[int, int], padding: Padding
) -> tuple[tuple[int, int], tuple[int, int]]:
    """Rows and columns that ``padding`` adds: ``((top, bottom), (left, right))``.

    ``SAME`` gives ``ceil(size / stride)`` outputs and puts the odd row or column last, as TensorFlow does.
    """
    if padding == "VALID":
        return (0, 0), (0, 0)
    if padding == "SAME":
        total = [max((math.ceil(n / s) - 1) * s + k - n, 0) for n, k, s in zip(size, window, strides, strict=True)]
        return (total[0] // 2, total[0] - total[0] // 2), (total[1] // 2, total[1] - total[1] // 2)
    return padding


def _window_output(
    name: str, shape: Shape, window: tuple[int, int], strides: tuple[int, int], padding: Padding
) -> tuple[int, int]:
    if len(shape) != 3:
        raise ValueError(f"{name} needs an image (height, width, channels), but its input has shape {shape}")
    pads = pad_widths((shape[0], shape[1]), window, strides, padding)
    padded = [n + sum(p) for n, p in zip(shape[:2], pads, strict=True)]
    if padded[0] < window[0] or padded[1] < window[1]:
        needed = " x ".join(str(max(1, k - sum(p))) for k, p in zip(window, pads, strict=True))
        raise ValueError(
            f"{name} ({window[0]}x{window[1]} window, padding {padding}) does not fit its input "
            f"{'x'.join(map(str, shape))}: at least {needed} is needed"
        )
    rows, columns = ((n - k) // s + 1 for n, k, s in zip(padded, window, strides, strict=True))
    return rows, columns


def _trace(network: Network, shape: Shape, prefix: str = "") -> Iterator[tuple[str, Layer, Shape, Shape]]:
    """Yields (path, layer, input shape, output shape) of every layer, those inside a Residual included."""
    for name, layer in named_layers(network):
        path, before = prefix + name, shape
        match layer:
            case Conv():
                shape = (*_window_output(path, shape, layer.kernel, layer.strides, layer.padding), layer.features)
            case MaxPool():
                shape = (*_window_output(path, shape, layer.window, layer.strides, layer.padding), shape[-1])
            case AvgPool():
                window = layer.window or (shape[0], shape[1] if len(shape) == 3 else 1)
                shape = (*_window_output(path, shape, window, layer.strides, "VALID"), shape[-1])
            case Flatten():
                shape = (math.prod(shape),)
            case Dense():
                if len(shape) != 1:
                    raise ValueError(f"{path} needs a vector, but its input has shape {shape}: put Flatten before it")
                shape = (layer.features,)
            case Residual():
                body = list(_trace(layer.body, shape, f"{path}/body/"))
                shortcut = list(_trace(layer.shortcut, shape, f"{path}/shortcut/"))
                yield from body
                yield from shortcut
                ends = [rows[-1][3] if rows else before for rows in (body, shortcut)]
                if ends[0] != ends[1]:
                    raise ValueError(f"{path}: its body gives {ends[0]} but its shortcut {ends[1]}: they must agree")
                shape = ends[0]
            case _:
                pass
        yield path, layer, before, shape


@dataclasses.dataclass(frozen=True)
class LayerSummary:
    """One row of `summary`.

    Attributes:
        name: Path of the layer, such as ``residual_1/body/conv_2``.
        output_shape: Without the batch dimension.
        parameters: Trained values.
        statistics: Values that batch norm follows without training them.
        multiply_adds: Of convolutions and dense layers for one image, forward; other layers count 0.
    """

    name: str
    output_shape: Shape
    parameters: int
    statistics: int
    multiply_adds: int


def summary(network: Network, input_shape: Shape) -> list[LayerSummary]:
    """Lists every layer with its output shape, parameters and multiply-adds.

    Args:
        network: Layer records.
        input_shape: ``(height, width, channels)`` of one image.

    Raises:
        ValueError: If a layer cannot take the shape that reaches it; names the layer, the shape, what would fit.
    """
    _check_fit(network, input_shape)
    rows = []
    for path, layer, before, after in _trace(network, input_shape):
        parameters = statistics = multiply_adds = 0
        match layer:
            case Conv():
                weights = math.prod(layer.kernel) * before[-1] * layer.features
                parameters = weights + layer.features * layer.use_bias
                multiply_adds = weights * after[0] * after[1]
            case Dense():
                multiply_adds = before[0] * layer.features
                parameters = multiply_adds + layer.features * layer.use_bias
            case BatchNorm():
                parameters = before[-1] * (layer.use_scale + layer.use_bias)
                statistics = 2 * before[-1]
            case _:
                pass
        rows.append(LayerSummary(path, after, parameters, statistics, multiply_adds))
    return rows


def _fits(network: Network, input_shape: Shape) -> bool:
    try:
        return all(min(after, default=1) > 0 for *_, after in _trace(network, input_shape))
    except ValueError:
        return False


def _check_fit(network: Network, input_shape: Shape) -> Shape:
    """Output shape of the network; on a misfit, adds to the layer's message the input size that would fit."""
    if len(input_shape) != 3 or min(input_shape) < 1:
        raise ValueError(f"input shape {input_shape} is not (height, width, channels), each at least 1")
    try:
        outputs = [after for *_, after in _trace(network, input_shape)]
        return outputs[-1] if outputs else input_shape
    except ValueError as error:
        height, width, channels = input_shape
        larger = next((k for k in range(513) if _fits(network, (height + k, width + k, channels))), None)
        hint = "" if larger is None else f"; an input of {height + larger}x{width + larger}x{channels} would fit"
        raise ValueError(f"{error}{hint}") from None


def output_shape(network: Network, input_shape: Shape) -> Shape:
    """Shape that the network gives for one image of ``input_shape``.

    Raises:
        ValueError: As `summary`.
    """
    return _check_fit(network, input_shape)


# ---------------------------------------------------------------------------------------------------------------------
# Networks by name
# ---------------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Entry:
    """A registered network: its builder, the image shape it was published for, and a line about it."""

    build: Callable[[int], Network]
    input_shape: tuple[int, int, int]
    about: str


REGISTRY: dict[str, Entry] = {}


def register(name: str, input_shape: tuple[int, int, int], about: str) -> Callable:
    """Decorator that makes ``build(num_classes) -> Network`` known to `build_cnn` as ``name``."""

    def add(build: Callable[[int], Network]) -> Callable[[int], Network]:
        REGISTRY[name] = Entry(build, input_shape, about)
        return build

    return add


def _stacked(convolutions: int, dense: int, num_classes: int) -> Network:
    """The 3+3 network of the article, for any counts.

    Convolution i has 32 * 2^i filters (at most 256), 3x3 VALID; the first two are pooled unless they are the last.
    Hidden dense layers halve from 128 (at least 16); dropout follows the first.
    """
    layers: list[Layer] = []
    for i in range(convolutions):
        layers += [Conv(min(32 * 2**i, 256)), Relu()]
        if i < min(convolutions - 1, 2):
            layers.append(MaxPool())
    layers.append(Flatten())
    for i in range(dense - 1):
        layers += [Dense(max(128 // 2**i, 16)), Relu()]
        if i == 0:
            layers.append(Dropout(0.5))
    return (*layers, Dense(num_classes))


@register(
    "cnn2d_3layer_fullconnected_3layer", (32, 32, 1), "3 convolutions and 3 dense layers, as its article prints it"
)
def _three_three(num_classes: int) -> Network:
    return _stacked(3, 3, num_classes)


@register("cnn2d_3layer_fullconnected_3layer_mnist", (28, 28, 1), "the 3+3 network as the 2016 project ran it on MNIST")
def _three_three_mnist(num_classes: int) -> Network:
    lecun = Init("lecun_uniform")
    one = ((1, 1), (1, 1))
    return (
        *(Conv(32, padding=one), Relu()),
        *(Conv(48, padding=one), Relu(), MaxPool()),
        *(Conv(32, padding=one), Relu(), MaxPool()),
        Flatten(),
        *(Dense(128, kernel_init=lecun), Relu(), Dropout(0.25)),
        *(Dense(128, kernel_init=lecun), Relu(), Dropout(0.25)),
        Dense(num_classes, kernel_init=lecun),
    )


@register(
    "cnn2d_2layer_full_connected_2layer",
    (28, 28, 1),
    "2 wide convolutions and 2 dense layers, native TensorFlow's tutorial shape",
)
def _two_two(num_classes: int) -> Network:
    normal, tenth = Init("truncated_normal", 0.1), Init("constant", 0.1)
    return (
        *(Conv(32, (5, 5), padding="SAME", kernel_init=normal, bias_init=tenth), Relu(), MaxPool()),
        *(Conv(64, (5, 5), padding="SAME", kernel_init=normal, bias_init=tenth), Relu(), MaxPool()),
        Flatten(),
        *(Dense(1024, kernel_init=normal, bias_init=tenth), Relu(), Dropout(0.5)),
        Dense(num_classes, kernel_init=normal, bias_init=tenth),
    )


@register("cifar10_slim", (32, 32, 3), "5 convolutions and 1 dense layer, each with batch norm, of the 2018 cluster")
def _cifar10_slim(num_classes: int) -> Network:
    norm = BatchNorm(momentum=0.995, epsilon=0.001, use_scale=False)

    def conv(features: int, size: int, stride: int, padding: Padding) -> Network:
        return (Conv(features, (size, size), (stride, stride), padding, use_bias=False), norm, Relu())

    return (
        *conv(32, 3, 2, "VALID"),
        *conv(32, 3, 1, "VALID"),
        *conv(64, 3, 1, "SAME"),
        MaxPool((3, 3), (2, 2)),
        *conv(80, 1, 1, "VALID"),
        *conv(192, 3, 1, "VALID"),
        MaxPool((2, 2), (2, 2)),
        Flatten(),
        Dropout(0.2),
        Dense(num_classes, use_bias=False),
        norm,
    )


@register("resnet18_cifar", (32, 32, 3), "ResNet-18 (He et al. 2015) with the 3x3 stem usual for 32x32 images")
def _resnet18_cifar(num_classes: int) -> Network:
    def conv(features: int, size: int = 3, stride: int = 1) -> Network:
        pad = (size // 2, size // 2)
        init = Init("he_normal")
        return (
            Conv(features, (size, size), (stride, stride), (pad, pad), use_bias=False, kernel_init=init),
            BatchNorm(),
        )

    def block(features: int, stride: int, widens: bool) -> Network:
        body = (*conv(features, stride=stride), Relu(), *conv(features))
        return (Residual(body, conv(features, 1, stride) if widens else ()), Relu())

    layers: list[Layer] = [*conv(64), Relu()]
    for stage, features in enumerate((64, 128, 256, 512)):
        layers += block(features, 1 if stage == 0 else 2, widens=stage > 0)
        layers += block(features, 1, widens=False)
    return (*layers, AvgPool(), Flatten(), Dense(num_classes))


_GRAMMAR = re.compile(r"cnn2d_([1-9]\d?)layer_full_?connected_([1-9]\d?)layer")


def _find(name: str) -> Entry:
    # "fullconnected" and "full_connected" are one word in the old projects: both spellings name the same network.
    by_spelling = {key.replace("full_connected", "fullconnected"): entry for key, entry in REGISTRY.items()}
    found = by_spelling.get(name.replace("full_connected", "fullconnected"))
    if found is not None:
        return found
    if parts := _GRAMMAR.fullmatch(name):
        n, m = int(parts[1]), int(parts[2])
        return Entry(lambda classes: _stacked(n, m, classes), (32, 32, 1), f"{n} convolutions and {m} dense layers")
    near = difflib.get_close_matches(name, REGISTRY, n=3, cutoff=0.4) or list(REGISTRY)
    raise ValueError(
        f"unknown network {name!r}; nearest: {', '.join(near)} "
        "(also cnn2d_{n}layer_fullconnected_{m}layer for any counts)"
    )


def build_cnn(name: str, num_classes: int) -> Network:
    """Returns the layers of a registered network, or of one that the name grammar describes.

    Args:
        name: A key of `REGISTRY`, or ``cnn2d_{n}layer_full[_]connected_{m}layer`` with n convolutions and m dense
            layers.
        num_classes: Number of outputs, at least 1 (1 for regression).

    Raises:
        ValueError: If the name is unknown (the nearest names are given) or ``num_classes`` below 1.

    Example:
        >>> build_cnn("cnn2d_1layer_fullconnected_1layer", 10)[-1].features
        10
    """
    entry = _find(name)
    if num_classes < 1:
        raise ValueError(f"num_classes is {num_classes}; at least 1 is needed")
    return entry.build(num_classes)


def default_input_shape(name: str) -> tuple[int, int, int]:
    """Image shape that the named network was published for.

    Raises:
        ValueError: If the name is unknown.
    """
    return _find(name).input_shape


# ---------------------------------------------------------------------------------------------------------------------
# Command line
# ---------------------------------------------------------------------------------------------------------------------


def format_summary(network: Network, input_shape: Shape) -> str:
    """The table of `summary` as text, with totals."""
    rows = summary(network, input_shape)
    cells = [("layer", "output", "parameters", "multiply-adds")]
    cells += [(r.name, "x".join(map(str, r.output_shape)), f"{r.parameters:,}", f"{r.multiply_adds:,}") for r in rows]
    parameters, multiply_adds = (sum(getattr(r, f) for r in rows) for f in ("parameters", "multiply_adds"))
    cells.append(("total", "", f"{parameters:,}", f"{multiply_adds:,}"))
    widths = [max(len(row[i]) for row in cells) for i in range(4)]
    lines = [f"{a:<{widths[0]}}  {b:<{widths[1]}}  {c:>{widths[2]}}  {d:>{widths[3]}}".rstrip() for a, b, c, d in cells]
    rule = "-" * max(map(len, lines))
    lines = [lines[0], rule, *lines[1:-1], rule, lines[-1]]
    if statistics := sum(r.statistics for r in rows):
        lines.append(f"and {statistics:,} moving statistics of batch norm, not trained")
    return "\n".join(lines)


def main(arguments: list[str]) -> int:
    """``python -m cnnjax.networks [NAME [CLASSES [HEIGHT,WIDTH,CHANNELS]]]``: the summary, or the known names."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print("usage: python -m cnnjax.networks NAME [CLASSES [HEIGHT,WIDTH,CHANNELS]]\n\nnetworks:")
        for name, entry in REGISTRY.items():
            print(f"  {name:<40} {'x'.join(map(str, entry.input_shape)):<8} {entry.about}")
        print("  cnn2d_{n}layer_fullconnected_{m}layer    any counts of convolutions and dense layers that fit")
        return 0
    try:
        if len(arguments) > 3:
            raise ValueError(f"at most 3 arguments (NAME, CLASSES, HEIGHT,WIDTH,CHANNELS); got {len(arguments)}")
        name = arguments[0]
        classes = arguments[1] if len(arguments) > 1 else "10"
        shape = arguments[2] if len(arguments) > 2 else None
        if not classes.isdecimal():
            raise ValueError(f"CLASSES is {classes!r}; a whole number is needed")
        network = build_cnn(name, int(classes))
        if shape is not None and not re.fullmatch(r"\d+,\d+,\d+", shape):
            raise ValueError(f"the image shape is {shape!r}; HEIGHT,WIDTH,CHANNELS is needed, such as 32,32,3")
        input_shape = default_input_shape(name) if shape is None else tuple(map(int, shape.split(",")))
        print(f"{name}: {classes} classes, input {'x'.join(map(str, input_shape))}\n")
        print(format_summary(network, input_shape))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
