"""Trains the tiny model that sees of `tests/golden/vision`: SmolVLM's classes, fewer than a million parameters, on rendered
scenes, by one core of a CPU in some minutes.

    OMP_NUM_THREADS=1 python tests/media/train_vision.py tests/golden/vision

The tower learns first, by three classifiers over what it and its projector make of an image: through a language model that
knows nothing yet it would learn next to nothing for long. Then both learn to answer, one to three turns about each scene,
and the classifiers are thrown away. Prints losses and how many answers about held-back scenes are right; the checkpoint is
written in bfloat16 with its tokenizer and processor settings. Needs no more than transformers, tokenizers and Pillow.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
import transformers
from renders import COLOURS, QUESTIONS, SHAPES, SIDE, Scene, draw_scene, render
from torch import Tensor

END, SAID, BEGIN, IMAGE = "<|endoftext|>", "<|im_end|>", "<|im_start|>", "<image>"
FAKE, GLOBAL = "<fake_token_around_image>", "<global-img>"
SPECIAL = (END, SAID, BEGIN, IMAGE, FAKE, GLOBAL)
VOCAB = 384
PATCH, SHUFFLE = 8, 1
POSITIONS = (SIDE // PATCH // SHUFFLE) ** 2
TEMPLATE = (
    "{%- for message in messages %}{{ '<|im_start|>' + message.role + '\\n' }}"
    "{%- if message.content is string %}{{ message.content }}{% else %}"
    "{%- for part in message.content %}{% if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %}"
    "{%- endfor %}{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
ANSWERS = {"digit": tuple("0123456789"), "shape": SHAPES, "colour": tuple(COLOURS)}
IGNORED = -100


def make_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """Bytes, and what of the questions and answers is worth a token."""
    inner = tokenizers.Tokenizer(tokenizers.models.BPE())
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=VOCAB, special_tokens=list(SPECIAL), show_progress=False,
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
    )  # fmt: skip
    texts = [text for asked in QUESTIONS.values() for text in asked]
    texts += [answer for given in ANSWERS.values() for answer in given] + ["user\n", "assistant\n"]
    inner.train_from_iterator(sorted(texts) * 4, trainer)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token=SAID, pad_token=END, chat_template=TEMPLATE
    )


def make_model(tokenizer: transformers.PreTrainedTokenizerFast) -> transformers.SmolVLMForConditionalGeneration:
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4}
    config = transformers.SmolVLMConfig(
        text_config={
            **sizes, "model_type": "llama", "num_hidden_layers": 2, "num_key_value_heads": 2, "head_dim": 32,
            "vocab_size": VOCAB, "max_position_embeddings": 512, "rope_theta": 10000.0, "rms_norm_eps": 1e-6,
            "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None,
        },
        vision_config={**sizes, "num_hidden_layers": 3, "patch_size": PATCH, "image_size": SIDE},
        image_token_id=tokenizer.convert_tokens_to_ids(IMAGE), scale_factor=SHUFFLE, tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id, bos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.SmolVLMForConditionalGeneration(config)


class Talk:
    """Conversations about a scene as token ids."""

    def __init__(self, tokenizer: transformers.PreTrainedTokenizerFast) -> None:
        def encode(text: str) -> list[int]:
            found: list[int] = tokenizer.encode(text, add_special_tokens=False)
            return found

        image = FAKE + GLOBAL + IMAGE * POSITIONS + FAKE
        self.pad: int = tokenizer.pad_token_id
        self.begin = encode(f"{BEGIN}user\n{image}")
        self.again = encode(f"{BEGIN}user\n")
        self.asked = {q: encode(f"{q}{SAID}\n{BEGIN}assistant\n") for asked in QUESTIONS.values() for q in asked}
        self.given = {a: encode(f"{a}{SAID}") for given in ANSWERS.values() for a in given}
        self.after = encode("\n")

    def turns(self, scene: Scene, rng: random.Random, most: int) -> tuple[list[int], list[int]]:
        """(ids, what is learned at each)"""
        kinds = rng.sample(list(QUESTIONS), rng.randint(1, most))
        ids: list[int] = []
        learned: list[int] = []
        for number, kind in enumerate(kinds):
            given = self.given[scene.answer(kind)]
            before = (self.begin if not number else self.after + self.again) + self.asked[rng.choice(QUESTIONS[kind])]
            ids += before + given
            learned += [IGNORED] * len(before) + given
        return ids, learned

    def batch(self, scenes: Sequence[Scene], rng: random.Random, most: int) -> tuple[Tensor, Tensor]:
        rows = [self.turns(scene, rng, most) for scene in scenes]
        width = max(len(ids) for ids, _ in rows)
        ids = torch.tensor([row + [self.pad] * (width - len(row)) for row, _ in rows])
        learned = torch.tensor([row + [IGNORED] * (width - len(row)) for _, row in rows])
        return ids, learned


def pixels_of(scenes: Sequence[Scene]) -> np.ndarray:
    """uint8 [scenes, channels, height, width]"""
    return np.stack([np.asarray(render(scene)).transpose(2, 0, 1) for scene in scenes])


def values_of(pixels: Tensor) -> Tensor:
    return (pixels.float() / 255 - 0.5) / 0.5


def forward(model: Any, ids: Tensor, pixels: Tensor) -> Tensor:
    """Logits."""
    out: Tensor = model(input_ids=ids, pixel_values=values_of(pixels)[:, None]).logits
    return out


def right(model: Any, talk: Talk, scenes: Sequence[Scene], pixels: Tensor) -> float:
    """The part of answers (one about each scene) whose tokens are all the likeliest."""
    ids, learned = talk.batch(scenes, random.Random(5), 1)
    with torch.no_grad():
        best = forward(model.eval(), ids, pixels).argmax(-1)
    same = (best[:, :-1] == learned[:, 1:]) | (learned[:, 1:] == IGNORED)
    model.train()
    return float(same.all(1).float().mean())


class Classifiers(torch.nn.Module):
    """Digit, shape and colour from the mean of an image's embeddings."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.sizes = [len(given) for given in ANSWERS.values()]
        self.out = torch.nn.Linear(width, sum(self.sizes))

    def loss(self, features: Tensor, scenes: Sequence[Scene]) -> Tensor:
        parts = self.out(features.mean(1)).split(self.sizes, -1)
        losses = [
            torch.nn.functional.cross_entropy(part, torch.tensor([given.index(scene.answer(kind)) for scene in scenes]))
            for part, (kind, given) in zip(parts, ANSWERS.items(), strict=True)
        ]
        return torch.stack(losses).sum()


