"""Draw images from trained weights, shared by several processes; started by DeepSpeed's launcher, once per process.

deepspeed --num_gpus 2 launch/sample.py runs/cifar10 --count 50000 --out cifar10.npz
"""

import sys

from ddpm_ds.cli.rank import start

if __name__ == "__main__":
    sys.exit(start("ddpm_ds.cli.sample"))
