"""Rendered scenes for a tiny model that sees: a digit on a coloured shape, and questions about each."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cache

from PIL import Image, ImageDraw, ImageFont

SIDE = 32
"""Pixels: as few as a digit on a shape can be read from, so that the model is trained on one core."""
COLOURS = {
    "red": (230, 60, 60),
    "green": (60, 190, 80),
    "blue": (80, 130, 250),
    "yellow": (240, 220, 60),
    "purple": (190, 90, 220),
    "white": (248, 248, 248),
}
SHAPES = ("circle", "square", "triangle", "diamond")
QUESTIONS = {
    "digit": ("Which digit is it?", "What number do you see?"),
    "shape": ("Which shape is it?", "What is the shape?"),
    "colour": ("Which colour is it?", "What is its colour?"),
}


@dataclass(frozen=True)
class Scene:
    """What a picture shows."""

    digit: str
    shape: str
    colour: str
    seed: int
    """Of everything that no question is about: places, sizes, shades."""

    def answer(self, kind: str) -> str:
        return {"digit": self.digit, "shape": self.shape, "colour": self.colour}[kind]


def draw_scene(rng: random.Random) -> Scene:
    return Scene(str(rng.randrange(10)), rng.choice(SHAPES), rng.choice(list(COLOURS)), rng.getrandbits(30))


def render(scene: Scene) -> Image.Image:
    """The picture of a scene, always the same."""
    rng = random.Random(f"{scene}")
    shade = rng.randrange(110, 150)
    image = Image.new("RGB", (SIDE, SIDE), tuple(shade + rng.randrange(-12, 13) for _ in range(3)))
    draw = ImageDraw.Draw(image)
    x, y, r = SIDE / 2 + rng.uniform(-1.5, 1.5), SIDE / 2 + rng.uniform(-1.5, 1.5), rng.uniform(11.5, 13.5)
    fill = tuple(min(255, max(0, each + rng.randrange(-10, 11))) for each in COLOURS[scene.colour])
    if scene.shape == "circle":
        draw.ellipse((x - r, y - r, x + r, y + r), fill)
    elif scene.shape == "square":
        draw.rectangle((x - 0.85 * r, y - 0.85 * r, x + 0.85 * r, y + 0.85 * r), fill)
    elif scene.shape == "triangle":
        draw.polygon([(x, y - 1.2 * r), (x - 1.1 * r, y + 0.9 * r), (x + 1.1 * r, y + 0.9 * r)], fill)
    else:
        draw.polygon([(x, y - 1.2 * r), (x + 1.2 * r, y), (x, y + 1.2 * r), (x - 1.2 * r, y)], fill)
    place = (x + rng.uniform(-0.5, 0.5), y + rng.uniform(0, 1))
    draw.text(place, scene.digit, (0, 0, 0), _font(rng.randint(18, 20)), anchor="mm")
    return image


@cache
def _font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    """The one that comes with Pillow, so that pictures are the same everywhere."""
    return ImageFont.load_default(size)
