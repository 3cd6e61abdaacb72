"""`python -m tcm`, the same as `tcm`; what torchrun starts on each process."""

from tcm.cli import main

if __name__ == "__main__":
    main()
