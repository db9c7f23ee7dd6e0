"""Draw the pictures of the pages, from results that are committed.

python docs/_tools/pictures [NAME ...]
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from pictures import PICTURES, draw, save


def main(names: list[str]) -> None:
    """Draw the pictures of these names, or all of them."""
    for name in names or PICTURES:
        for file, figure in draw(name).items():
            save(file, figure)
            print(file)


if __name__ == "__main__":
    main(sys.argv[1:])
