"""Train a 1F3S hybrid-attention MoE model with layerwise repacking, on Ray Train.

python jobs/train_1f3s.py                                    # local: 4 CPU workers seen as 2 nodes of 2
python jobs/train_1f3s.py --run jobs/1f3s_gpu.toml           # 64 GPUs
python jobs/train_1f3s.py --dry-run                          # check all, show the first plan
ray job submit -- python jobs/train_1f3s.py --run.steps 100
"""

import os
import sys
from pathlib import Path

# Every step has other sizes: without this the CUDA allocator fragments.
os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")

try:
    from raypack.driver.job import main
except ModuleNotFoundError as error:
    sys.exit(f"error: {error} for {sys.executable}: `make setup`, then use .venv/bin/python; or install raypack there")

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], Path(__file__).with_name("1f3s_local.toml"), __doc__))
