"""`accelerate launch -m hf_posenc.training RECIPE`, also by torchrun or by Python alone."""

import sys

from .command import main

if __name__ == "__main__":
    main(sys.argv[1:])
