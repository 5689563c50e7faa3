"""The `bough` command: one file a subcommand, imported only when it is called.

in: argv. out: text on the terminal and an exit status. never: logic that a library user would want too.
"""
