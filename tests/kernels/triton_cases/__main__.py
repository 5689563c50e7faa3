"""Runs operations of the table, one line for each."""

import os
import sys
from typing import cast

import torch
from interpreting import quicken

from triton_cases.bed import Amount
from triton_cases.table import run

if __name__ == "__main__":
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if interpreted:
        quicken()
    where = torch.device("cpu" if interpreted else "cuda")
    amount = cast(Amount, sys.argv[3] if len(sys.argv) > 3 else "all")
    for operation in sys.argv[1].split(","):
        print(run(operation, where, int(sys.argv[2]), amount=amount), operation, "cases agree")
