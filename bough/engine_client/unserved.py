"""Fields of other servers' requests that change the result and are not supported here: refused, not ignored. A field
with an empty value (null, false, empty, or a list of such values) is accepted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from bough.core.errors import InvalidRequest

_MEDIA = ("media have settings of their own", "send mm_processor_kwargs, or leave it out")
_NAMED = ("here prompts are text only", "send content parts (image_url) to /v1/chat/completions, or use /generate")
_APART = ("prefill and decode run in one server here", "leave it out")
_INSIDE = ("what the model does inside is not reported", "leave it out, or use return_hidden_states")
_NATIVE = ("replicas are chosen by native requests only", "send it to /generate, or leave it out")
_CODE = ("no code from requests is run", "register it with --logit-processors, and send logit_processor")

UNSERVED: Final[Mapping[str, tuple[str, str]]] = {
    "input_embeds": ("prompts are texts or token ids", "send text or input_ids"),
    "image_data": _NAMED,
    "video_data": _NAMED,
    "audio_data": _NAMED,
    "mm_processor_kwargs": _MEDIA,
    "images_config": _MEDIA,
    "video_config": _MEDIA,
    "custom_logit_processor": _CODE,
    "logits_processors": _CODE,
    "return_routed_experts": _INSIDE,
    "return_sampling_mask": _INSIDE,
    "return_entropy": _INSIDE,
    "watermark": ("answers are not marked", "leave it out"),
    "bootstrap_host": _APART,
    "bootstrap_port": _APART,
    "bootstrap_room": _APART,
    "kv_transfer_params": _APART,
    "data_parallel_rank": _NATIVE,
    "routed_dp_rank": _NATIVE,
    "prompt_logprobs": (
        "prompts are scored by other fields",
        "send echo with logprobs to /v1/completions, or logprob_start_len to /generate",
    ),
    "grammar": ("constraints go by other names here", "send it as ebnf, or use regex or response_format"),
    "use_beam_search": ("beams are asked for by their number", "send beam_width"),
    "truncate_prompt_tokens": ("prompts of generating requests are never cut", "shorten the prompt"),
    "session_params": ("here a request brings its whole prompt", "send the whole prompt, or use /generate"),
}
"""Field -> why it is not served, and what to do."""


def refuse_unserved(data: Mapping[str, Any], names: Iterable[str]) -> tuple[str, ...]:
    """The `names` that are unknown here. Raises `InvalidRequest` for the first unsupported field of `data` with a
    non-empty value."""
    unknown: list[str] = []
    for name in names:
        if name not in UNSERVED:
            unknown.append(name)
        elif not is_off(data[name]):
            why, fix = UNSERVED[name]
            raise InvalidRequest(what=f"{name} is not supported", why=why, fix=fix, param=name)
    return tuple(unknown)


def is_off(value: Any) -> bool:
    """Clients that fill in every field send one null for each prompt of a batch."""
    each = value if isinstance(value, list | tuple) else [value]
    return all(one in (None, False, "", [], {}, 0) for one in each)
