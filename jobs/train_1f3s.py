"""Train a 1F3S hybrid-attention MoE model with layerwise repacking: `raypack train` as a Ray job's entrypoint.

ray job submit -- python jobs/train_1f3s.py 1f3s_gpu --data.corpus corpora/mine
"""

import sys

try:
    from raypack.driver.job import main
except ModuleNotFoundError as error:
    sys.exit(f"error: {error} for {sys.executable}: `make setup`, then use .venv/bin/python; or install raypack there")

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], "1f3s_local", __doc__))
