"""After `resolve` nothing is "auto", every decision has a reason, and what the user fixed stays."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bough.config.concerns import AUTO
from bough.config.kv_groups import KvPlan
from bough.config.memory_plan import GIB, MIB
from bough.config.resolve import Resolved, resolve
from bough.config.resolve_facts import MachineFacts, ModelPlanFacts
from bough.config.server_args import flat, load_config
from bough.config.step_memory import largest_step
from bough.core.errors import ConfigError
from bough.core.kv import Grows, KvGroup

SMOL = ModelPlanFacts(
    name="", context_length=8192, checkpoint_dtype="bfloat16", dense_params=30_000_000, packed_bytes=70_000_000,
    packed_params=104_000_000, quantization="gguf", kv_values_per_token=30 * 2 * 3 * 64, num_kv_heads=3, hidden_size=576,
    ffn_size=1536, attention_width=960, vocab_size=49_152,
)  # fmt: skip
LLAMA = ModelPlanFacts(
    name="llama", context_length=131_072, checkpoint_dtype="bfloat16", dense_params=8_030_000_000,
    kv_values_per_token=32 * 2 * 8 * 128, num_kv_heads=8, hidden_size=4096, ffn_size=14_336, attention_width=6144,
    vocab_size=128_256,
)  # fmt: skip
LAPTOP = MachineFacts(
    device="cpu", name="a CPU", arch="avx512", total_bytes=16 * GIB, free_bytes=10 * GIB, host_free_bytes=10 * GIB,
    physical_cores=2, fastest_dtype="float32", attention_backends=("cpu", "torch"),
)  # fmt: skip
H200 = MachineFacts(
    device="cuda", name="H200", arch="sm90", total_bytes=139 * GIB, free_bytes=138 * GIB, host_free_bytes=100 * GIB,
    num_devices=2, physical_cores=16, attention_backends=("hopper", "triton", "torch"),
)  # fmt: skip


def config(**given: object):  # type: ignore[no-untyped-def]
    return load_config(given, environ={}).config


@pytest.mark.parametrize(("machine", "model"), [(LAPTOP, SMOL), (H200, LLAMA), (H200, SMOL)])
def test_nothing_stays_open(machine: MachineFacts, model: ModelPlanFacts) -> None:
    resolved = resolve(config(), machine, model)
    values = flat(resolved.config)
    assert AUTO not in values.values()
    for name in ("device", "dtype", "kv_cache_dtype", "quantization", "attention_backend"):
        assert values[name] != "auto"
    assert all(decision.because for decision in resolved.decisions.values())
    for name, decision in resolved.decisions.items():
        assert values[name] == decision.value
    assert len(resolved.lines()) == len(resolved.decisions)


def test_resolving_again_changes_nothing() -> None:
    once = resolve(config(), H200, LLAMA).config
    twice = resolve(once, H200, LLAMA)
    assert twice.config == once
    assert twice.decisions == {}


def test_what_the_user_fixed_stays_and_is_no_decision() -> None:
    fixed = {"dtype": "float16", "page_size": 8, "chunked_prefill_size": 100, "max_running_requests": 3,
             "context_length": 2000, "max_total_tokens": 8000, "cpu_threads": 1}  # fmt: skip
    resolved = resolve(config(**fixed), LAPTOP, SMOL)
    assert {name: flat(resolved.config)[name] for name in fixed} == fixed
    assert not set(fixed) & set(resolved.decisions)


def test_rows_decode_beside_a_whole_chunk() -> None:
    assert largest_step(8192, 0, 16384, 512) == 8192 + 512
    assert largest_step(8192, 16384, 16384, 512) == 16384 + 512
    assert largest_step(-1, 16384, 4096, 16) == 4096 + 16
    assert largest_step(2048, 0, 131_072, 1024) == 2048 + 256  # few against the prompts
    assert largest_step(8192, 0, 1000, 64) == 8192 + 64  # many short prompts fill a step too
    assert largest_step(8192, 0, 1000, 4) == 4000 + 4  # these don't
    assert largest_step(-1, 0, 4096, 16) == 4096 + 16
    assert largest_step(64, 0, 4096, 256) == 256  # all rows, if no prompt comes


def test_smaller_steps_are_suggested_only_where_they_help() -> None:
    suggested = 0
    for free in range(15_300, 20_000, 40):
        card = replace(H200, total_bytes=24 * GIB, free_bytes=free * MIB, num_devices=1)
        try:
            resolve(config(), card, LLAMA)
        except ConfigError as error:
            if "--chunked-prefill-size 512" in error.fix:
                suggested += 1
                resolve(config(chunked_prefill_size=512), card, LLAMA)
    assert suggested


def test_layers_of_many_short_launches_have_larger_graphs() -> None:
    """Products of 8 bits take half the time, and mixtures of experts more launches."""
    params = LLAMA.dense_params
    codes = replace(LLAMA, dense_params=0, packed_params=params, packed_bytes=params, quantization="fp8")
    halves = replace(codes, packed_bytes=params // 2, quantization="gptq")
    blocks = replace(codes, quantization="gguf")
    mixture = replace(
        LLAMA, expert_values=32 * 2 * 2880 * 2880, hidden_size=2880, ffn_size=11_520, attention_width=5120
    )
    found = [resolve(config(), H200, model) for model in (codes, halves, blocks, mixture)]
    assert [each.config.device.cuda_graph_max_tokens for each in found] == [1280, 512, 512, 1152]


def test_narrow_models_have_larger_graphs() -> None:
    narrow = replace(LLAMA, hidden_size=2048, attention_width=4096, ffn_size=6144)
    middling = replace(LLAMA, hidden_size=3072, attention_width=5120, ffn_size=8192)
    found = [resolve(config(), H200, model) for model in (narrow, middling, LLAMA)]
    assert [each.config.device.cuda_graph_max_tokens for each in found] == [1280, 1024, 512]
    assert found[0].plan.graph_bytes > found[2].plan.graph_bytes
    assert "launch" in found[0].decisions["cuda_graph_max_tokens"].because
    fixed = resolve(config(cuda_graph_max_tokens=256), H200, narrow)
    assert fixed.config.device.cuda_graph_max_tokens == 256
    off = resolve(config(cuda_graph=False), H200, narrow)
    assert "cuda_graph_max_tokens" not in off.decisions
    assert off.plan.graph_bytes == 0


def test_cpu_choices() -> None:
    values = flat(resolve(config(), LAPTOP, SMOL).config)
    assert values["dtype"] == "float32"
    assert values["cuda_graph"] is False
    assert values["cpu_threads"] == 2
    assert values["context_length"] == 8192
    assert values["quantization"] == "gguf"


def test_weights_stay_packed_where_something_multiplies_them_quickly() -> None:
    def chosen(machine: MachineFacts, model: ModelPlanFacts = SMOL, **settings: object) -> object:
        return resolve(config(**settings), machine, model).config.model.quantization

    bare = replace(LAPTOP, attention_backends=("torch",))
    assert chosen(LAPTOP) == "gguf"
    assert chosen(bare) == "none"
    assert chosen(bare, quantization="gguf-exact") == "gguf-exact"
    assert chosen(bare, replace(SMOL, packed_params=2_000_000_000)) == "gguf"  # eight of ten gigabytes are too many


def test_gpu_choices() -> None:
    values = flat(resolve(config(), H200, LLAMA).config)
    assert values["attention_backend"] == "hopper"
    assert values["page_size"] == 64
    assert values["chunked_prefill_size"] == 8192
    assert values["cuda_graph"] is True
    assert 800_000 < values["max_total_tokens"] < 1_000_000  # type: ignore[operator]


def test_steps_that_nobody_watches_are_larger_where_memory_is_plenty() -> None:
    def sizes(machine: MachineFacts, model: ModelPlanFacts = LLAMA, **settings: object) -> tuple[object, object]:
        values = flat(resolve(config(**settings), machine, model).config)
        return values["chunked_prefill_size"], values["unwatched_prefill_size"]

    assert sizes(H200) == (8192, 16896)
    assert sizes(replace(H200, total_bytes=80 * GIB, free_bytes=79 * GIB)) == (8192, 8192)
    assert sizes(H200, chunked_prefill_size=2048) == (2048, 2048)
    assert sizes(H200, chunked_prefill_size=2048, unwatched_prefill_size=3000) == (2048, 3000)
    assert sizes(H200, chunked_prefill_size=-1) == (-1, -1)
    assert sizes(LAPTOP, SMOL) == (1024, 1024)
    assert sizes(H200, deterministic=True) == (8192, 8192)
    both = {"chunked_prefill_size": 2048, "unwatched_prefill_size": 4096}
    assert sizes(H200, deterministic=True, **both) == (2048, 2048)
    plans = [resolve(config(**settings), H200, LLAMA).plan for settings in ({"chunked_prefill_size": 8192}, {})]
    assert plans[1].activation_bytes - plans[0].activation_bytes > GIB


def test_most_prefill_tokens_bound_both_sizes() -> None:
    def sizes(machine: MachineFacts, model: ModelPlanFacts = LLAMA, **settings: object) -> tuple[object, object]:
        values = flat(resolve(config(**settings), machine, model).config)
        return values["chunked_prefill_size"], values["unwatched_prefill_size"]

    assert sizes(H200, max_prefill_tokens=16384) == (8192, 16384)
    assert sizes(H200, max_prefill_tokens=5000) == (5000, 5000)
    assert sizes(H200, max_prefill_tokens=4096, chunked_prefill_size=6000, unwatched_prefill_size=7000) == (4096, 4096)
    assert sizes(H200, max_prefill_tokens=4096, chunked_prefill_size=-1) == (-1, -1)
    assert sizes(LAPTOP, SMOL, max_prefill_tokens=16384) == sizes(LAPTOP, SMOL)
    decided = resolve(config(max_prefill_tokens=5000), H200, LLAMA).decisions["unwatched_prefill_size"]
    assert (decided.value, decided.because) == (5000, "--max-prefill-tokens")


def test_the_first_layer_is_looked_up_where_memory_is_plenty() -> None:
    def looked_up(machine: MachineFacts, model: ModelPlanFacts = LLAMA, **settings: object) -> object:
        return flat(resolve(config(**settings), machine, model).config)["first_layer_table"]

    assert looked_up(H200) == "on"
    assert looked_up(H200, first_layer_table="off") == "off"
    assert looked_up(H200, safe_mode=True) == "off"
    assert looked_up(H200, is_embedding=True) == "off"
    assert looked_up(H200, replace(LLAMA, dense_params=60 * 10**9)) == "off"
    small = replace(H200, total_bytes=80 * GIB, free_bytes=79 * GIB)
    assert looked_up(small) == "off"
    assert looked_up(small, first_layer_table="on") == "on"
    assert looked_up(LAPTOP, SMOL) == "off"
    for machine, settings in ((LAPTOP, {}), (H200, {"is_embedding": True})):
        with pytest.raises(ConfigError, match="first-layer-table"):
            looked_up(machine, first_layer_table="on", **settings)


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_first_layers_table_is_planned_for(ranks: int) -> None:
    plans = [
        resolve(config(first_layer_table=given, tp_size=ranks), replace(H200, num_devices=2), LLAMA).plan
        for given in ("off", "on")
    ]
    table = LLAMA.vocab_size * LLAMA.attention_width * 2 // ranks
    assert plans[1].weight_bytes - plans[0].weight_bytes == table
    assert plans[0].kv_bytes - plans[1].kv_bytes == pytest.approx(table, rel=0.01)


@pytest.mark.parametrize(
    ("weights_gib", "settings"),
    [(15, {"max_total_tokens": 950_000}), (100, {}), (120, {}), (131, {}), (131, {"context_length": 6000}), (135, {})],
)
def test_no_model_is_served_worse_for_larger_steps(weights_gib: int, settings: dict[str, object]) -> None:
    """A device may have much memory, and a model take most of it."""
    model = replace(LLAMA, dense_params=weights_gib * GIB // 2)
    smaller = outcome_of(model, chunked_prefill_size=8192, **settings)
    larger = outcome_of(model, **settings)
    assert larger == smaller or larger[0] > 0.93 * smaller[0] > 0


def outcome_of(model: ModelPlanFacts, **settings: object) -> tuple[int, int, str]:
    try:
        plan = resolve(config(**settings), H200, model).plan
    except ConfigError as error:
        return 0, 0, error.what
    return plan.kv_tokens, plan.context_length, ""


def test_tensor_parallel_halves_weights_and_kv() -> None:
    one = resolve(config(), H200, LLAMA).plan
    two = resolve(config(tp_size=2), H200, LLAMA).plan
    assert two.weight_bytes * 2 == one.weight_bytes
    assert two.kv_tokens > 2 * one.kv_tokens
    more_ranks_than_heads = resolve(config(tp_size=16), H200, LLAMA).plan
    per_token = more_ranks_than_heads.kv_bytes / (more_ranks_than_heads.kv_tokens + 64)
    assert per_token == 32 * 2 * 1 * 128 * 2  # one head each, never less


def test_dequantising_costs_memory() -> None:
    packed = resolve(config(), LAPTOP, SMOL).plan.weight_bytes
    assert packed == 70_000_000 + 30_000_000 * 4
    assert resolve(config(quantization="none"), LAPTOP, SMOL).plan.weight_bytes == 134_000_000 * 4


def test_fp8_cache_doubles_the_tokens() -> None:
    bf16 = resolve(config(), H200, LLAMA).plan.kv_tokens
    fp8 = resolve(config(kv_cache_dtype="fp8_e4m3"), H200, LLAMA).plan.kv_tokens
    assert fp8 == pytest.approx(2 * bf16, rel=0.01)


def test_codes_take_their_bits_and_four_bytes_a_vector() -> None:
    """A layer's 8 heads of 128: 1,024 numbers each in keys and values, 16 vectors."""
    plan = KvPlan((KvGroup(Grows()),), 32 * 2 * 1024, vectors_per_token=32 * 16)
    llama = replace(LLAMA, kv=lambda page_size, context: plan)
    bf16 = resolve(config(), H200, llama).plan.kv_tokens
    for kind, kept in (("int8", 128 + 4), ("int4", 64 + 4)):
        tokens = resolve(config(kv_cache_dtype=kind), H200, llama).plan.kv_tokens
        assert tokens == pytest.approx(bf16 * 256 / kept, rel=0.01)


