"""Models computed by transformers' modules, with bough's attention over pages in place of theirs.

A step's tokens pass the module as one long row. What it would compute within that row, its attention function, is ours: it
hands queries, keys and values to the step's backend, which knows the rows and their pages. T tokens, N heads, H width.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor, nn

from bough.config.fields import Fields
from bough.config.hf import Checkpoint
from bough.config.model_facts import ModelFacts
from bough.core.errors import UnsupportedModel
from bough.layers.batch import AttentionSpec, Batch, rotates
from bough.models.through_transformers import config_of

_NAME: Final = "bough"
"""Of our attention among those that transformers can choose from."""


class _Host:
    """What a model's attention function needs beside its arguments."""

    def __init__(self) -> None:
        self.batch: Batch | None = None
        self.ready_LD: Tensor | None = None
        """Hidden states that only need their logits."""


class HostedModel(nn.Module):
    """A `Model`."""

    def __init__(self, causal: Any) -> None:
        super().__init__()
        self.causal = causal
        self.host = _Host()
        body = getattr(causal, causal.base_model_prefix)
        for module in body.modules():
            module.bough_host = self.host
        setattr(causal, causal.base_model_prefix, _Body(body, self.host))

    def forward(self, batch: Batch) -> Tensor:
        self.host.batch = batch
        body = getattr(self.causal, self.causal.base_model_prefix)
        try:
            hidden_TD: Tensor = body.run(batch)
        finally:
            self.host.batch = None
        return hidden_TD if batch.logits_at is None else hidden_TD.index_select(0, batch.logits_at)

    def logits(self, hidden_LD: Tensor) -> Tensor:
        """As the module makes them of hidden states, its scales and caps included."""
        self.host.ready_LD = hidden_LD
        try:
            ids = torch.zeros(1, len(hidden_LD), dtype=torch.int64, device=hidden_LD.device)
            logits: Tensor = self.causal(input_ids=ids, use_cache=False).logits[0]
        finally:
            self.host.ready_LD = None
        return logits


class _Body(nn.Module):
    """The module between embedding and last norm, or hidden states that were computed before."""

    def __init__(self, inner: Any, host: _Host) -> None:
        super().__init__()
        self.inner = inner
        self.host = host

    def run(self, batch: Batch) -> Tensor:
        out = self.inner(input_ids=batch.ids_T[None], position_ids=batch.positions_T[None], use_cache=False)
        hidden_TD: Tensor = out.last_hidden_state[0]
        return hidden_TD

    def forward(self, *_: Any, **__: Any) -> Any:
        from transformers.modeling_outputs import MoeModelOutputWithPast

        assert self.host.ready_LD is not None, "hidden states are computed by `run`"
        made: Any = MoeModelOutputWithPast
        return made(last_hidden_state=self.host.ready_LD[None])


def load_through_transformers(
    checkpoint: Checkpoint, facts: ModelFacts, dtype: torch.dtype, device: torch.device, *, dummy: bool, seed: int
) -> HostedModel:
    """The model with its weights (`dummy`: random ones), on `device`. Raises `UnsupportedModel` for a module whose attention
    can't be replaced."""
    from transformers import AutoModelForCausalLM

    _register()
    maker: Any = AutoModelForCausalLM
    config = config_of(Fields(checkpoint.config))
    config.dtype = dtype
    if dummy or checkpoint.kind == "config-only":
        torch.manual_seed(seed)
        causal = maker.from_config(config, attn_implementation=_NAME, dtype=dtype).to(device)
    else:
        causal = maker.from_pretrained(
            str(checkpoint.path), config=config, attn_implementation=_NAME, dtype=dtype, trust_remote_code=False
        ).to(device)
    for parameter in causal.parameters():
        parameter.requires_grad_(False)
    model = HostedModel(causal.eval())
    _probe(model, facts, device)
    return model


class _Probe:
    """Stands for a step's attention, to see what each layer asks for."""

    def __init__(self) -> None:
        self.specs: list[AttentionSpec] = []

    def forward(self, spec: AttentionSpec, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor) -> Tensor:
        self.specs.append(spec)
        width = v_TKH.shape[2]
        return q_TNH.new_zeros(len(q_TNH), spec.num_heads * width)

    def attend(self, spec: AttentionSpec, q_TNH: Tensor) -> Tensor:
        raise AssertionError("layers of transformers' modules bring keys and values, their own or others'")