def train(options: argparse.Namespace) -> tuple[Any, Any, float]:
    tokenizer = make_tokenizer()
    model, talk = make_model(tokenizer), Talk(tokenizer)
    print(f"{sum(each.numel() for each in model.parameters()):,} parameters", flush=True)
    rng = random.Random(1)
    scenes = [draw_scene(rng) for _ in range(options.scenes)]
    held = [draw_scene(random.Random(f"held back {number}")) for number in range(400)]
    pixels, held_pixels = torch.from_numpy(pixels_of(scenes)), torch.from_numpy(pixels_of(held))
    classifiers = Classifiers(model.config.text_config.hidden_size)
    tower = [*model.model.vision_model.parameters(), *model.model.connector.parameters(), *classifiers.parameters()]
    everything = [*model.parameters(), *classifiers.parameters()]
    start, total = time.process_time(), 0.0
    steps = options.tower_steps + options.steps
    optimiser = torch.optim.AdamW(tower, lr=options.rate, betas=(0.9, 0.98), weight_decay=0.05)
    for step in range(steps):
        if step == options.tower_steps:
            optimiser = torch.optim.AdamW(everything, lr=options.rate, betas=(0.9, 0.98), weight_decay=0.05)
        at = step if step < options.tower_steps else step - options.tower_steps
        spent = at / (options.tower_steps if step < options.tower_steps else options.steps)
        rate = options.rate * min(1.0, (at + 1) / 50) * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * spent)))
        for group in optimiser.param_groups:
            group["lr"] = rate
        chosen = rng.choices(range(len(scenes)), k=options.batch)
        asked, seen = [scenes[each] for each in chosen], pixels[torch.tensor(chosen)]
        seen_by = model.model.get_image_features(values_of(seen)[:, None])
        features = torch.stack(list(seen_by.pooler_output))
        loss = classifiers.loss(features, asked)
        if step >= options.tower_steps:
            ids, learned = talk.batch(asked, rng, 3)
            logits = model(input_ids=ids, mm_encoder_outputs={"image": seen_by}).logits
            said = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), learned[:, 1:].flatten())
            loss = said + 0.1 * loss
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(everything, 1.0)
        optimiser.step()
        total += float(loss.detach())
        if (step + 1) % options.report == 0:
            found = right(model, talk, held, held_pixels)
            print(
                f"step {step + 1}: loss {total / options.report:.4f}, {found:.1%} right on held-back scenes, "
                f"{time.process_time() - start:.0f} s of a core", flush=True,
            )  # fmt: skip
            total = 0.0
    model = model.to(torch.bfloat16).float()
    found = right(model, talk, held, held_pixels)
    print(f"{found:.1%} right on {len(held)} held-back scenes, in bfloat16", flush=True)
    return model, tokenizer, found


def save(model: Any, tokenizer: Any, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    model.to(torch.bfloat16).cpu().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": TEMPLATE}, indent=1) + "\n")
    processor = {
        "image_processor_type": "SmolVLMImageProcessor", "do_image_splitting": False, "size": {"longest_edge": SIDE},
        "max_image_size": {"longest_edge": SIDE}, "image_mean": [0.5] * 3, "image_std": [0.5] * 3, "resample": 1,
    }  # fmt: skip
    (folder / "preprocessor_config.json").write_text(json.dumps(processor, indent=1) + "\n")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tower-steps", type=int, default=1000, help="of the tower alone")
    parser.add_argument("--steps", type=int, default=1500, help="of the whole model")
    parser.add_argument("--scenes", type=int, default=20000, help="that are trained on")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--report", type=int, default=100, help="steps between two lines")
    options = parser.parse_args(arguments)
    model, tokenizer, found = train(options)
    save(model, tokenizer, options.folder)
    return 0 if found >= 0.97 else 1


if __name__ == "__main__":
    raise SystemExit(main())
