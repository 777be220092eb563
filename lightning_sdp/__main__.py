"""``python -m lightning_sdp`` is ``lightning-sdp``."""

from lightning_sdp.cli import main

if __name__ == "__main__":
    main()
