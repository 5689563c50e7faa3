"""Architecture name -> the module that implements it. Modules are imported when asked for.

A module offers `read(config)`, which gives the model's facts, `make(facts, build)`, which returns a `Model` without weights,
and `WEIGHTS`, the mapping of names. Packages add their own through the entry point group `bough.models`: the name is the
architecture, the value such a module.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from bough.config.concerns import ModelImpl
from bough.config.fields import Fields
from bough.config.lora_paths import with_given
from bough.config.model_facts import ModelFacts
from bough.config.pooling_facts import is_dual, split_architecture
from bough.core.errors import UnsupportedModel
from bough.models import through_transformers

if TYPE_CHECKING:  # what only asks which models there are needs no torch
    from torch import nn

    from bough.layers.build import Build
    from bough.weights.mapping import Mapping as WeightMapping

ENTRY_POINTS: Final = "bough.models"
ARCHITECTURES: Final[dict[str, str]] = {
    "LlamaForCausalLM": "bough.models.llama",
    "MllamaForConditionalGeneration": "bough.models.mllama",
    "Qwen2_5OmniForConditionalGeneration": "bough.models.qwen2_5_omni",
    "Qwen2_5OmniThinkerForConditionalGeneration": "bough.models.qwen2_5_omni",
    "Qwen3OmniMoeForConditionalGeneration": "bough.models.qwen3_omni_moe",
    "Qwen3OmniMoeThinkerForConditionalGeneration": "bough.models.qwen3_omni_moe",
    "Qwen3ASRForConditionalGeneration": "bough.models.qwen3_asr",
    "VoxtralForConditionalGeneration": "bough.models.voxtral",
    "WhisperForConditionalGeneration": "bough.models.whisper",
    "SmolLM3ForCausalLM": "bough.models.smollm3",
    "MistralForCausalLM": "bough.models.mistral",
    "Qwen2ForCausalLM": "bough.models.qwen2",
    "Qwen3ForCausalLM": "bough.models.qwen3",
    "MiMoForCausalLM": "bough.models.mimo",
    "GemmaForCausalLM": "bough.models.gemma",
    "Gemma2ForCausalLM": "bough.models.gemma2",
    "Gemma3ForCausalLM": "bough.models.gemma3",
    "Gemma3nForCausalLM": "bough.models.gemma3n",
    "Gemma4ForCausalLM": "bough.models.gemma4",
    "Gemma3nForConditionalGeneration": "bough.models.gemma3n_mm",
    "Gemma4ForConditionalGeneration": "bough.models.gemma4_vl",
    "Phi3ForCausalLM": "bough.models.phi3",
    "MixtralForCausalLM": "bough.models.mixtral",
    "Qwen2MoeForCausalLM": "bough.models.qwen2_moe",
    "Qwen3NextForCausalLM": "bough.models.qwen3_next",
    "Qwen3_5ForCausalLM": "bough.models.qwen3_5",
    "Qwen3_5MoeForCausalLM": "bough.models.qwen3_5_moe",
    "Qwen3MoeForCausalLM": "bough.models.qwen3_moe",
    "GraniteForCausalLM": "bough.models.granite",
    "GraniteSWAForCausalLM": "bough.models.granite_swa",
    "GraniteMoeSWAForCausalLM": "bough.models.granite_moe_swa",
    "HyperCLOVAXForCausalLM": "bough.models.hyperclovax",
    "MellumForCausalLM": "bough.models.mellum",
    "OlmoForCausalLM": "bough.models.olmo",
    "Olmo2ForCausalLM": "bough.models.olmo2",
    "Olmo3ForCausalLM": "bough.models.olmo3",
    "CohereForCausalLM": "bough.models.cohere",
    "Cohere2ForCausalLM": "bough.models.cohere2",
    "StableLmForCausalLM": "bough.models.stablelm",
    "Starcoder2ForCausalLM": "bough.models.starcoder2",
    "PhiForCausalLM": "bough.models.phi",
    "NemotronForCausalLM": "bough.models.nemotron",
    "GlmForCausalLM": "bough.models.glm",
    "Glm4ForCausalLM": "bough.models.glm4",
    "Ernie4_5ForCausalLM": "bough.models.ernie4_5",
    "HunYuanDenseV1ForCausalLM": "bough.models.hunyuan",
    "SeedOssForCausalLM": "bough.models.seed_oss",
    "Exaone4ForCausalLM": "bough.models.exaone4",
    "ArceeForCausalLM": "bough.models.arcee",
    "ApertusForCausalLM": "bough.models.apertus",
    "Ministral3ForCausalLM": "bough.models.ministral",
    "MinistralForCausalLM": "bough.models.ministral",
    "HeliumForCausalLM": "bough.models.helium",
    "CwmForCausalLM": "bough.models.cwm",
    "Jais2ForCausalLM": "bough.models.jais2",
    "NanoChatForCausalLM": "bough.models.nanochat",
    "PersimmonForCausalLM": "bough.models.persimmon",
    "VaultGemmaForCausalLM": "bough.models.vaultgemma",
    "ExaoneForCausalLM": "bough.models.exaone",
    "InternLM2ForCausalLM": "bough.models.internlm2",
    "InternLM3ForCausalLM": "bough.models.internlm3",
    "MiniCPMForCausalLM": "bough.models.minicpm",
    "Glm4MoeForCausalLM": "bough.models.glm4_moe",
    "Dots1ForCausalLM": "bough.models.dots1",
    "Ernie4_5_MoeForCausalLM": "bough.models.ernie4_5_moe",
    "HunYuanMoEV1ForCausalLM": "bough.models.hunyuan_moe",
    "OlmoeForCausalLM": "bough.models.olmoe",
    "FlexOlmoForCausalLM": "bough.models.flex_olmo",
    "GraniteMoeForCausalLM": "bough.models.granite_moe",
    "GraniteMoeSharedForCausalLM": "bough.models.granite_moe",
    "BambaForCausalLM": "bough.models.bamba",
    "GraniteMoeHybridForCausalLM": "bough.models.granite_moe_hybrid",
    "FalconH1ForCausalLM": "bough.models.falcon_h1",
    "FalconMambaForCausalLM": "bough.models.mamba",
    "JambaForCausalLM": "bough.models.jamba",
    "KimiLinearForCausalLM": "bough.models.kimi_linear",
    "Lfm2ForCausalLM": "bough.models.lfm2",
    "Lfm2MoeForCausalLM": "bough.models.lfm2_moe",
    "MambaForCausalLM": "bough.models.mamba",
    "Mamba2ForCausalLM": "bough.models.mamba2",
    "NemotronHForCausalLM": "bough.models.nemotron_h",
    "MiniMaxForCausalLM": "bough.models.minimax",
    "MiniMaxM1ForCausalLM": "bough.models.minimax",
    "MiniMaxText01ForCausalLM": "bough.models.minimax",
    "MiniMaxM2ForCausalLM": "bough.models.minimax_m2",
    "PhimoeForCausalLM": "bough.models.phimoe",
    "PhiMoEForCausalLM": "bough.models.phimoe",
    "Llama4ForCausalLM": "bough.models.llama4",
    "AfmoeForCausalLM": "bough.models.afmoe",
    "Cohere2MoeForCausalLM": "bough.models.cohere2_moe",
    "DbrxForCausalLM": "bough.models.dbrx",
    "ExaoneMoeForCausalLM": "bough.models.exaone_moe",
    "HYV3ForCausalLM": "bough.models.hy_v3",
    "LagunaForCausalLM": "bough.models.laguna",
    "MiMoV2FlashForCausalLM": "bough.models.mimo_v2",
    "SolarOpenForCausalLM": "bough.models.solar_open",
    "BailingMoeForCausalLM": "bough.models.bailing",
    "BailingMoeV2ForCausalLM": "bough.models.bailing",
    "DeepseekForCausalLM": "bough.models.deepseek_v1",
    "DeepseekV2ForCausalLM": "bough.models.deepseek_v2",
    "DeepseekV3ForCausalLM": "bough.models.deepseek",
    "DeepseekV32ForCausalLM": "bough.models.deepseek_v32",
    "GlmMoeDsaForCausalLM": "bough.models.glm_moe_dsa",
    "Glm4MoeLiteForCausalLM": "bough.models.glm4_moe_lite",
    "MiniCPM3ForCausalLM": "bough.models.minicpm3",
    "YoutuForCausalLM": "bough.models.youtu",
    "AXK1ForCausalLM": "bough.models.axk1",
    "Mistral4ForCausalLM": "bough.models.mistral4",
    "GptOssForCausalLM": "bough.models.gpt_oss",
    "Cohere2VisionForConditionalGeneration": "bough.models.cohere2_vision",
    "Gemma3ForConditionalGeneration": "bough.models.gemma3_vl",
    "KimiK25ForConditionalGeneration": "bough.models.kimi_k25",
    "Llama4ForConditionalGeneration": "bough.models.llama4_vl",
    "MiniCPMV4_6ForConditionalGeneration": "bough.models.minicpmv",
    "Mistral3ForConditionalGeneration": "bough.models.mistral3",
    "Glm46VForConditionalGeneration": "bough.models.glm4v",
    "Glm4vForConditionalGeneration": "bough.models.glm4v",
    "Glm4vMoeForConditionalGeneration": "bough.models.glm4v_moe",
    "DeepseekOcr2ForConditionalGeneration": "bough.models.deepseek_ocr2",
    "Idefics2ForConditionalGeneration": "bough.models.idefics2",
    "Idefics3ForConditionalGeneration": "bough.models.idefics3",
    "InternVLForConditionalGeneration": "bough.models.internvl",
    "Lfm2VlForConditionalGeneration": "bough.models.lfm2_vl",
    "LlavaForConditionalGeneration": "bough.models.llava",
    "LlavaNextForConditionalGeneration": "bough.models.llava_next",
    "LlavaOnevisionForConditionalGeneration": "bough.models.llava_next",
    "Phi4MMForCausalLM": "bough.models.phi4mm",
    "Phi4MultimodalForCausalLM": "bough.models.phi4mm",
    "Qwen2AudioForConditionalGeneration": "bough.models.qwen2_audio",
    "SmolVLMForConditionalGeneration": "bough.models.idefics3",
    "Qwen2VLForConditionalGeneration": "bough.models.qwen2_vl",
    "Qwen2_5_VLForConditionalGeneration": "bough.models.qwen2_5_vl",
    "Qwen3VLForConditionalGeneration": "bough.models.qwen3_vl",
    "Qwen3VLMoeForConditionalGeneration": "bough.models.qwen3_vl_moe",
    "Qwen3_5ForConditionalGeneration": "bough.models.qwen3_5_vl",
    "Qwen3_5MoeForConditionalGeneration": "bough.models.qwen3_5_moe_vl",
    "GPT2LMHeadModel": "bough.models.gpt2",
    "GPTBigCodeForCausalLM": "bough.models.gpt_bigcode",
    "GPTJForCausalLM": "bough.models.gptj",
    "GPTNeoXForCausalLM": "bough.models.gpt_neox",
    "GPTNeoForCausalLM": "bough.models.gpt_neo",
    "CodeGenForCausalLM": "bough.models.codegen",
    "BloomForCausalLM": "bough.models.bloom",
    "FalconForCausalLM": "bough.models.falcon",
    "OPTForCausalLM": "bough.models.opt",
    "MptForCausalLM": "bough.models.mpt",
    "MPTForCausalLM": "bough.models.mpt",
}
ENCODERS: Final[dict[str, str]] = {
    "Bert": "bough.models.bert",
    "Roberta": "bough.models.xlm_roberta",
    "XLMRoberta": "bough.models.xlm_roberta",
    "Camembert": "bough.models.xlm_roberta",
}
"""Encoders, which only pool, by the architecture's name without its ending."""


