"""The JSON schemas that measurements of constrained output use."""

from __future__ import annotations

import json
from typing import Any

Json = dict[str, Any]

STRINGS: Json = {"type": "array", "items": {"type": "string"}, "minItems": 10_000}
"""Never ends by itself, and its text is nowhere certain."""

_RECORD: Json = {
    "type": "object",
    "properties": {
        "customer_identification_number": {"type": "integer", "minimum": 100_000, "maximum": 999_999},
        "preferred_shipping_address": {"type": "string", "minLength": 24, "maxLength": 48},
        "is_newsletter_subscriber": {"type": "boolean"},
        "last_known_account_balance": {"type": "integer", "minimum": 1_000_000, "maximum": 9_999_999},
        "reason_for_the_last_contact": {"type": "string", "minLength": 24, "maxLength": 48},
    },
}
RECORD: Json = {**_RECORD, "required": list(_RECORD["properties"])}
RECORDS: Json = {"type": "array", "items": RECORD, "minItems": 10_000}

SCHEMAS = {"strings": json.dumps(STRINGS), "records": json.dumps(RECORDS)}
"""By the name that a measurement takes."""
