"""The families that bough implements, with checkpoints that are examples of them: what docs/models.md is generated from."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import Final, NamedTuple

from bough.models.registry import ARCHITECTURES, DUAL_ENCODERS, ENCODERS


class FamilyGroup(NamedTuple):
    """Architectures that one test shows."""

    title: str
    test: str
    examples: dict[str, str]
    """Architecture -> checkpoints, or a word about it."""
    note: str = ""
    """How the test shows them, where it is not as the page says of all."""


GROUPS: Final = (
    FamilyGroup(
        "Most used",
        "tests/models/test_against_transformers.py, tests/grid/test_every_architecture.py",
        {
            "LlamaForCausalLM": "meta-llama/Llama-3.1-8B-Instruct, HuggingFaceTB/SmolLM2-1.7B-Instruct",
            "MistralForCausalLM": "mistralai/Mistral-7B-Instruct-v0.3, mistralai/Mistral-Nemo-Instruct-2407",
            "MixtralForCausalLM": "mistralai/Mixtral-8x7B-Instruct-v0.1",
            "Qwen2ForCausalLM": "Qwen/Qwen2.5-7B-Instruct, deepseek-ai/DeepSeek-R1-Distill-Qwen-7B",
            "Qwen2MoeForCausalLM": "Qwen/Qwen1.5-MoE-A2.7B-Chat",
            "Qwen3ForCausalLM": "Qwen/Qwen3-8B",
            "Qwen3MoeForCausalLM": "Qwen/Qwen3-30B-A3B",
            "Gemma2ForCausalLM": "google/gemma-2-9b-it",
            "Gemma3ForCausalLM": "google/gemma-3-1b-it",
            "Phi3ForCausalLM": "microsoft/Phi-3.5-mini-instruct, microsoft/phi-4",
            "SmolLM3ForCausalLM": "HuggingFaceTB/SmolLM3-3B",
        },
    ),
    FamilyGroup(
        "Dense",
        "tests/models/test_dense_families.py",
        {
            "ApertusForCausalLM": "swiss-ai/Apertus-8B-Instruct-2509",
            "ArceeForCausalLM": "arcee-ai/AFM-4.5B",
            "Cohere2ForCausalLM": "CohereLabs/c4ai-command-r7b-12-2024, CohereLabs/c4ai-command-a-03-2025",
            "CohereForCausalLM": "CohereLabs/c4ai-command-r-v01, CohereLabs/c4ai-command-r-plus",
            "CwmForCausalLM": "facebook/cwm",
            "Ernie4_5ForCausalLM": "baidu/ERNIE-4.5-0.3B-PT",
            "Exaone4ForCausalLM": "LGAI-EXAONE/EXAONE-4.0-32B",
            "GemmaForCausalLM": "google/gemma-7b-it",
            "Glm4ForCausalLM": "zai-org/GLM-4-9B-0414, zai-org/GLM-Z1-32B-0414",
            "GlmForCausalLM": "zai-org/glm-4-9b-chat-hf",
            "GraniteForCausalLM": "ibm-granite/granite-3.3-8b-instruct",
            "GraniteSWAForCausalLM": "ibm-granite/granite-swash-2b",
            "HeliumForCausalLM": "kyutai/helium-1-2b",
            "HunYuanDenseV1ForCausalLM": "tencent/Hunyuan-7B-Instruct",
            "HyperCLOVAXForCausalLM": "naver-hyperclovax/HyperCLOVAX-SEED-Think-14B",
            "Ministral3ForCausalLM": "the text part of mistralai/Ministral-3-8B-Instruct-2512",
            "Jais2ForCausalLM": "inceptionai/Jais-2-8B-Chat",
            "MinistralForCausalLM": "mistralai/Ministral-8B-Instruct-2410",
            "NanoChatForCausalLM": "karpathy/nanochat-d32",
            "NemotronForCausalLM": "nvidia/Minitron-8B-Base",
            "Olmo2ForCausalLM": "allenai/OLMo-2-1124-13B-Instruct",
            "Olmo3ForCausalLM": "allenai/Olmo-3-7B-Think",
            "OlmoForCausalLM": "allenai/OLMo-7B-0724-Instruct-hf",
            "PersimmonForCausalLM": "adept/persimmon-8b-chat",
            "PhiForCausalLM": "microsoft/phi-2, microsoft/phi-1_5",
            "SeedOssForCausalLM": "ByteDance-Seed/Seed-OSS-36B-Instruct",
            "StableLmForCausalLM": "stabilityai/stablelm-2-12b-chat, stabilityai/stablelm-zephyr-3b",
            "Starcoder2ForCausalLM": "bigcode/starcoder2-15b",
            "VaultGemmaForCausalLM": "google/vaultgemma-1b",
        },
    ),
    FamilyGroup(
        "Experts",
        "tests/models/test_expert_families.py",
        {
            "AfmoeForCausalLM": "arcee-ai/Trinity-Mini, arcee-ai/Trinity-Nano-Preview",
            "Cohere2MoeForCausalLM": "CohereLabs/command-a-plus-05-2026",
            "DbrxForCausalLM": "databricks/dbrx-instruct",
            "Dots1ForCausalLM": "rednote-hilab/dots.llm1.inst",
            "Ernie4_5_MoeForCausalLM": "baidu/ERNIE-4.5-21B-A3B-PT",
            "ExaoneMoeForCausalLM": "LGAI-EXAONE/K-EXAONE-236B-A23B",
            "FlexOlmoForCausalLM": "allenai/FlexOlmo-7x7B-1T",
            "Glm4MoeForCausalLM": "zai-org/GLM-4.5-Air, zai-org/GLM-4.6",
            "GptOssForCausalLM": "openai/gpt-oss-20b, openai/gpt-oss-120b",
            "GraniteMoeSWAForCausalLM": "ibm-granite/granite-swash-3b-a600m",
            "MellumForCausalLM": "JetBrains/Mellum2-12B-A2.5B-Base",
            "GraniteMoeForCausalLM": "ibm-granite/granite-3.1-3b-a800m-instruct",
            "GraniteMoeSharedForCausalLM": "ibm-research/moe-7b-1b-active-shared-experts",
            "HYV3ForCausalLM": "tencent/Hy3-preview",
            "HunYuanMoEV1ForCausalLM": "tencent/Hunyuan-A13B-Instruct",
            "LagunaForCausalLM": "poolside/laguna-XS.2",
            "Llama4ForCausalLM": "the text part of meta-llama/Llama-4-Scout-17B-16E-Instruct",
            "MiMoV2FlashForCausalLM": "XiaomiMiMo/MiMo-V2-Flash",
            "MiniMaxM2ForCausalLM": "MiniMaxAI/MiniMax-M2",
            "OlmoeForCausalLM": "allenai/OLMoE-1B-7B-0125-Instruct",
            "PhiMoEForCausalLM": "microsoft/Phi-3.5-MoE-instruct",
            "PhimoeForCausalLM": "the same, as transformers writes it",
            "SolarOpenForCausalLM": "upstage/Solar-Open-100B",
        },
    ),
    FamilyGroup(
        "Without a class in transformers",
        "tests/models/test_renamed_families.py",
        {
            "BailingMoeForCausalLM": "inclusionAI/Ling-lite-1.5",
            "BailingMoeV2ForCausalLM": "inclusionAI/Ling-mini-2.0, inclusionAI/Ring-flash-2.0",
            "DeepseekForCausalLM": "deepseek-ai/deepseek-moe-16b-chat",
            "ExaoneForCausalLM": "LGAI-EXAONE/EXAONE-3.5-7.8B-Instruct, LGAI-EXAONE/EXAONE-Deep-7.8B",
            "InternLM2ForCausalLM": "internlm/internlm2_5-7b-chat",
            "InternLM3ForCausalLM": "internlm/internlm3-8b-instruct",
            "MiMoForCausalLM": "XiaomiMiMo/MiMo-7B-RL",
            "MiniMaxM1ForCausalLM": "MiniMaxAI/MiniMax-M1-80k, MiniMaxAI/MiniMax-M1-40k",
            "MiniMaxText01ForCausalLM": "MiniMaxAI/MiniMax-Text-01",
            "MiniCPMForCausalLM": "openbmb/MiniCPM4-8B, openbmb/MiniCPM-2B-sft-bf16",
        },
        "Their weights are compared with those of a class that computes the same, under the family's names.",
    ),
    FamilyGroup(
        "Latents (MLA)",
        "tests/models/test_latent_families.py",
        {
            "AXK1ForCausalLM": "skt/A.X-K1",
            "DeepseekV2ForCausalLM": "deepseek-ai/DeepSeek-V2-Lite-Chat, deepseek-ai/DeepSeek-Coder-V2-Lite-Instruct",
            "DeepseekV32ForCausalLM": "deepseek-ai/DeepSeek-V3.2, deepseek-ai/DeepSeek-V3.2-Exp",
            "DeepseekV3ForCausalLM": "deepseek-ai/DeepSeek-V3, deepseek-ai/DeepSeek-R1, moonshotai/Kimi-K2-Instruct",
            "Glm4MoeLiteForCausalLM": "zai-org/GLM-4.7-Flash",
            "GlmMoeDsaForCausalLM": "zai-org/GLM-5",
            "MiniCPM3ForCausalLM": "openbmb/MiniCPM3-4B",
            "Mistral4ForCausalLM": "the text part of mistralai/Mistral-Small-4-119B-2603",
            "YoutuForCausalLM": "tencent/Youtu-LLM-2B",
        },
    ),
    FamilyGroup(
        "Layers that share KV",
        "tests/models/test_shared_kv_families.py",
        {
            "Gemma3nForCausalLM": "the text part of google/gemma-3n-E4B-it",
            "Gemma4ForCausalLM": "the text part of google/gemma-4-31B-it",
        },
    ),
    FamilyGroup(
        "Layers that keep a state",
        "tests/models/test_state_families.py",
        {
            "BambaForCausalLM": "ibm-ai-platform/Bamba-9B-v2",
            "FalconH1ForCausalLM": "tiiuae/Falcon-H1-7B-Instruct",
            "FalconMambaForCausalLM": "tiiuae/falcon-mamba-7b-instruct",
            "GraniteMoeHybridForCausalLM": "ibm-granite/granite-4.0-h-small, ibm-granite/granite-4.0-micro",
            "JambaForCausalLM": "ai21labs/AI21-Jamba-Mini-1.7, ai21labs/AI21-Jamba-Reasoning-3B",
            "KimiLinearForCausalLM": "moonshotai/Kimi-Linear-48B-A3B-Instruct",
            "Lfm2ForCausalLM": "LiquidAI/LFM2-1.2B, LiquidAI/LFM2-350M",
            "Lfm2MoeForCausalLM": "LiquidAI/LFM2-8B-A1B",
            "MiniMaxForCausalLM": "MiniMaxAI/MiniMax-Text-01-hf",
            "Mamba2ForCausalLM": "mistralai/Mamba-Codestral-7B-v0.1",
            "MambaForCausalLM": "state-spaces/mamba-2.8b-hf",
            "NemotronHForCausalLM": "nvidia/NVIDIA-Nemotron-Nano-9B-v2, nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
            "Qwen3NextForCausalLM": "Qwen/Qwen3-Next-80B-A3B-Instruct",
            "Qwen3_5ForCausalLM": "the text part of Qwen/Qwen3.5-27B",
            "Qwen3_5MoeForCausalLM": "the text part of Qwen/Qwen3.5-35B-A3B",
        },
    ),
    FamilyGroup(
        "Models that see or hear",
        "tests/media",
        {
            "Cohere2VisionForConditionalGeneration": "CohereLabs/command-a-vision-07-2025",
            "DeepseekOcr2ForConditionalGeneration": "deepseek-community/DeepSeek-OCR-2",
            "Gemma3ForConditionalGeneration": "google/gemma-3-27b-it",
            "Gemma3nForConditionalGeneration": "google/gemma-3n-E2B-it, google/gemma-3n-E4B-it",
            "Gemma4ForConditionalGeneration": "google/gemma-4-E2B-it, google/gemma-4-26B-A4B-it, google/gemma-4-31B-it",
            "Glm46VForConditionalGeneration": "zai-org/GLM-4.6V-Flash",
            "Glm4vForConditionalGeneration": "zai-org/GLM-4.1V-9B-Thinking",
            "Glm4vMoeForConditionalGeneration": "zai-org/GLM-4.5V, zai-org/GLM-4.6V",
            "Idefics2ForConditionalGeneration": "HuggingFaceM4/idefics2-8b, HuggingFaceM4/idefics2-8b-chatty",
            "Idefics3ForConditionalGeneration": "HuggingFaceM4/Idefics3-8B-Llama3",
            "InternVLForConditionalGeneration": "OpenGVLab/InternVL3-8B, OpenGVLab/InternVL3_5-8B, and those in -hf",
            "KimiK25ForConditionalGeneration": "moonshotai/Kimi-K2.5, moonshotai/Kimi-K2.6",
            "Lfm2VlForConditionalGeneration": "LiquidAI/LFM2-VL-1.6B, LiquidAI/LFM2-VL-450M",
            "Llama4ForConditionalGeneration": "meta-llama/Llama-4-Scout-17B-16E-Instruct",
            "LlavaForConditionalGeneration": "llava-hf/llava-1.5-7b-hf, mistral-community/pixtral-12b",
            "LlavaNextForConditionalGeneration": "llava-hf/llava-v1.6-mistral-7b-hf",
            "LlavaOnevisionForConditionalGeneration": "llava-hf/llava-onevision-qwen2-7b-ov-hf",
            "MiniCPMV4_6ForConditionalGeneration": "openbmb/MiniCPM-V-4.6",
            "Mistral3ForConditionalGeneration": "mistralai/Mistral-Small-3.2-24B-Instruct-2506",
            "MllamaForConditionalGeneration": "meta-llama/Llama-3.2-11B-Vision-Instruct",
            "Phi4MMForCausalLM": "microsoft/Phi-4-multimodal-instruct",
            "Phi4MultimodalForCausalLM": "the same, as transformers writes it, with folders of adapters beside it",
            "SmolVLMForConditionalGeneration": "HuggingFaceTB/SmolVLM2-2.2B-Instruct",
            "Qwen2AudioForConditionalGeneration": "Qwen/Qwen2-Audio-7B-Instruct",
            "Qwen3ASRForConditionalGeneration": "Qwen/Qwen3-ASR-1.7B-hf",
            "VoxtralForConditionalGeneration": "mistralai/Voxtral-Mini-3B-2507, mistralai/Voxtral-Small-24B-2507",
            "WhisperForConditionalGeneration": "openai/whisper-large-v3-turbo",
            "Qwen2VLForConditionalGeneration": "Qwen/Qwen2-VL-7B-Instruct",
            "Qwen2_5_VLForConditionalGeneration": "Qwen/Qwen2.5-VL-7B-Instruct",
            "Qwen3VLForConditionalGeneration": "Qwen/Qwen3-VL-8B-Instruct",
            "Qwen3VLMoeForConditionalGeneration": "Qwen/Qwen3-VL-30B-A3B-Instruct",
            "Qwen2_5OmniForConditionalGeneration": "Qwen/Qwen2.5-Omni-7B (text out)",
            "Qwen2_5OmniThinkerForConditionalGeneration": "the thinker of it alone",
            "Qwen3OmniMoeForConditionalGeneration": "Qwen/Qwen3-Omni-30B-A3B-Instruct (text out)",
            "Qwen3OmniMoeThinkerForConditionalGeneration": "the thinker of it alone",
            "Qwen3_5ForConditionalGeneration": "Qwen/Qwen3.5-27B",
            "Qwen3_5MoeForConditionalGeneration": "Qwen/Qwen3.5-35B-A3B",
        },
    ),
    FamilyGroup(
        "Earlier",
        "tests/models/test_earlier_families.py",
        {
            "BloomForCausalLM": "bigscience/bloomz-7b1",
            "CodeGenForCausalLM": "Salesforce/codegen-2B-mono",
            "FalconForCausalLM": "tiiuae/falcon-7b-instruct, tiiuae/falcon-40b, tiiuae/falcon-11B",
            "GPT2LMHeadModel": "openai-community/gpt2-xl",
            "GPTBigCodeForCausalLM": "bigcode/starcoder, bigcode/gpt_bigcode-santacoder",
            "GPTJForCausalLM": "EleutherAI/gpt-j-6b",
            "GPTNeoForCausalLM": "EleutherAI/gpt-neo-2.7B",
            "GPTNeoXForCausalLM": "EleutherAI/pythia-12b, databricks/dolly-v2-12b",
            "MPTForCausalLM": "mosaicml/mpt-7b-instruct",
            "MptForCausalLM": "the same, as transformers writes it",
            "OPTForCausalLM": "facebook/opt-6.7b, facebook/opt-350m",
        },
    ),
)

_TOP = """# Models

