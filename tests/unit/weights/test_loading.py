"""Mappings, slots and the errors of weights that don't fit."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from bough.config.hf import open_checkpoint
from bough.core.errors import UnsupportedModel, WeightsError
from bough.layers.batch import Model
from bough.models import registry
from bough.models.load import build_model
from bough.models.registry import ARCHITECTURES, find_architecture
from bough.quantization.unquantized import DenseMatrix, Unquantized
from bough.weights import load
from bough.weights.dummy import DummyDraw, fill_dummy
from bough.weights.from_safetensors import open_safetensors
from bough.weights.load import by_layer
from bough.weights.mapping import Fuse, Ignore, Mapping, Rename, Split
from bough.weights.slots import Slot
from bough.weights.stored import AsRow, Item, Reordered, RowRange, Shifted, copy_into

CPU = torch.device("cpu")
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 50,
    "max_position_embeddings": 64,
}


class InMemory:
    """A stored tensor for tests."""

    def __init__(self, tensor: torch.Tensor, kind: str = "F32") -> None:
        self.name, self.kind, self.shape, self.tensor = "t", kind, tuple(tensor.shape), tensor

    def read(self, start: int, stop: int) -> torch.Tensor:
        return self.tensor[start:stop]

    def blocks(self, start: int, stop: int) -> torch.Tensor:
        return self.tensor[start:stop]


def names_of_a_checkpoint() -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens": (50, 16), "model.norm": (16,), "lm_head": (50, 16)}
    for layer in range(3):
        shapes |= {
            f"model.layers.{layer}.{name}": shape
            for name, shape in {
                "input_layernorm": (16,),
                "post_attention_layernorm": (16,),
                "self_attn.q_proj": (16, 16),
                "self_attn.k_proj": (8, 16),
                "self_attn.v_proj": (8, 16),
                "self_attn.o_proj": (16, 16),
                "mlp.gate_proj": (24, 16),
                "mlp.up_proj": (24, 16),
                "mlp.down_proj": (16, 24),
            }.items()
        }
    return {f"{name}.weight": shape for name, shape in shapes.items()}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    torch.manual_seed(0)
    tensors = {name: torch.randn(shape) for name, shape in names_of_a_checkpoint().items()}
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path


def build(folder: Path, **options: Any) -> Model:
    return build_model(open_checkpoint(str(folder)), dtype=torch.float32, device=CPU, **options)


def change(folder: Path, **tensors: torch.Tensor | None) -> None:
    path = folder / "model.safetensors"
    kept = {**load_file(path), **{name.replace("__", "."): value for name, value in tensors.items()}}
    save_file({name: value.clone() for name, value in kept.items() if value is not None}, path)


def test_every_weight_lands_where_it_belongs(folder: Path) -> None:
    model = build(folder)
    tensors = load_file(folder / "model.safetensors")
    assert isinstance(model, torch.nn.Module)
    found = dict(model.named_parameters())
    attention = [tensors[f"model.layers.1.self_attn.{part}_proj.weight"] for part in "qkv"]
    assert torch.equal(found["layers.1.attn.qkv.matrix.weight"], torch.cat(attention))
    gated = [tensors[f"model.layers.2.mlp.{part}_proj.weight"] for part in ("gate", "up")]
    assert torch.equal(found["layers.2.mlp.gate_up.matrix.weight"], torch.cat(gated))
    assert sum(p.numel() for p in found.values()) == sum(t.numel() for t in tensors.values())


def test_one_error_lists_all_that_does_not_fit(folder: Path) -> None:
    changes: dict[str, torch.Tensor | None] = {
        "model__layers__0__mlp__up_proj__weight": None,
        "model__layers__1__mlp__up_proj__weight": None,
        "model__norm__weight": None,
        "model__layers__1__self_attn__q_proj__weight": torch.zeros(16, 17),
        "model__layers__3__input_layernorm__weight": torch.zeros(16),
        "visual__patches": torch.zeros(2),
    }
    change(folder, **changes)
    with pytest.raises(WeightsError) as caught:
        build(folder)
    assert "3 missing, 2 extra, 1 misshaped" in caught.value.what
    why = caught.value.why
    assert "model.layers.{0-1}.mlp.up_proj.weight" in why
    assert "model.norm.weight" in why
    assert "visual.patches" in why
    assert "model.layers.3.input_layernorm.weight" in why
    assert "model.layers.1.self_attn.q_proj.weight is [16, 17], expected [16, 16]" in why


def test_a_repeated_head_of_a_tied_model_is_no_error(folder: Path) -> None:
    tied = {**CONFIG, "tie_word_embeddings": True}
    (folder / "config.json").write_text(json.dumps(tied))
    model = build(folder)
    change(folder, lm_head__weight=None)
    again = build(folder)
    hidden = torch.randn(2, 16)
    assert torch.equal(model.logits(hidden), again.logits(hidden))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    with pytest.raises(WeightsError, match="1 missing") as caught:
        build(folder)
    assert "lm_head.weight" in caught.value.why


def test_old_rotary_buffers_are_ignored(folder: Path) -> None:
    before = dict(build(folder).named_parameters())  # type: ignore[attr-defined]
    change(folder, model__layers__0__self_attn__rotary_emb__inv_freq=torch.zeros(2))
    after = dict(build(folder).named_parameters())  # type: ignore[attr-defined]
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


def test_unknown_quantised_safetensors_are_refused(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({**CONFIG, "quantization_config": {"quant_method": "quip"}}))
    with pytest.raises(UnsupportedModel, match="quip"):
        build(folder)


def test_names_are_grouped_by_layer() -> None:
    names = ["a.0.x", "a.2.x", "a.1.x", "a.5.x", "a.0.y", "b", "c.7.e.1.z", "c.7.e.2.z"]
    assert by_layer(names) == ["a.{0-2,5}.x", "a.0.y", "b", "c.7.e.1.z", "c.7.e.2.z"]


def test_mapping_rules() -> None:
    mapping = Mapping(
        Rename("m.*.o", "l.*.out"),
        Fuse("l.*.qkv", q="m.*.q", k="m.*.k"),
        Split("m.*.gu", "l.*.gate_up", parts=("gate", "up")),
        Rename("m.*.experts.*.w", "l.*.e.*.w"),
        Ignore("m.*.junk"),
    )
    assert mapping.targets_of("m.3.o.weight") == ("l.3.out.weight",)
    assert mapping.targets_of("m.3.q.bias") == ("l.3.qkv.q.bias",)
    assert mapping.targets_of("m.12.gu.weight") == ("l.12.gate_up.gate.weight", "l.12.gate_up.up.weight")
    assert mapping.targets_of("m.1.experts.40.w.weight") == ("l.1.e.40.w.weight",)
    assert mapping.targets_of("m.1.junk.weight") == ()
    assert mapping.targets_of("other.weight") is None
    assert mapping.source_of("l.5.qkv.k.weight") == "m.5.k.weight"
    with pytest.raises(ValueError, match="two rules"):
        Mapping(Rename("a", "b"), Ignore("a"))


@pytest.mark.parametrize(
    ("shape", "fits"),
    [((6, 5), True), ((6, 4), False), ((6, 6), False), ((5, 5), False), ((6,), False), ((6, 5, 1), False)],
)
def test_a_tensor_of_several_layers_is_checked_in_every_dimension(shape: tuple[int, ...], fits: bool) -> None:
    """What is cut along its rows must have the right columns, too: the copy would take them from the next row."""
    mapping = Mapping(Split("m.*.gu", "l.*.gate_up", parts=("gate", "up")))
    slots = {
        f"l.0.gate_up.{part}.weight": Slot(size, lambda _: None) for part, size in (("gate", (2, 5)), ("up", (4, 5)))
    }
    fit = mapping.fit({"m.0.gu.weight": InMemory(torch.zeros(shape))}, slots)
    assert len(fit.pairs) == (2 if fits else 0)
    assert fit.misshaped == ([] if fits else [f"m.0.gu.weight is {list(shape)}, expected [6, 5]"])
    assert not fit.missing


@pytest.mark.parametrize("outputs", [0, 1])
def test_a_tensor_of_several_layers_is_cut_one_after_the_other(outputs: int) -> None:
    mapping = Mapping(Split("m.*.gu", "l.*.gate_up", parts=("gate", "up", "more")))
    whole = torch.arange(45.0).view(9, 5) if outputs == 0 else torch.arange(45.0).view(5, 9)
    sizes = {"gate": 2, "up": 4, "more": 3}
    slots = {
        f"l.0.gate_up.{part}.weight": Slot((size, 5) if outputs == 0 else (5, size), lambda _: None, outputs=outputs)
        for part, size in sizes.items()
    }
    fit = mapping.fit({"m.0.gu.weight": InMemory(whole)}, slots)
    found = [stored.read(0, stored.shape[0]) for _, stored in fit.pairs]
    for part, expected in zip(found, whole.split(list(sizes.values()), outputs), strict=True):
        assert torch.equal(part, expected)


def test_kinds_that_a_layer_cannot_read_are_named() -> None:
    mapping = Mapping(Rename("m.*.o", "l.*.out"))
    for kind, mistyped in (("F8_E4M3", []), ("I32", ["m.0.o.weight is I32, expected F8_E4M3"])):
        slots = {"l.0.out.weight": Slot((2, 2), lambda _: None, kinds=frozenset({"F8_E4M3"}))}
        fit = mapping.fit({"m.0.o.weight": InMemory(torch.zeros(2, 2), kind)}, slots)
        assert fit.mistyped == mistyped
        assert len(fit.pairs) == (0 if mistyped else 1)
        assert fit.problems == ({"mistyped": mistyped} if mistyped else {})


def test_a_tensor_that_cannot_be_read_ends_the_start(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever of the readers has met it."""

    def put(self: Any, *_: Any) -> None:
        raise OSError("the disk has a hole here")

    monkeypatch.setattr(load._Fill, "run", put)
    with pytest.raises(OSError, match="a hole"):
        build(folder)


