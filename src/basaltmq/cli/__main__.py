"""`python -m basaltmq.cli` is `basalt`."""

from basaltmq.cli.main import main

if __name__ == "__main__":
    main(prog_name="basalt")
