"""The `bough` command: one file per subcommand, imported only when it is called.

in: argv. out: text on the terminal and an exit status. never: logic that users of the Python API need.
"""