STANDALONE = {"speculative_algorithm": "STANDALONE", "speculative_draft_model_path": "small"}


def test_what_can_not_be_kept_in_codes_is_refused() -> None:
    uneven = KvPlan((KvGroup(Grows()),), 32 * 2 * 1024, vectors_per_token=32 * 16, even_vectors=False)
    for model, parallel, why in (
        (replace(LLAMA, no_kv_codes="its layers keep latents"), {}, "latents"),
        (replace(LLAMA, kv=lambda page_size, context: uneven), {}, "heads of another width"),
        (LLAMA, {"tp_size": 2, "attn_cp_size": 2}, "share the tokens"),
        (LLAMA, {"speculative_draft_kv_cache_dtype": "bfloat16", **STANDALONE}, "what drafts"),
    ):
        with pytest.raises(ConfigError) as refused:
            resolve(config(kv_cache_dtype="int8", **parallel), H200, model)
        assert why in refused.value.why
        assert refused.value.param == "kv_cache_dtype"


def test_safe_mode_switches_off() -> None:
    resolved = resolve(config(safe_mode=True), H200, LLAMA)
    values = flat(resolved.config)
    assert (values["overlap_schedule"], values["cuda_graph"], values["custom_kernels"]) == (False, False, False)
    assert resolved.decisions["overlap_schedule"].because == "--safe-mode"


