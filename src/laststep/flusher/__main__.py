"""`python -m laststep.flusher SETUP`: the helper process."""

import sys

from laststep.flusher.starting import main

if __name__ == "__main__":
    main(sys.argv[1:])