def test_one_tensor_in_two_files_is_an_error(tmp_path: Path) -> None:
    """Which of the two is meant, nobody knows."""
    for name, value in (("a", 1.0), ("b", 2.0)):
        save_file({"same": torch.full((2,), value), name: torch.zeros(1)}, tmp_path / f"{name}.safetensors")
    with (
        pytest.raises(WeightsError, match="tensor same is in two files"),
        open_safetensors((tmp_path / "a.safetensors", tmp_path / "b.safetensors")),
    ):
        pass
    with open_safetensors((tmp_path / "a.safetensors",)) as tensors:
        assert set(tensors) == {"same", "a"}


def test_views_of_stored_tensors() -> None:
    matrix = torch.arange(12.0).view(4, 3)
    stored = InMemory(matrix)
    assert torch.equal(RowRange(stored, 1, 3).read(1, 2), matrix[2:3])
    order = torch.tensor([2, 0, 3, 1])
    assert torch.equal(Reordered(stored, order).read(1, 4), matrix[order][1:4])
    assert torch.equal(Reordered(stored, order).blocks(0, 2), matrix[order][:2])
    assert torch.equal(Shifted(stored, -1.0).read(0, 4), matrix - 1)
    assert torch.equal(Item(InMemory(matrix.view(2, 2, 3)), 1).read(0, 2), matrix[2:])
    assert torch.equal(AsRow(InMemory(matrix[0])).read(0, 1), matrix[:1])
    target = torch.zeros(2, 2, dtype=torch.float64)
    copy_into(target, stored, slice(1, 3), slice(1, None))
    assert torch.equal(target.float(), matrix[1:3, 1:])


