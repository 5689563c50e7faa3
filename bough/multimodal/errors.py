"""Why a picture was not taken. Texts name what the client sent, never what was found behind it: no address, no path, no
words of another server."""

from __future__ import annotations

from bough.core.errors import InvalidRequest


class MediaError(InvalidRequest):
    """What the client named can't be used."""

    code = "media_invalid"


class MediaNotAllowed(MediaError):
    """The operator has not opened the door to it."""

    code = "media_not_allowed"


class MediaTooLarge(MediaError):
    """More bytes, pixels or frames than the limits."""

    code = "media_too_large"


class MediaUnsupported(MediaError):
    """No picture, or none of a kind that is taken."""

    code = "media_unsupported"


class MediaUnreachable(MediaError):
    """The host that has it does not send it, or not in time."""

    code = "media_unreachable"