Generated by `bough models families --markdown > docs/models.md` from the registry.

{count} architectures are implemented by files of bough's own, each compared with transformers on tiny random checkpoints of
every variant: logits to 1e-4 in float32, and 64 greedy tokens through the engine, in chunks, in batches and again from the
prefix cache. `bough doctor MODEL` says whether a checkpoint can be served here, before its weights are downloaded.

- **Architectures that are not listed** run through transformers' own module, with bough's attention over pages, prefix
  cache, batching and sampling, if the installed transformers has a class for them that consists of attention layers
  (`--model-impl auto`, the default; the log says so). They run on one device, without CUDA graphs. `--model-impl bough`
  refuses them, `--model-impl transformers` runs a listed one that way, to compare.
- **Code that comes with a checkpoint** is never run for a model. `--trust-remote-code` concerns tokenizers alone, and those
  of tiktoken's, SentencePiece's and Mistral's files are read without it.
- **Chat formats**: DeepSeek V3.2's checkpoints bring a program instead of a chat template; its format is built in, and taken
  where such a checkpoint has no template (`--chat-template deepseek-v3.2` elsewhere). It thinks if a request sets
  `chat_template_kwargs: {{"thinking": true}}`.
- **Mistral's own layout** (`params.json`, `consolidated.safetensors`, `tekken.json`) is read if there is no `config.json`.
- **Heads**: `...ForSequenceClassification`, `...ForRewardModel` and bare `...Model` classes of these architectures pool,
  embed and score: see [embeddings](embeddings.md).