def test_large_block_tensors_are_copied_in_chunks() -> None:
    longest = 0

    class Watched(InMemory):
        def read(self, start: int, stop: int) -> torch.Tensor:
            nonlocal longest
            longest = max(longest, stop - start)
            return super().read(start, stop)

    source = torch.randn(9000, 1024)
    target = torch.empty(9000, 1024)
    copy_into(target, Watched(source, kind="Q8_0"))
    assert torch.equal(target, source)
    assert longest <= 4096


def test_dummy_weights_are_seeded_small_and_finite(folder: Path) -> None:
    checkpoint = open_checkpoint(str(folder), load_format="dummy")
    one, same, other = (
        build_model(checkpoint, dtype=torch.bfloat16, device=CPU, seed=seed).logits(
            torch.ones(1, 16, dtype=torch.bfloat16)
        )
        for seed in (1, 1, 2)
    )
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    assert torch.isfinite(one).all()


def test_dummy_weights_can_be_drawn_evenly(folder: Path) -> None:
    checkpoint = open_checkpoint(str(folder), load_format="dummy")
    model = build_model(checkpoint, dtype=torch.float32, device=CPU, dummy_weights="even")
    assert isinstance(model, torch.nn.Module)
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    assert matrices
    for weight in matrices:
        assert weight.abs().max() <= 1e-3
        assert weight.std() == pytest.approx(1e-3 / 3**0.5, rel=0.1)


