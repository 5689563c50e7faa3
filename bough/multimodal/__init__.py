"""The one door that media come through: fetched under guard, recognised by their bytes, measured before they are decoded.

in: what a client named (a data:, http(s): or file: URL). out: `Picture`s within the limits. never: torch, decoding, trust.
"""

from bough.multimodal.door import Door
from bough.multimodal.errors import MediaError, MediaNotAllowed, MediaTooLarge, MediaUnreachable, MediaUnsupported
from bough.multimodal.picture import Picture, read_picture

__all__ = [
    "Door",
    "MediaError",
    "MediaNotAllowed",
    "MediaTooLarge",
    "MediaUnreachable",
    "MediaUnsupported",
    "Picture",
    "read_picture",
]
