"""The command ``lightning-sdp``: a LightningCLI in which the strategy names are known."""

from __future__ import annotations

from lightning.pytorch.cli import ArgsType, LightningCLI

import lightning_sdp  # noqa: F401  (registers the strategy names)


def main(args: ArgsType = None) -> None:
    """Runs ``lightning-sdp fit|validate|test|predict``.

    Args:
        args: Command-line arguments; ``None`` takes the process's own.
    """
    LightningCLI(args=args)
