"""The `format`s of strings that are enforced, as regular expressions over the string's value."""

from __future__ import annotations

from typing import Final

_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_SHORT_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,22}[A-Za-z0-9])?"
_NAME = r"[A-Za-z0-9_+-]{1,24}"
_HOST = rf"{_LABEL}(?:\.{_LABEL}){{0,6}}"
_WEB_LABEL = r"[A-Za-z0-9]{1,20}(?:-[A-Za-z0-9]{1,20}){0,2}"
_WEB_HOST = rf"(?:{_WEB_LABEL}\.){{0,6}}[A-Za-z][A-Za-z0-9]{{0,20}}"
"""A host that every URL parser accepts: a last label that begins with a digit would be parsed as an IPv4 address, and
two consecutive hyphens as an encoded name."""
_MONTH_DAY = r"(?:0[13578]|1[02])-(?:0[1-9]|[12]\d|3[01])|(?:0[469]|11)-(?:0[1-9]|[12]\d|30)|02-(?:0[1-9]|1\d|2[0-8])"
_LEAP = r"\d\d(?:0[48]|[2468][048]|[13579][26])-02-29"
_DATE = rf"(?:(?:\d{{3}}[1-9]|\d\d[1-9]0|\d[1-9]00|[1-9]000)-(?:{_MONTH_DAY})|{_LEAP})"
_CLOCK = r"(?:[01]\d|2[0-3]):[0-5]\d:[0-5]\d(?:\.\d{1,9})?"
_ZONE = r"(?:Z|[+-](?:[01]\d|2[0-3]):[0-5]\d)"
_MONTHS = r"\d{1,4}M(?:\d{1,2}D)?"
_YEARS = rf"\d{{1,4}}Y(?:{_MONTHS})?"
_HOURS = r"T(?:\d{1,4}H(?:\d{1,2}M(?:\d{1,2}S)?)?|\d{1,4}M(?:\d{1,2}S)?|\d{1,4}S)"
_DAYS = rf"\d{{1,4}}D(?:{_HOURS})?"
_BYTE = r"(?:25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"
_IPV4 = rf"{_BYTE}(?:\.{_BYTE}){{3}}"
_GROUP = r"[0-9a-fA-F]{1,4}"
_GROUPS = rf"(?:{_GROUP}(?::{_GROUP}){{0,4}})?"
_PATH = r"[A-Za-z0-9._~!$&'()*+,;=:@/-]"
_SECTION = r"[A-Za-z0-9._~!$&'()*+,;=:@/?-]"

FORMATS: Final[dict[str, str]] = {
    "date": rf"^{_DATE}$",
    "time": rf"^{_CLOCK}{_ZONE}$",
    "date-time": rf"^{_DATE}T{_CLOCK}{_ZONE}$",
    "duration": rf"^P(?:\d{{1,4}}W|{_YEARS}|{_MONTHS}|{_DAYS}|{_HOURS})$",
    "email": rf"^{_NAME}(?:\.{_NAME}){{0,2}}@{_SHORT_LABEL}(?:\.{_SHORT_LABEL}){{1,4}}$",
    "hostname": rf"^{_HOST}$",
    "ipv4": rf"^{_IPV4}$",
    "ipv6": rf"^(?:(?:{_GROUP}:){{7}}{_GROUP}|(?:{_GROUP})?::{_GROUPS})$",
    "uuid": r"^[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}$",
    "uri": rf"^https?://{_WEB_HOST}(?::[1-9]\d{{0,3}})?(?:/{_PATH}*)?(?:\?{_SECTION}*)?(?:#{_SECTION}*)?$",
    "uri-reference": rf"^/{_PATH}*(?:\?{_SECTION}*)?(?:#{_SECTION}*)?$",
    "json-pointer": r"^(?:/(?:[^/~\x00-\x1f]|~[01])*)*$",
    "byte": r"^(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$",
}  # fmt: skip
FORMATS["idn-email"] = FORMATS["email"]
FORMATS["idn-hostname"] = FORMATS["hostname"]
FORMATS["iri"] = FORMATS["uri"]
FORMATS["iri-reference"] = FORMATS["uri-reference"]

OF_NUMBERS: Final = frozenset({"int32", "int64", "float", "double"})
"""Formats of numbers: `int32` and `int64` become bounds; the others say what every number is."""
