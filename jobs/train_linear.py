"""Train a hybrid of linear and full attention (LASP-2, LASP-2H): `raypack train` as a Ray job's entrypoint.

ray job submit -- python jobs/train_linear.py linear_gpu --data.corpus corpora/mine
"""

import sys

try:
    from raypack.driver.job import main
except ModuleNotFoundError as error:
    sys.exit(f"error: {error} for {sys.executable}: `make setup`, then use .venv/bin/python; or install raypack there")

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], "linear_local", __doc__))
