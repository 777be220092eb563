"""The regime, and what belongs to it, as Lightning callbacks."""

from lightning_sdp.callbacks.batchnorm import BatchNormRecalibration
from lightning_sdp.callbacks.masking import BackwardMasking, ForwardMasking
from lightning_sdp.callbacks.monitor import SDPMonitor
from lightning_sdp.callbacks.schedule import MaskingSchedule

__all__ = ["BackwardMasking", "BatchNormRecalibration", "ForwardMasking", "MaskingSchedule", "SDPMonitor"]