DUAL_ENCODERS: Final[dict[str, str]] = {
    "CLIP": "bough.models.clip",
    "Siglip": "bough.models.siglip",
    "Siglip2": "bough.models.siglip2",
}
"""Encoders of texts and images with one space of vectors, which only embed, by the same names."""


class Architecture(NamedTuple):
    """How to make a model and fill it."""

    make: Callable[[ModelFacts, Build], nn.Module]
    weights: WeightMapping


def facts_of(config: Mapping[str, Any], impl: ModelImpl = "auto") -> ModelFacts:
    """What a config in Hugging Face's form says, read by the model it is for. A pooling model is read by what it is made of.
    `impl`: see `ModelConfig.model_impl`.

    Raises `UnsupportedModel` for an architecture without implementation, `ConfigError` for a config that makes no sense.
    """
    fields = Fields(config)
    name = fields.architecture()
    family, form = split_architecture(name)
    return with_given(_facts_of(fields, name, family, form, impl), fields)


def _facts_of(fields: Fields, name: str, family: str, form: str, impl: ModelImpl) -> ModelFacts:
    if impl == "transformers":
        return through_transformers.read(fields)
    if family in ENCODERS:
        module = import_module(ENCODERS[family])
    elif is_dual(name):
        module = import_module(DUAL_ENCODERS[family])
    else:
        bodied = f"{family}ForCausalLM"
        pooled = name not in architectures() and form not in ("", "ForCausalLM") and bodied in architectures()
        if impl == "auto" and not pooled and name not in architectures() and through_transformers.has(name):
            return through_transformers.read(fields)
        module = _import(bodied if pooled else name)
    facts: ModelFacts = module.read(fields)
    return facts


