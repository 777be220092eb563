"""The regime, and what belongs to it, as Lightning callbacks."""

from lightning_sdp.callbacks.batchnorm import BatchNormRecalibration
from lightning_sdp.callbacks.masking import ForwardMasking

__all__ = ["BatchNormRecalibration", "ForwardMasking"]
