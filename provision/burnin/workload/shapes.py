"""How large the models are that the GPUs train, and what a step of them costs. Pure."""

from __future__ import annotations

from dataclasses import dataclass

HEAD_WIDTH = 128
BYTES_PER_PARAMETER = 18  # float32 weight, gradient and two moments of AdamW, bfloat16 copy
BYTES_PER_ACTIVATION = 38  # kept for the backward pass, for each token and unit of width of a layer
BYTES_PER_LOGIT = 12
USED = 0.8  # of the memory: the rest is for buffers, fragments, and what the driver takes


@dataclass(frozen=True)
class Shape:
    """Of the model and of one micro batch."""

    layers: int
    width: int
    vocabulary: int
    sequence: int
    micro_batch: int  # sequences
    head_width: int = HEAD_WIDTH

    @property
    def heads(self) -> int:
        return self.width // self.head_width

    @property
    def parameters(self) -> int:
        """Matrices and gains."""
        return (
            self.layers * (12 * self.width**2 + 2 * self.width)
            + 2 * self.vocabulary * self.width
            + self.width
        )

    @property
    def flops_per_token(self) -> float:
        """Useful operations of a training step: matrix products and causal attention, backward twice the forward.

        The embedding is a look-up and costs none; recomputed activations do not count.
        """
        products = 2 * (12 * self.width**2 * self.layers + self.vocabulary * self.width)
        attention = 2 * self.sequence * self.width * self.layers  # half of it is masked
        return 3.0 * (products + attention)


TINY = Shape(layers=4, width=32, vocabulary=128, sequence=16, micro_batch=2, head_width=8)


def shape_for(memory_bytes: int) -> Shape:
    """The largest of a family of models that one GPU of this memory trains, without any recomputation."""
    width, micro_batch = next(
        (width, batch)
        for least, width, batch in (
            (64 << 30, 4096, 4),
            (32 << 30, 3072, 2),
            (16 << 30, 2048, 2),
            (0, 1024, 1),
        )
        if memory_bytes >= least
    )
    vocabulary, sequence = 32768, 4096
    tokens = micro_batch * sequence
    ends = 2 * vocabulary * width * BYTES_PER_PARAMETER + tokens * vocabulary * BYTES_PER_LOGIT
    layer = 12 * width**2 * BYTES_PER_PARAMETER + tokens * width * BYTES_PER_ACTIVATION
    layers = (
        int((USED * memory_bytes - ends) / layer) // 4 * 4
    )  # so that pipelines of two and four stages fit
    return Shape(max(4, layers), width, vocabulary, sequence, micro_batch)


# For steps that are repeated and compared: enough to use every kind of unit of the GPU.
SMALL = Shape(layers=4, width=2048, vocabulary=8192, sequence=1024, micro_batch=4)