@pytest.mark.parametrize(
    ("given", "machine"),
    [({"attention_backend": "torch"}, H200), ({}, replace(H200, attention_backends=("torch",)))],
    ids=["asked for", "none other here"],
)
def test_torch_attention_gets_no_graphs(given: dict[str, str], machine: MachineFacts) -> None:
    """It reads lengths back, which ends a graph's capture, and the engine with it."""
    resolved = resolve(config(**given), machine, LLAMA)
    assert flat(resolved.config)["cuda_graph"] is False
    assert "torch attention" in resolved.decisions["cuda_graph"].because


def test_old_gpus_get_float16() -> None:
    old = replace(H200, arch="sm75", has_bfloat16=False, attention_backends=("triton", "torch"))
    assert resolve(config(), old, LLAMA).config.model.dtype == "float16"


@pytest.mark.parametrize(
    ("given", "machine"),
    [({"device": "cuda"}, LAPTOP), ({"attention_backend": "hopper"}, LAPTOP), ({"context_length": 9000}, LAPTOP)],
)
def test_what_can_not_work_here(given: dict[str, object], machine: MachineFacts) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(config(**given), machine, SMOL)
    assert caught.value.why
    assert caught.value.fix


def test_deterministic_computes_one_at_a_time() -> None:
    resolved = resolve(config(deterministic=True), H200, LLAMA)
    made = resolved.config
    assert (made.scheduler.max_running_requests, made.cache.radix_cache, made.device.cuda_graph) == (1, False, False)
    assert {"max_running_requests", "radix_cache", "cuda_graph"} <= resolved.decisions.keys()
    with pytest.raises(ConfigError, match="can't both be had"):
        resolve(config(deterministic=True, max_running_requests=4), H200, LLAMA)


