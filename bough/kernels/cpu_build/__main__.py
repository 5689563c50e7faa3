"""`python -m bough.kernels.cpu_build`: compiles the CPU kernels now, so that the first start need not."""

import logging
import sys

from bough.kernels.cpu_build import library

if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    found = library()
    logging.info("CPU kernels: %s", "torch's own" if found is None else found._name)
