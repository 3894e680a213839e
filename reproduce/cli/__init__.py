"""Define the commands of `python -m reproduce`.

The module `main` combines all commands into one program. `job` prepares a run of experiments, and
`shared` has code that several commands use. Every other module defines one command, or several
related commands.
"""
