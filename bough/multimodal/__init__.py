"""Media on their way in: fetched under guard, decoded and resized by worker processes, put into prompts.

in: what a client named (URLs, bytes) and a prompt with markers. out: features in shared memory, token ids with placeholders,
items with their places. never: torch; decoding outside a worker.
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
