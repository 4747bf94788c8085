"""What outputs are measured by, sample by sample: classes to tell apart, or numbers to approach.

Shape suffixes: B batch, C classes, or 1 for numbers.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import optax

from cnnjax.augment import mixup_share

TOP = 5

# What a batch is summed to, beside ``count``, the weight of its samples.
CLASS_MEASURES = ("loss", "correct", "top5")
NUMBER_MEASURES = ("loss", "absolute", "label", "label_square")

# What evaluation keeps of each sample, by the name of `Objective.measure` for it.
NUMBER_SAMPLES = {"predicted": "predicted", "sample_loss": "loss"}
CLASS_SAMPLES = NUMBER_SAMPLES | {"probabilities": "probabilities"}


@dataclasses.dataclass(frozen=True)
class Objective:
    """What the network is trained for.

    Attributes:
        label_smoothing: As for `targets`; of training alone, as the next.
        class_weights: Likewise.
        label_moments: Mean and standard deviation of labels that are numbers; the network gives deviations from that
            mean. None where labels are classes.
        mixup: Alpha of the Beta distribution of `mixup_share`; 0 is off.
        flip_test: Whether evaluation averages the outputs of each image and of its mirror image, see `views`.
    """

    label_smoothing: float = 0.0
    class_weights: tuple[float, ...] | None = None
    label_moments: tuple[float, float] | None = None
    mixup: float = 0.0
    flip_test: bool = False

    @property
    def measures(self) -> tuple[str, ...]:
        """Names of what a batch is summed to, beside ``count``."""
        return CLASS_MEASURES if self.label_moments is None else NUMBER_MEASURES

    @property
    def samples(self) -> dict[str, str]:
        """Names of what evaluation gives of each sample, each with its name in `measure`."""
        return CLASS_SAMPLES if self.label_moments is None else NUMBER_SAMPLES

    @property
    def unit(self) -> float:
        """What the loss is divided by for its gradient: squared errors count in deviations of the labels."""
        return 1.0 if self.label_moments is None else self.label_moments[1] ** 2

    def measure(
        self, outputs_BC: jax.Array, batch: Mapping[str, jax.Array], keys_B: jax.Array | None = None
    ) -> dict[str, jax.Array]:
        """Loss, other measures and prediction of each sample.

        Args:
            outputs_BC: Of the network; in evaluation with ``flip_test`` ``[2 * B, C]``.
            batch: With ``label``.
            keys_B: The keys of augmentation in training, None in evaluation.

        Returns:
            `measures`, and ``predicted``: classes, int32, or numbers, float32; each ``[B]``. For classes also
            ``probabilities``, ``[B, C]``.
        """
        outputs_BC = outputs_BC.astype(jnp.promote_types(outputs_BC.dtype, jnp.float32))
        if self.flip_test and keys_B is None:
            outputs_BC = mean_of_views(outputs_BC, probabilities=self.label_moments is None)
        share_B = None if keys_B is None or not self.mixup else mixup_share(keys_B, self.mixup)
        if self.label_moments is not None:
            mean, deviation = self.label_moments
            value_B = outputs_BC[:, 0] * deviation + mean
            return squared_error(value_B, batch, mean, share_B) | {"predicted": value_B.astype(jnp.float32)}
        smoothing, weights = (0.0, None) if keys_B is None else (self.label_smoothing, self.class_weights)
        targets_BC = targets(batch, outputs_BC.shape[-1], smoothing, weights, share_B, outputs_BC.dtype)
        values = cross_entropy(outputs_BC, targets_BC, batch["label"])
        predicted_B = jnp.argmax(outputs_BC, -1).astype(jnp.int32)
        return values | {"predicted": predicted_B, "probabilities": jax.nn.softmax(outputs_BC)}


def targets(
    batch: Mapping[str, jax.Array],
    classes: int,
    smoothing: float = 0.0,
    class_weights: Sequence[float] | None = None,
    share_B: jax.Array | None = None,
    dtype: jax.typing.DTypeLike = jnp.float32,
) -> jax.Array:
    """What cross-entropy compares the logits with.

    Args:
        batch: With ``label``, int32 ``[B]``; where ``share_B`` is given, with ``other_label`` too.
        classes: Of the network.
        smoothing: Share of each label that is spread evenly over all classes.
        class_weights: Factor of a sample's loss by its class, as Keras's ``class_weight``; one each, or None.
        share_B: What mixup leaves of the sample itself; the rest is the other's (Zhang et al. 2018,
            https://arxiv.org/abs/1710.09412).
        dtype: Of the result.

    Returns:
        ``[B, C]``; rows sum to 1, or to the weight of their class.
    """

    def one(label_B: jax.Array) -> jax.Array:
        rows_BC = optax.smooth_labels(jax.nn.one_hot(label_B, classes, dtype=dtype), smoothing)
        if class_weights is None:
            return rows_BC
        return rows_BC * jnp.asarray(class_weights, dtype)[label_B][:, None]

    if share_B is None:
        return one(batch["label"])
    share_B1 = share_B.astype(dtype)[:, None]
    return share_B1 * one(batch["label"]) + (1 - share_B1) * one(batch["other_label"])


def cross_entropy(logits_BC: jax.Array, targets_BC: jax.Array, label_B: jax.Array) -> dict[str, jax.Array]:
    """Cross-entropy in nats, and whether the label has the largest logit, or one of the five largest.

    A label counts among the five where fewer than five logits are above its own.
    """
    own_B1 = jnp.take_along_axis(logits_BC, label_B[:, None], -1)
    return {
        "loss": optax.softmax_cross_entropy(logits_BC, targets_BC),
        "correct": jnp.argmax(logits_BC, -1) == label_B,
        "top5": jnp.sum(logits_BC > own_B1, -1) < TOP,
    }


def squared_error(
    value_B: jax.Array, batch: Mapping[str, jax.Array], mean: float, share_B: jax.Array | None = None
) -> dict[str, jax.Array]:
    """Squared and absolute errors in the labels' unit, and what R2 needs of the labels.

    Args:
        value_B: Predictions, in the labels' unit.
        batch: With ``label``, float32 ``[B]``; where ``share_B`` is given, with ``other_label`` too.
        mean: About that of the labels. R2 takes deviations from it, whose squares lose no digits where all labels are
            far from 0.
        share_B: As for `targets`.
    """
    label_B = batch["label"].astype(value_B.dtype)
    if share_B is not None:
        share_B = share_B.astype(value_B.dtype)
        label_B = share_B * label_B + (1 - share_B) * batch["other_label"].astype(value_B.dtype)
    error_B = value_B - label_B
    return {
        "loss": jnp.square(error_B),
        "absolute": jnp.abs(error_B),
        "label": label_B - mean,
        "label_square": jnp.square(label_B - mean),
    }


def views(x_BHWC: jax.Array) -> jax.Array:
    """Each image and its mirror image, one after the other: ``[2 * B, H, W, C]``. No image changes its device."""
    both = jnp.stack([x_BHWC, x_BHWC[:, :, ::-1]], axis=1)
    return both.reshape(-1, *x_BHWC.shape[1:])


def mean_of_views(outputs_BC: jax.Array, probabilities: bool) -> jax.Array:
    """Undoes `views` for outputs ``[2 * B, C]``: their mean, or logits of the mean of their probabilities."""
    pairs_B2C = outputs_BC.reshape(-1, 2, outputs_BC.shape[-1])
    if not probabilities:
        return jnp.mean(pairs_B2C, 1)
    return jax.nn.logsumexp(jax.nn.log_softmax(pairs_B2C), 1) - jnp.log(2.0)
