"""The command line, called in this process."""

from moe_ops import cli


def exit_code(arguments):
    try:
        return cli.main(arguments)
    except SystemExit as left:
        return left.code
