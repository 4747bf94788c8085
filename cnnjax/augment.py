"""Augmentation and input scaling: pure functions of (sample keys, images).

Every draw for a sample comes from that sample's own key, so a row does not depend on the batch size, on its place in
the batch or on the device that holds it. Each kind of augmentation folds a constant of its own into the key, so
switching one on does not change what another draws. Draws are float32 or int32 whatever ``jax_enable_x64`` says, so
float32 and float64 runs see the same augmentation.

Images are floating point already. Photometric options are in pixel units (0 to 255), so augmentation comes before
scaling.

Shape suffixes: B batch, H rows, W columns, C channels.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Scaling = Literal["none", "unit", "standardize", "per_image", "minmax"]

# Renumbering these changes every augmented run.
_FLIP, _CROP, _CROP_TO, _BRIGHTNESS, _CONTRAST, _TRANSLATE, _CUTOUT, _MIXUP, _OTHER = range(1, 10)


@dataclasses.dataclass(frozen=True)
class Augmentation:
    """Which augmentations are on. The default changes nothing.

    Attributes:
        flip: Mirror left-right with probability 1/2.
        crop_padding: Pixels of zeros added to each side before a crop of the original size; 0 is off.
        crop_to: Side length in pixels of a smaller crop, random in training and central in evaluation.
        brightness: Largest shift in pixel units, drawn from [-brightness, brightness); 0 is off.
        contrast: (lowest, highest) contrast factor; None is off.
        translate: Largest shift in pixels, down or up and left or right, with edges repeated; 0 is off.
        cutout: Side length in pixels of a square that is painted over; 0 is off.
        cutout_fill: What it is painted with, in pixel units: one number a channel, or one for all.

    Raises:
        ValueError: A value is outside its range, or both crops are on.
    """

    flip: bool = False
    crop_padding: int = 0
    crop_to: int | None = None
    brightness: float = 0.0
    contrast: tuple[float, float] | None = None
    translate: int = 0
    cutout: int = 0
    cutout_fill: tuple[float, ...] = (0.0,)

    def __post_init__(self):
        for name in ("crop_padding", "translate", "cutout"):
            _check_pixels(name, getattr(self, name))
        if self.crop_to is not None and self.crop_to < 1:
            raise ValueError(f"crop_to is {self.crop_to}; it must be None or at least 1 pixel")
        if self.crop_padding and self.crop_to is not None:
            raise ValueError(
                f"crop_padding is {self.crop_padding} and crop_to is {self.crop_to}; only one of them can be on"
            )
        _check_brightness("brightness", self.brightness)
        if self.contrast is not None:
            if len(self.contrast) != 2:
                raise ValueError(f"contrast is {self.contrast}; it must be None or a pair (lowest, highest)")
            _check_contrast("contrast", *self.contrast)

    @property
    def is_random(self) -> bool:
        """Whether training images depend on the sample keys."""
        pixels = self.crop_padding or self.crop_to is not None or self.translate or self.cutout
        return bool(self.flip or pixels or self.brightness or self.contrast is not None)


def sample_keys(key: jax.Array, index_B: jax.Array) -> jax.Array:
    """Returns one key per sample.

    Args:
        key: A typed key (`jax.random.key`), usually with the seed and the epoch or step folded in.
        index_B: Int32 [B], global sample numbers.

    Returns:
        Typed keys [B]; row i depends on ``key`` and ``index_B[i]`` only.

    Raises:
        ValueError: ``key`` is a raw uint32 key, or its generator is not Threefry.
    """
    if not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        raise ValueError(f"key has dtype {key.dtype}; it must be a typed key, as made by jax.random.key(seed)")
    # Under vmap the "rbg" generators draw a whole batch from its first key, so that a row depends on its neighbours.
    implementation = str(jax.random.key_impl(key))
    if implementation != "threefry2x32":
        raise ValueError(
            f"key uses the {implementation!r} generator; only 'threefry2x32' (the default of jax.random.key) draws "
            "each row from its own key"
        )
    return jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, index_B)


def augment(options: Augmentation, sample_keys_B: jax.Array | None, x_BHWC: jax.Array, *, train: bool) -> jax.Array:
    """Applies the options in the order translate, crop, flip, brightness, contrast, cutout.

    Values may leave 0 to 255: brightness and contrast do not clip.

    Args:
        options: What is on.
        sample_keys_B: Typed keys [B] from `sample_keys`; not read in evaluation, where None will do.
        x_BHWC: Floating-point images in pixel units.
        train: False applies only the central crop, where ``crop_to`` is set.

    Returns:
        Images in the dtype of ``x_BHWC``, [B, crop_to, crop_to, C] where ``crop_to`` is set, else [B, H, W, C].

    Raises:
        ValueError: The images are not floating-point BHWC, ``crop_to`` exceeds them, or keys are missing in training.
    """
    _check_images(x_BHWC)
    if not train:
        return x_BHWC if options.crop_to is None else center_crop(x_BHWC, options.crop_to)
    if not options.is_random:
        return x_BHWC
    if sample_keys_B is None:
        raise ValueError(f"sample_keys_B is None; training with {options} needs one key per sample")
    if options.translate:
        x_BHWC = random_translate(sample_keys_B, x_BHWC, options.translate)
    if options.crop_padding:
        x_BHWC = random_crop(sample_keys_B, x_BHWC, options.crop_padding)
    if options.crop_to is not None:
        x_BHWC = random_crop_to(sample_keys_B, x_BHWC, options.crop_to)
    if options.flip:
        x_BHWC = random_flip(sample_keys_B, x_BHWC)
    if options.brightness:
        x_BHWC = random_brightness(sample_keys_B, x_BHWC, options.brightness)
    if options.contrast is not None:
        x_BHWC = random_contrast(sample_keys_B, x_BHWC, *options.contrast)
    if options.cutout:
        x_BHWC = cutout(sample_keys_B, x_BHWC, options.cutout, options.cutout_fill)
    return x_BHWC


def random_flip(sample_keys_B: jax.Array, x_BHWC: jax.Array) -> jax.Array:
    """Mirrors each image left-right with probability 1/2; shape and dtype stay."""
    _check_images(x_BHWC)
    flip_B = _uniform(sample_keys_B, _FLIP, 0.0, 1.0) < 0.5
    return jnp.where(flip_B[:, None, None, None], x_BHWC[:, :, ::-1], x_BHWC)


def random_crop(sample_keys_B: jax.Array, x_BHWC: jax.Array, padding: int = 4) -> jax.Array:
    """Pads each side with zeros, then crops a window of the original size at a random place.

    Args:
        sample_keys_B: Typed keys [B].
        x_BHWC: Floating-point images.
        padding: Pixels on each side, at least 0. Each offset is uniform over 0..2*padding.

    Returns:
        [B, H, W, C] in the dtype of ``x_BHWC``.

    Raises:
        ValueError: ``padding`` is negative or the images are not floating-point BHWC.
    """
    _check_images(x_BHWC)
    _check_pixels("padding", padding)
    _, height, width, _ = x_BHWC.shape
    padded_BHWC = jnp.pad(x_BHWC, ((0, 0), (padding, padding), (padding, padding), (0, 0)))
    return _random_window(sample_keys_B, _CROP, padded_BHWC, height, width)


def random_translate(sample_keys_B: jax.Array, x_BHWC: jax.Array, pixels: int) -> jax.Array:
    """Shifts each image by up to ``pixels`` rows and columns, each shift equally likely; edges are repeated.

    Args:
        sample_keys_B: Typed keys [B].
        x_BHWC: Floating-point images.
        pixels: Largest shift in each direction, at least 0.

    Returns:
        [B, H, W, C] in the dtype of ``x_BHWC``.

    Raises:
        ValueError: ``pixels`` is negative or the images are not floating-point BHWC.
    """
    _check_images(x_BHWC)
    _check_pixels("pixels", pixels)
    _, height, width, _ = x_BHWC.shape
    padded_BHWC = jnp.pad(x_BHWC, ((0, 0), (pixels, pixels), (pixels, pixels), (0, 0)), mode="edge")
    return _random_window(sample_keys_B, _TRANSLATE, padded_BHWC, height, width)


def cutout(
    sample_keys_B: jax.Array, x_BHWC: jax.Array, size: int, fill: Sequence[float] | np.ndarray = (0.0,)
) -> jax.Array:
    """Paints over one square in each image, as in DeVries and Taylor 2017 (https://arxiv.org/abs/1708.04552).

    The square's centre is any pixel of the image, each equally likely, so that squares at an edge are cut off there.

    Args:
        sample_keys_B: Typed keys [B].
        x_BHWC: Floating-point images.
        size: Side length in pixels, at least 0; an even square reaches one pixel further up and left of its centre.
        fill: Concrete numbers, one per channel or one for all; the mean of the training images changes least.

    Returns:
        [B, H, W, C] in the dtype of ``x_BHWC``.

    Raises:
        ValueError: ``size`` is negative, ``fill`` does not fit, or the images are not floating-point BHWC.
    """
    _check_images(x_BHWC)
    _check_pixels("size", size)
    fill_C = jnp.asarray(_channel_numbers("fill", fill, x_BHWC, "cutout"), x_BHWC.dtype)
    sides = x_BHWC.shape[1:3]
    centre_B2 = _draw(
        sample_keys_B, _CUTOUT, lambda key: jax.random.randint(key, (2,), 0, jnp.array(sides, jnp.int32), jnp.int32)
    )
    first_B2 = centre_B2 - size // 2

    def inside(axis: int) -> jax.Array:
        place = jnp.arange(sides[axis], dtype=jnp.int32)
        first_B1 = first_B2[:, axis, None]
        return (place >= first_B1) & (place < first_B1 + size)

    painted_BHW1 = inside(0)[:, :, None, None] & inside(1)[:, None, :, None]
    return jnp.where(painted_BHW1, fill_C, x_BHWC)


def mixup_share(sample_keys_B: jax.Array, alpha: float) -> jax.Array:
    """What each image keeps of itself where two are mixed: drawn from Beta(alpha, alpha), float32 ``[B]``.

    Zhang et al. 2018 (https://arxiv.org/abs/1710.09412) draw one share a batch; one a sample does not depend on how the
    batch is split over devices.

    Raises:
        ValueError: ``alpha`` is not above 0.
    """
    if not 0 < alpha < math.inf:
        raise ValueError(f"alpha is {alpha}; it must be finite and above 0")
    return _draw(sample_keys_B, _MIXUP, lambda key: jax.random.beta(key, alpha, alpha, dtype=jnp.float32))


def other_keys(sample_keys_B: jax.Array) -> jax.Array:
    """Keys for the augmentation of the image that a sample is mixed with."""
    return jax.vmap(jax.random.fold_in, in_axes=(0, None))(sample_keys_B, _OTHER)


def random_crop_to(sample_keys_B: jax.Array, x_BHWC: jax.Array, size: int) -> jax.Array:
    """Crops a square window at a random place, each place equally likely.

    Args:
        sample_keys_B: Typed keys [B].
        x_BHWC: Floating-point images.
        size: Side length in pixels, 1 to min(H, W).

    Returns:
        [B, size, size, C] in the dtype of ``x_BHWC``.

    Raises:
        ValueError: ``size`` does not fit or the images are not floating-point BHWC.
    """
    _check_images(x_BHWC)
    _check_size(x_BHWC, size)
    return _random_window(sample_keys_B, _CROP_TO, x_BHWC, size, size)


def center_crop(x_BHWC: jax.Array, size: int) -> jax.Array:
    """Crops the central square window; an odd margin leaves its extra pixel at the bottom and right.

    Args:
        x_BHWC: Floating-point images.
        size: Side length in pixels, 1 to min(H, W).

    Returns:
        [B, size, size, C] in the dtype of ``x_BHWC``.

    Raises:
        ValueError: ``size`` does not fit or the images are not floating-point BHWC.
    """
    _check_images(x_BHWC)
    _check_size(x_BHWC, size)
    _, height, width, _ = x_BHWC.shape
    top, left = (height - size) // 2, (width - size) // 2
    return x_BHWC[:, top : top + size, left : left + size]


def random_brightness(sample_keys_B: jax.Array, x_BHWC: jax.Array, max_delta: float = 63.0) -> jax.Array:
    """Adds to each image one number from [-max_delta, max_delta), as `tf.image.random_brightness`; never clips.

    Args:
        sample_keys_B: Typed keys [B].
        x_BHWC: Floating-point images in pixel units.
        max_delta: Largest shift in pixel units, at least 0.

    Returns:
        [B, H, W, C] in the dtype of ``x_BHWC``.

    Raises:
        ValueError: ``max_delta`` is negative or the images are not floating-point BHWC.
    """
    _check_images(x_BHWC)
    _check_brightness("max_delta", max_delta)
    delta_B = _uniform(sample_keys_B, _BRIGHTNESS, -max_delta, max_delta)
    return x_BHWC + delta_B.astype(x_BHWC.dtype)[:, None, None, None]


def random_contrast(sample_keys_B: jax.Array, x_BHWC: jax.Array, lower: float = 0.2, upper: float = 1.8) -> jax.Array:
    """Moves each pixel away from or towards its image's channel mean: ``(x - mean) * factor + mean``; never clips.

    The formula is that of `tf.image.adjust_contrast`; the factor is drawn from [lower, upper).

    Args:
        sample_keys_B: Typed keys [B].
        x_BHWC: Floating-point images.
        lower: Lowest factor, at least 0.
        upper: Highest factor, at least ``lower``.

    Returns:
        [B, H, W, C] in the dtype of ``x_BHWC``.

    Raises:
        ValueError: The bounds are negative or reversed, or the images are not floating-point BHWC.
    """
    _check_images(x_BHWC)
    _check_contrast("contrast", lower, upper)
    factor_B = _uniform(sample_keys_B, _CONTRAST, lower, upper)
    mean_B11C = jnp.mean(x_BHWC, axis=(1, 2), keepdims=True)
    return (x_BHWC - mean_B11C) * factor_B.astype(x_BHWC.dtype)[:, None, None, None] + mean_B11C


def per_image_standardization(x_BHWC: jax.Array) -> jax.Array:
    """Gives each image mean 0 and standard deviation 1 over all its pixels and channels.

    The formula is that of `tf.image.per_image_standardization`: ``(x - mean) / max(std, 1 / sqrt(H * W * C))``; a
    constant image gives 0 up to rounding of its mean.

    Args:
        x_BHWC: Floating-point images.

    Returns:
        [B, H, W, C] in the dtype of ``x_BHWC``.

    Raises:
        ValueError: The images are not floating-point BHWC.
    """
    _check_images(x_BHWC)
    mean_B111 = jnp.mean(x_BHWC, axis=(1, 2, 3), keepdims=True)
    std_B111 = jnp.std(x_BHWC, axis=(1, 2, 3), keepdims=True)
    return (x_BHWC - mean_B111) / jnp.maximum(std_B111, 1 / math.sqrt(math.prod(x_BHWC.shape[1:])))


def scale(
    x_BHWC: jax.Array,
    how: Scaling,
    mean: Sequence[float] | np.ndarray | None = None,
    std: Sequence[float] | np.ndarray | None = None,
) -> jax.Array:
    """Scales network inputs.

    Args:
        x_BHWC: Floating-point images in pixel units (0 to 255).
        how: ``none``; ``unit``: x / 255; ``standardize``: (x - mean) / std; ``per_image``:
            `per_image_standardization`; ``minmax``: each image by its own minimum and maximum to 0..1, a constant
            image to 0.
        mean: Concrete numbers, one per channel (or one for all), over the training set and in pixel units. Read by
            ``standardize`` only.
        std: As ``mean``, all positive.

    Returns:
        [B, H, W, C] in the dtype of ``x_BHWC``.

    Raises:
        ValueError: ``how`` is unknown, ``standardize`` lacks a usable mean or std, or the images are not
            floating-point BHWC.
    """
    _check_images(x_BHWC)
    if how == "none":
        return x_BHWC
    if how == "unit":
        return x_BHWC / 255
    if how == "standardize":
        mean_C = _channel_numbers("mean", mean, x_BHWC)
        std_C = _channel_numbers("std", std, x_BHWC)
        if not (std_C > 0).all():
            raise ValueError(f"std is {std_C.tolist()}; scaling 'standardize' needs every channel above 0")
        return (x_BHWC - mean_C.astype(x_BHWC.dtype)) / std_C.astype(x_BHWC.dtype)
    if how == "per_image":
        return per_image_standardization(x_BHWC)
    if how == "minmax":
        low_B111 = jnp.min(x_BHWC, axis=(1, 2, 3), keepdims=True)
        range_B111 = jnp.max(x_BHWC, axis=(1, 2, 3), keepdims=True) - low_B111
        return (x_BHWC - low_B111) / jnp.where(range_B111 > 0, range_B111, 1)
    raise ValueError(f"scaling is {how!r}; it must be one of {', '.join(get_args(Scaling))}")


def _draw(sample_keys_B: jax.Array, kind: int, draw: Callable[[jax.Array], jax.Array]) -> jax.Array:
    return jax.vmap(lambda key: draw(jax.random.fold_in(key, kind)))(sample_keys_B)


def _uniform(sample_keys_B: jax.Array, kind: int, low: float, high: float) -> jax.Array:
    return _draw(sample_keys_B, kind, lambda key: jax.random.uniform(key, (), jnp.float32, low, high))


def _random_window(sample_keys_B: jax.Array, kind: int, x_BHWC: jax.Array, height: int, width: int) -> jax.Array:
    _, full_height, full_width, channels = x_BHWC.shape
    places = jnp.array([full_height - height + 1, full_width - width + 1], jnp.int32)
    corner_B2 = _draw(sample_keys_B, kind, lambda key: jax.random.randint(key, (2,), 0, places, jnp.int32))

    # One batched gather. On a CPU at 128x32x32x3 with padding 4 it takes 0.15 ms; separable one-hot products take
    # 0.6-1.0 ms, a barrel shifter 0.9-1.3 ms, a select per offset 0.5-3 ms, a loop over images 0.4 ms. It also keeps
    # a sharded batch where it is.
    def window(x_HWC: jax.Array, corner: jax.Array) -> jax.Array:
        # A plain 0 would be int64 under x64, and the three indices must agree.
        return lax.dynamic_slice(x_HWC, (corner[0], corner[1], jnp.int32(0)), (height, width, channels))

    return jax.vmap(window)(x_BHWC, corner_B2)


def _check_images(x_BHWC: jax.Array) -> None:
    if x_BHWC.ndim != 4:
        raise ValueError(f"images have shape {x_BHWC.shape}; they must be [batch, rows, columns, channels]")
    if not jnp.issubdtype(x_BHWC.dtype, jnp.floating):
        raise ValueError(f"images have dtype {x_BHWC.dtype}; cast them to floating point first")


def _check_size(x_BHWC: jax.Array, size: int) -> None:
    _, height, width, _ = x_BHWC.shape
    if not 1 <= size <= min(height, width):
        raise ValueError(f"crop size is {size}; for {height}x{width} images it must be from 1 to {min(height, width)}")


def _check_pixels(name: str, pixels: int) -> None:
    if pixels < 0:
        raise ValueError(f"{name} is {pixels}; it must be at least 0 pixels")


def _check_brightness(name: str, max_delta: float) -> None:
    if not (math.isfinite(max_delta) and max_delta >= 0):
        raise ValueError(f"{name} is {max_delta}; it must be finite and at least 0")


def _check_contrast(name: str, lower: float, upper: float) -> None:
    if not (0 <= lower <= upper < math.inf):
        raise ValueError(f"{name} is ({lower}, {upper}); it must satisfy 0 <= lowest <= highest")


def _channel_numbers(
    name: str, values: Sequence[float] | np.ndarray | None, x_BHWC: jax.Array, reader: str = "scaling 'standardize'"
) -> np.ndarray:
    channels = x_BHWC.shape[-1]
    if values is None:
        raise ValueError(f"{name} is None; {reader} needs {channels} numbers, one per channel")
    values_C = np.atleast_1d(np.asarray(values, np.float64))
    if values_C.shape not in {(1,), (channels,)} or not np.isfinite(values_C).all():
        raise ValueError(
            f"{name} is {values_C.tolist()}; {reader} needs {channels} finite numbers, one per channel, or one for all"
        )
    return values_C