def test_quantised_weights_on_a_gpu() -> None:
    """They stay packed, one is dequantised at a time, and keys and values take 8 bits if there are scales for them."""
    fp8 = replace(
        LLAMA, dense_params=1_050_000_000, packed_bytes=7_000_000_000, packed_params=6_980_000_000,
        quantization="fp8", weight_format="FP8, blocks of 128 x 128",
    )  # fmt: skip
    plain, packed = (resolve(config(first_layer_table="off"), H200, model) for model in (LLAMA, fp8))
    assert packed.config.model.quantization == "fp8"
    assert packed.decisions["quantization"].because == "FP8, blocks of 128 x 128"
    assert packed.plan.weight_bytes == 2 * 1_050_000_000 + 7_000_000_000
    assert packed.plan.activation_bytes - plain.plan.activation_bytes == 2 * 14_336 * 4096 * 2
    assert (
        resolve(config(quantization="none", first_layer_table="off"), H200, fp8).plan.weight_bytes == 2 * 8_030_000_000
    )
    assert packed.config.model.kv_cache_dtype == "bfloat16"
    scaled = replace(fp8, kv_format="fp8_e4m3")
    assert resolve(config(), H200, scaled).config.model.kv_cache_dtype == "fp8_e4m3"
    assert (
        resolve(
            config(), replace(LAPTOP, total_bytes=64 * GIB, free_bytes=60 * GIB), scaled
        ).config.model.kv_cache_dtype
        == "float32"
    )
    assert resolve(config(kv_cache_dtype="bfloat16"), H200, scaled).config.model.kv_cache_dtype == "bfloat16"


def test_kv_of_what_drafts_counts_in_its_own_type() -> None:
    model = replace(LLAMA, kv=lambda page_size, context: KvPlan((KvGroup(Grows()),), 33 * 2048, draft_values=2048))
    asked = {"speculative_algorithm": "EAGLE3", "speculative_draft_model_path": "head"}

    def of(**given: object) -> Resolved:
        return resolve(config(**asked, **given), H200, model)

    plain, small = of(), of(speculative_draft_kv_cache_dtype="fp8_e4m3")
    assert plain.decisions["speculative_draft_kv_cache_dtype"].value == "bfloat16"
    assert plain.config.speculative.speculative_draft_kv_cache_dtype == "bfloat16"
    page = plain.plan.page_size
    assert plain.plan.kv_bytes // (plain.plan.num_pages + 1) == 33 * 2048 * 2 * page
    assert small.plan.kv_bytes // (small.plan.num_pages + 1) == (32 * 2 + 1) * 2048 * page
    both = of(kv_cache_dtype="fp8_e4m3", speculative_draft_kv_cache_dtype="bf16")
    assert both.plan.kv_bytes // (both.plan.num_pages + 1) == (32 + 2) * 2048 * page
