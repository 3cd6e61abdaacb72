"""`python -m tcm.cli`, which is how torchrun starts the command: `torchrun --nproc-per-node=8 -m tcm.cli sample …`."""

from tcm.cli import main

if __name__ == "__main__":
    main()