- **Models that see** take images: see [multimodal](multimodal.md). `--language-model-only` serves them without their towers.
- **Drafting layers** behind the last one (GLM-4.5, DeepSeek V3 and V3.2) are read over, unless they draft
  (`--speculative-algorithm NEXTN`).
- **Windows** (Gemma, Mistral, gpt-oss, Llama 4's chunks ...) bound what attention reads and what is kept: pages behind a
  window are freed while a request runs, and a cached prefix needs its last window only, see
  [KV groups](decisions/kv_groups.md).
- **Layers that share KV** (Gemma 3n, Gemma 4): those that read another layer's keys and values keep none. Such models are
  not split by layers (`--pp-size`), nor by the tokens of a sequence (`--attn-cp-size`).
- **Latents** (MLA) keep `kv_lora_rank + qk_rope_head_dim` numbers per token and layer, on every rank.
- **States**: layers of recurrent and hybrid models keep one state per request instead of KV of every token. A cached
  prefix ends where a state was saved; what does not work with states is in [KV groups](decisions/kv_groups.md).
- **Sparse attention** (DeepSeek V3.2, GLM-5): each query reads the `index_topk` tokens that an indexer scores best. Keys of
  indexers are kept in pages beside the latents, see [latents](decisions/latents.md). Such models are not split by the tokens
  of a sequence (`--attn-cp-size`), and a stage of a pipeline begins with a layer that has an indexer.
- ChatGLM 1 to 3, Baichuan and Hunyuan-Large (keys and values shared between layers, `use_cla`) are in no class of
  transformers that could be compared with, and are not served. Nor are models with hyper-connections and compressed KV
  (DeepSeek V4, GLM-5.3).
"""


def markdown() -> str:
    """docs/models.md."""
    lines = [_TOP.format(count=len(ARCHITECTURES))]
    for group in GROUPS:
        note = f" {group.note}" if group.note else ""
        lines += [f"## {group.title}", "", f"Shown by {_code(group.test)}.{note}", ""]
        lines += ["| architecture | what it is | checkpoints |", "|---|---|---|", *_rows(group), ""]
    lines += [
        "## Encoders", "", "Shown by `tests/pooling`.", "", "| architecture | what it is |", "|---|---|",
        *(f"| `{name}` and its heads | {_about(path)} |" for name, path in sorted(ENCODERS.items())),
        *(f"| `{name}Model` | {_about(path)} |" for name, path in sorted(DUAL_ENCODERS.items())),
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def text() -> str:
    """One line an architecture."""
    rows = [(name, examples) for group in GROUPS for name, examples in group.examples.items()]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {examples}" for name, examples in sorted(rows))


def _rows(group: FamilyGroup) -> Iterator[str]:
    for name, examples in sorted(group.examples.items()):
        yield f"| `{name}` | {_about(ARCHITECTURES[name])} | {examples} |"


def _about(path: str) -> str:
    """The first paragraph of a model file."""
    return " ".join((import_module(path).__doc__ or "").split("\n\n")[0].split())


def _code(paths: str) -> str:
    return ", ".join(f"`{path}`" for path in paths.split(", "))