def architectures() -> dict[str, str]:
    """Architecture -> module; another package's replaces a built-in one of the same name. Imports nothing."""
    return {**ARCHITECTURES, **_added()}


def module_of(name: str) -> str:
    """The module that implements the architecture `name`. Raises `UnsupportedModel` if there is none. Imports nothing."""
    known = architectures()
    path = known.get(name)
    if path is None:
        close = difflib.get_close_matches(name, known, 3)
        raise UnsupportedModel(
            what=f"no implementation of {name}",
            why=f"there are {len(known)} architectures, of similar names {', '.join(close) or 'none'}; see docs/models.md",
            fix="choose another model, leave --model-impl at auto if transformers has it, or install a package with an "
            f"entry point {name!r} in the group {ENTRY_POINTS!r}",
        )
    return path


def find_architecture(name: str) -> Architecture:
    """The architecture called `name`. Raises `UnsupportedModel`."""
    module = _import(name)
    return Architecture(module.make, module.WEIGHTS)


def block_of(name: str) -> Callable[..., nn.Module]:
    """What makes a block of the architecture `name`: its module's `block`, or where that says nothing else, Llama's."""
    from bough.layers.blocks import PreNormBlock

    found: Callable[..., nn.Module] = vars(_import(name)).get("block", PreNormBlock)
    return found


def _import(name: str) -> ModuleType:
    path = module_of(name)
    try:
        module = import_module(path)
        missing = [each for each in ("read", "make", "WEIGHTS") if not hasattr(module, each)]
        if missing:
            raise AttributeError(f"it has no {', '.join(missing)}")
    except (ImportError, AttributeError) as error:
        if name not in _added():
            raise
        raise UnsupportedModel(
            what=f"the package that implements {name} can't be used",
            why=f"{path}: {error}",
            fix="it must be a module with read(config), make(facts, build) and WEIGHTS; reinstall or remove it",
        ) from error
    return module


@cache
def _added() -> dict[str, str]:
    """Looked for once: it takes ten milliseconds, and is asked for many times."""
    return {entry.name: entry.value for entry in entry_points(group=ENTRY_POINTS)}
