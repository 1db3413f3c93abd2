"""Calibrate a model on proteins: the same as `esm-turbo calibrate`.

python scripts/calibrate.py PROTEINS.fasta --model MODEL --out calibration.safetensors
"""

import sys

from esm_turbo.cli.app import main

if __name__ == "__main__":
    main(["calibrate", *sys.argv[1:]])
