"""Fits the constants of `bough/config/step_cost.py` to the rows of `h200/step_times.json` that are marked for it, only.

    python benchmarks/fit_step_cost.py        # prints the constants; those in step_cost.py are its output

Which rows these are follows from a hash of their names. The search begins at `START`, guesses that belong to no measurement,
and a constant that few rows depend on stays near them.
"""

from __future__ import annotations

import math
from dataclasses import replace

from fleet import measured, predicted_ms

from bough.config.step_cost import Constants

START = {
    "read_share": 0.8, "compute_share": 0.8, "attention_read_share": 0.6, "attention_compute_share": 0.6,
    "expert_read_share": 0.6, "expert_compute_share": 0.6, "layer_s": 10e-6, "step_s": 100e-6, "row_s": 1e-6,
    "eager_layer_s": 100e-6,
}  # fmt: skip
_PULL = 0.002
"""How much a constant is held at its guess: the weight of its squared logarithmic distance beside those of errors."""
_FINEST = 1e-3


def loss(values: dict[str, float]) -> float:
    constants = replace(Constants(), **values)
    errors = [math.log(predicted_ms(row, constants) / row["ms"]) for row in measured() if row["part"] == "fitted"]
    pulls = [math.log(values[name] / START[name]) for name in START]
    return sum(each * each for each in errors) + _PULL * sum(each * each for each in pulls)


def fit() -> dict[str, float]:
    """By turns a step along each constant, and one along the way that a round went; steps shrink once none helps."""
    values, step = dict(START), 0.3
    least = loss(values)
    while step > _FINEST:
        before, began = dict(values), least
        for name in START:
            for factor in (1 + step, 1 / (1 + step)):
                tried = {**values, name: values[name] * factor}
                if (found := loss(tried)) < least:
                    values, least = tried, found
                    break
        ahead = {name: values[name] ** 2 / before[name] for name in START}
        if (found := loss(ahead)) < least:
            values, least = ahead, found
        if began - least < 1e-6:
            step /= 2
    return values


if __name__ == "__main__":
    for name, value in fit().items():
        print(f"    {name}: float = {value:.3g}")
