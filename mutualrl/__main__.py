"""`python -m mutualrl` is the command line."""

from __future__ import annotations

from mutualrl.cli import main

if __name__ == "__main__":
    main()
