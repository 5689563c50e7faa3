"""Whisper's rules for transcripts, applied to logits: suppressed tokens, and timestamps in ascending pairs.

R rows, V vocabulary, H last tokens that are known of a row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bough.core.speech import SpeechRules

Params = Mapping[str, bool | int | float | str]


@dataclass(frozen=True, slots=True)
class Said:
    """What rows have said so far, as the device knows it."""

    last_RH: Tensor
    """int64: the newest last; -1 before the first."""
    counts_RV: Tensor
    """int32: how often each token was said."""
    num_output_R: Tensor
    """int64"""


def speech_rules(logits_RV: Tensor, params: Sequence[Params], said: Said) -> Tensor:
    """Logits of the same shape: -inf for what may not come next. Raises KeyError or `msgspec.ValidationError` for params of
    something else."""
    rows_of: dict[SpeechRules, list[int]] = {}
    for row, given in enumerate(params):
        rows_of.setdefault(SpeechRules.of(given), []).append(row)
    shaped = logits_RV.float()
    for rules, rows in rows_of.items():
        at = torch.tensor(rows, device=shaped.device)
        some = Said(said.last_RH[at], said.counts_RV[at], said.num_output_R[at])
        shaped = shaped.index_copy(0, at, _shaped(shaped[at], rules, some))
    return shaped


def _shaped(logits_RV: Tensor, rules: SpeechRules, said: Said) -> Tensor:
    device, none = logits_RV.device, -torch.inf
    is_first_R1 = said.num_output_R[:, None] == 0
    if rules.suppress:
        logits_RV.index_fill_(1, torch.tensor(rules.suppress, device=device), none)
    if rules.suppress_first:
        first = torch.tensor(rules.suppress_first, device=device)
        logits_RV[:, first] = logits_RV[:, first].masked_fill(is_first_R1, none)
    if not rules.timestamps:
        return logits_RV
    begin = rules.first_timestamp
    logits_RV[:, begin - 1] = none
    text_RV, stamps_RV = logits_RV[:, :begin], logits_RV[:, begin:]
    last_is_R1 = said.last_RH[:, -1:] >= begin
    before_is_R1 = (said.num_output_R[:, None] < 2) | (said.last_RH[:, -2:-1] >= begin)
    # A pair is followed by text or the end, a lone timestamp by the other one of its pair or the end.
    stamps_RV.masked_fill_(last_is_R1 & before_is_R1, none)
    logits_RV[:, : rules.end].masked_fill_(last_is_R1 & ~before_is_R1, none)
    # None is before the newest; a new pair begins behind it.
    place_V = torch.arange(stamps_RV.shape[1], device=device)
    newest_R1 = torch.where(said.counts_RV[:, begin:] > 0, place_V, -1).amax(1, keepdim=True)
    closes_R1 = last_is_R1 & ~before_is_R1
    least_R1 = torch.where(newest_R1 < 0, 0, newest_R1 + 1 - closes_R1.long())
    stamps_RV.masked_fill_(place_V < least_R1, none)
    text_RV.masked_fill_(is_first_R1, none)
    if rules.most_initial >= 0:
        stamps_RV.masked_fill_(is_first_R1 & (place_V > rules.most_initial), none)
    # If all timestamps together are likelier than any text, one of them comes.
    scores_RV = logits_RV.log_softmax(-1)
    stamps_R1 = scores_RV[:, begin:].logsumexp(-1, keepdim=True)
    text_RV.masked_fill_(stamps_R1 > scores_RV[:, :begin].amax(-1, keepdim=True), none)
    return logits_RV
