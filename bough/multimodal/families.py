"""Which processor a model has."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

from bough.config.fields import Fields
from bough.config.pixtral import is_pixtral
from bough.multimodal.anyres import AnyresProcessor
from bough.multimodal.cohere2_vision import Cohere2VisionProcessor
from bough.multimodal.deepseek_ocr2 import Ocr2Processor
from bough.multimodal.dual import ClipProcessor, NaflexProcessor, SiglipProcessor
from bough.multimodal.gemma3 import Gemma3Processor
from bough.multimodal.gemma3n import Gemma3nProcessor
from bough.multimodal.gemma4 import Gemma4Processor
from bough.multimodal.glm4v import Glm4vProcessor
from bough.multimodal.idefics2 import Idefics2Processor
from bough.multimodal.idefics3 import Idefics3Processor
from bough.multimodal.internvl import InternvlProcessor
from bough.multimodal.kimi_k25 import KimiProcessor
from bough.multimodal.lfm2_vl import Lfm2VlProcessor
from bough.multimodal.llama4 import Llama4Processor
from bough.multimodal.llava import LlavaProcessor
from bough.multimodal.minicpmv import MiniCpmProcessor
from bough.multimodal.mllama import MllamaProcessor
from bough.multimodal.phi4mm import Phi4Processor
from bough.multimodal.pixtral import PixtralProcessor
from bough.multimodal.processor import Processor
from bough.multimodal.qwen2_audio import Qwen2AudioProcessor
from bough.multimodal.qwen3_asr import Qwen3AsrProcessor
from bough.multimodal.qwen_omni import QwenOmniProcessor
from bough.multimodal.qwen_vl import QwenProcessor
from bough.multimodal.voxtral import VoxtralProcessor
from bough.multimodal.whisper import WhisperProcessor


def _llava(config: Fields) -> Processor:
    return PixtralProcessor(config) if is_pixtral(config) else LlavaProcessor(config)


FAMILIES: Final[Mapping[str, Callable[[Fields], Processor]]] = {
    "Qwen2VLForConditionalGeneration": partial(QwenProcessor, patch=14, kind="2"),
    "Qwen2_5_VLForConditionalGeneration": partial(QwenProcessor, patch=14, kind="2.5"),
    "Qwen3VLForConditionalGeneration": partial(QwenProcessor, patch=16, kind="3"),
    "Qwen3VLMoeForConditionalGeneration": partial(QwenProcessor, patch=16, kind="3"),
    "Qwen3_5ForConditionalGeneration": partial(QwenProcessor, patch=16, kind="3"),
    "Qwen3_5MoeForConditionalGeneration": partial(QwenProcessor, patch=16, kind="3"),
    "CLIPModel": ClipProcessor,
    "SiglipModel": SiglipProcessor,
    "Siglip2Model": NaflexProcessor,
    "Qwen2_5OmniForConditionalGeneration": partial(QwenOmniProcessor, patch=14, version="2.5"),
    "Qwen2_5OmniThinkerForConditionalGeneration": partial(QwenOmniProcessor, patch=14, version="2.5"),
    "Qwen3OmniMoeForConditionalGeneration": partial(QwenOmniProcessor, patch=16, version="3"),
    "Qwen3OmniMoeThinkerForConditionalGeneration": partial(QwenOmniProcessor, patch=16, version="3"),
    "Cohere2VisionForConditionalGeneration": Cohere2VisionProcessor,
    "DeepseekOcr2ForConditionalGeneration": Ocr2Processor,
    "Gemma3ForConditionalGeneration": Gemma3Processor,
    "Gemma3nForConditionalGeneration": Gemma3nProcessor,
    "Gemma4ForConditionalGeneration": Gemma4Processor,
    "Glm46VForConditionalGeneration": Glm4vProcessor,
    "Glm4vForConditionalGeneration": Glm4vProcessor,
    "Glm4vMoeForConditionalGeneration": Glm4vProcessor,
    "Idefics2ForConditionalGeneration": Idefics2Processor,
    "Idefics3ForConditionalGeneration": Idefics3Processor,
    "InternVLForConditionalGeneration": InternvlProcessor,
    "KimiK25ForConditionalGeneration": KimiProcessor,
    "Lfm2VlForConditionalGeneration": Lfm2VlProcessor,
    "Llama4ForConditionalGeneration": Llama4Processor,
    "LlavaForConditionalGeneration": _llava,
    "LlavaNextForConditionalGeneration": AnyresProcessor,
    "LlavaOnevisionForConditionalGeneration": AnyresProcessor,
    "MiniCPMV4_6ForConditionalGeneration": MiniCpmProcessor,
    "Mistral3ForConditionalGeneration": PixtralProcessor,
    "MllamaForConditionalGeneration": MllamaProcessor,
    "Phi4MMForCausalLM": Phi4Processor,
    "Phi4MultimodalForCausalLM": Phi4Processor,
    "Qwen2AudioForConditionalGeneration": Qwen2AudioProcessor,
    "Qwen3ASRForConditionalGeneration": Qwen3AsrProcessor,
    "SmolVLMForConditionalGeneration": Idefics3Processor,
    "VoxtralForConditionalGeneration": VoxtralProcessor,
    "WhisperForConditionalGeneration": WhisperProcessor,
}
"""Architecture -> what makes its processor from the checkpoint's config."""


def processor_of(config: Mapping[str, Any]) -> Processor | None:
    """The processor of the model that a config describes; None: it takes text only. Raises `ConfigError`."""
    fields = Fields(config)
    make = FAMILIES.get(fields.architecture())
    return None if make is None else make(fields)