def test_modules_may_draw_their_dummies_themselves() -> None:
    class Packed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(4, 4, dtype=torch.uint8), requires_grad=False)

        def draw_dummies(self, name: str, draw: DummyDraw) -> None:
            self.weight.random_(0, 256, generator=draw.generator(name, self.weight.device))

    model = torch.nn.ModuleDict({"a": Packed(), "b": Packed(), "c": torch.nn.Linear(4, 4)})
    fill_dummy(model, seed=1)
    assert not torch.equal(model["a"].weight, model["b"].weight)
    assert model["c"].weight.abs().max() < 0.2
    again = torch.nn.ModuleDict({"a": Packed()})
    fill_dummy(again, seed=1)
    assert torch.equal(again["a"].weight, model["a"].weight)


def test_every_registered_architecture_can_be_imported() -> None:
    for name in ARCHITECTURES:
        architecture = find_architecture(name)
        assert callable(architecture.make)
        assert isinstance(architecture.weights, Mapping)


def test_unknown_architecture_names_similar_ones() -> None:
    with pytest.raises(UnsupportedModel, match="LamaForCausalLM") as caught:
        find_architecture("LamaForCausalLM")
    assert "LlamaForCausalLM" in caught.value.why
    assert "bough.models" in caught.value.fix


def test_models_of_other_packages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, folder: Path) -> None:
    (tmp_path / "my_models.py").write_text("from bough.models.llama import WEIGHTS, make, read\n")
    (tmp_path / "half_a_model.py").write_text("WEIGHTS = None\n")
    monkeypatch.syspath_prepend(tmp_path)
    entries = [
        SimpleNamespace(name="MineForCausalLM", value="my_models"),
        SimpleNamespace(name="HalfForCausalLM", value="half_a_model"),
    ]
    monkeypatch.setattr(registry, "entry_points", lambda group: entries if group == "bough.models" else [])
    monkeypatch.setattr(registry, "_added", registry._added.__wrapped__)
    config = {**CONFIG, "architectures": ["MineForCausalLM"], "model_type": "mine"}
    (folder / "config.json").write_text(json.dumps(config))
    assert np.isfinite(build(folder).logits(torch.ones(1, 16)).numpy()).all()
    with pytest.raises(UnsupportedModel, match="can't be used") as caught:
        find_architecture("HalfForCausalLM")
    assert "make" in caught.value.why


def test_progress_counts_the_files_bytes(folder: Path) -> None:
    """Every byte of every tensor once, in order, to the end."""
    told: list[tuple[int, int]] = []
    checkpoint = open_checkpoint(str(folder))
    build_model(checkpoint, dtype=torch.float32, device=CPU, progress=lambda done, total: told.append((done, total)))
    in_file = sum(tensor.nbytes for tensor in checkpoint.tensors.values())
    assert {total for _, total in told} == {in_file}
    assert told == sorted(told)
    assert told[-1] == (in_file, in_file)
    assert len(told) > 10


def test_progress_counts_gguf_blocks() -> None:
    """The embedded model: blocks, fused and shared tensors."""
    told: list[tuple[int, int]] = []
    checkpoint = open_checkpoint("")
    build_model(checkpoint, dtype=torch.float32, device=CPU, progress=lambda done, total: told.append((done, total)))
    done, total = told[-1]
    assert done == total
    assert total == sum(tensor.nbytes for name, tensor in checkpoint.tensors.items() if name != "rope_freqs.weight")


def test_a_module_is_finished_before_the_next_ones_weights_are_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a scheme holds back until a matrix is whole is that of one matrix, not of the model."""
    seen: list[str] = []

    class Late(DenseMatrix):
        def __init__(self, name: str, *rest: Any) -> None:
            super().__init__(*rest)
            self.name = name

        def weight_slots(self) -> dict[str, Slot]:
            def watched(name: str, slot: Slot) -> Slot:
                return dataclasses.replace(
                    slot, put=lambda stored: (seen.append(f"{self.name} {name}"), slot.put(stored))
                )

            return {name: watched(name, slot) for name, slot in super().weight_slots().items()}

        def finish_loading(self) -> None:
            seen.append(f"{self.name} finished")

    monkeypatch.setattr(
        Unquantized, "matrix", lambda self, name, parts, *, kind, dtype, device: Late(name, parts, dtype, device)
    )
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    build(folder)
    first = seen.index("layers.0.attn.qkv q.weight")
    qkv = "layers.0.attn.qkv"
    assert seen[first : first + 4] == [f"{qkv} {each}" for each in ("q.weight", "k.weight", "v.weight", "finished")]
    assert sum(each.endswith("finished") for each in seen) == 3 * 4 + 2
    owners = [each.rsplit(" ", 1)[0] for each in seen]
    assert [name for name, _ in itertools.groupby(owners)] == list(dict.fromkeys(owners))