@contextmanager
def _poisoned_first(embedding: nn.Module) -> Iterator[None]:
    """Meanwhile the embedding of the first token is not a number."""

    def poison(_module: nn.Module, _given: Any, out: Tensor) -> Tensor:
        return out.index_fill(out.dim() - 2, torch.zeros(1, dtype=torch.int64, device=out.device), float("nan"))

    hook = embedding.register_forward_hook(poison)
    try:
        yield
    finally:
        hook.remove()


@torch.no_grad()
def _probe(model: HostedModel, facts: ModelFacts, device: torch.device) -> None:
    """Runs two tokens, so that every attention layer has its spec; compares them with what memory is planned by. Nothing
    but attention may let tokens see one another: the first one's embedding is not a number, attention gives nothing, and the
    second one must not notice."""
    probe = _Probe()
    both = torch.arange(2, device=device)
    body = getattr(model.causal, model.causal.base_model_prefix).inner
    with _poisoned_first(body.get_input_embeddings()):
        hidden_TD = model(Batch(both, both, probe, num_tokens=2))
    if hidden_TD[1].isnan().any():
        raise UnsupportedModel(
            what=f"{facts.architecture} can't run through transformers here",
            why="its layers keep something of earlier tokens that is not attention's: a convolution or a recurrent state",
            fix="leave --model-impl at auto if docs/models.md lists it, or choose another model",
        )
    if len(probe.specs) != facts.num_layers:
        raise UnsupportedModel(
            what=f"{facts.architecture} can't run through transformers here",
            why=f"{len(probe.specs)} of its {facts.num_layers} layers call an attention function that can be replaced",
            fix="choose another model (docs/models.md)",
        )
    for spec, mixer in zip(probe.specs, facts.kv_mixers, strict=True):
        kept = spec.num_kv_heads * (spec.head_dim + (spec.v_head_dim or spec.head_dim))
        if kept != sum(mixer.planes):
            raise UnsupportedModel(
                what=f"{facts.architecture} can't run through transformers here",
                why=f"a token leaves {kept} values in layer {spec.layer}, its config says {sum(mixer.planes)}",
                fix="choose another model (docs/models.md)",
            )


def _register() -> None:
    """Makes our attention one that transformers can choose, without masks: backends know what each token sees."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(_NAME, _attend)
    ALL_MASK_ATTENTION_FUNCTIONS.register(_NAME, _no_mask)


def _no_mask(*_: Any, **__: Any) -> None:
    return None


def _attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """transformers' attention function: [1, N, T, H] -> [1, T, N, V]."""
    batch: Batch = module.bough_host.batch
    backend = batch.attention
    q_TNH, k_TKH, v_TKH = (each[0].transpose(0, 1) for each in (query, key, value))
    spec: AttentionSpec | None = getattr(module, "spec", None)
    if spec is None:
        assert isinstance(backend, _Probe), "layers have their specs after the first token"
        spec = module.spec = AttentionSpec(
            layer=len(backend.specs),
            num_heads=q_TNH.shape[1],
            num_kv_heads=k_TKH.shape[1],
            head_dim=q_TNH.shape[2],
            v_head_dim=None if v_TKH.shape[2] == q_TNH.shape[2] else v_TKH.shape[2],
            scale=q_TNH.shape[2] ** -0.5 if scaling is None else float(scaling),
            window=sliding_window,
            softcap=softcap,
            sinks=None if s_aux is None else s_aux.float(),
            causal=bool(getattr(module, "is_causal", True)),
        )
    read_TF = backend.forward(spec, q_TNH, k_TKH, v_TKH)
    at_L = backend.queries_at(spec) if rotates(backend) else None
    if at_L is not None and len(read_TF) != len(q_TNH):
        read_TF = read_TF.new_zeros(len(q_TNH), read_TF.shape[1]).index_copy_(0, at_L, read_TF)
    return read_TF.view(1, len(q_TNH), spec.num_heads, -1), None
