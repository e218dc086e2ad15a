"""One process of a job: ``accelerate launch --config_file DIR/accelerate.yaml -m toolkit.train RECIPE``.

Only a name to start; import toolkit.training.rank instead, so that ``from toolkit import train`` stays the function.
"""

import sys

from toolkit.training.rank import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
