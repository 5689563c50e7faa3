"""Facts out of free text, as Python objects: a schema per text, a batch that shares its instructions in the cache.

python examples/json_extraction.py
"""

from __future__ import annotations

import dataclasses

from backends import parser, use_backend

import bough as sgl


@dataclasses.dataclass
class City:
    name: str
    country: str
    population: int


TEXTS = [
    "Lisbon, the capital of Portugal, has about 545000 inhabitants and lies at the mouth of the Tagus.",
    "Some 709000 people live in Oslo. It is the largest city of Norway.",
    "Kyoto in Japan was the seat of the emperor; today it has 1460000 inhabitants.",
]


@sgl.function
def extract(s, text):
    s += sgl.system("You extract facts from a text and write them as one JSON object with name, country, population.")
    s += sgl.user(f"Text: {text}\nWrite the JSON object.")
    s += sgl.assistant(sgl.gen("city", schema=City, max_tokens=96))


def main() -> None:
    use_backend(parser(__doc__).parse_args())
    states = extract.run_batch([{"text": text} for text in TEXTS], temperature=0)
    for text, state in zip(TEXTS, states, strict=True):
        error = state.error()
        print(f"{text}\n  {error if error is not None else state['city']}")
    cities = [state["city"] for state in states if state.error() is None]
    assert cities, "no text gave a city"
    assert all(isinstance(city, City) and isinstance(city.population, int) for city in cities)


if __name__ == "__main__":
    main()
